"""What a row's answer must match: a grammar, followed token by token, that says which tokens may come next.

The grammar is the library's own text, made and checked by the router. The state lives here, next to the history, so
that a row feeds its own tokens to it and needs nobody between two steps. Errors of a grammar (its limits, a vocabulary
that cannot go on) are the row's, never the step's.
"""

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from executor.step import Bools, Ints
from octavo.grammar import begin

log = logging.getLogger(__name__)

_NONE = "this executor serves no constraints"
_DEAD_END = "no token of the vocabulary continues this answer"


class Constraint:
    """The state of one row's grammar. `error`: why nothing can come next; empty while something can."""

    def __init__(self, matcher: LLMatcher | None, tokenizer: LLTokenizer | None, error: str = "") -> None:
        self._matcher = matcher
        self._ends = frozenset(tokenizer.eos_tokens if tokenizer is not None else ())
        self._vocabulary_size = tokenizer.vocab_size if tokenizer is not None else 0
        self.error = error or (_error_of(matcher) if matcher is not None else _NONE)

    def append(self, token_id: int) -> None:
        """The row generated a token. What follows an end is not the grammar's."""
        if self._matcher is None or self._matcher.is_stopped() or token_id in self._ends:
            return
        if not self._matcher.consume_token(token_id):
            self.error = _error_of(self._matcher) or f"token {token_id} does not continue this answer"

    def allowed(self) -> Bools | None:
        """[vocabulary_size]: what may come next; ends of sequence where the answer is whole. None after an error."""
        if self.error or self._matcher is None:
            return None
        bits = np.zeros((self._vocabulary_size + 31) // 32, dtype=np.uint32)
        self._matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        allowed = np.unpackbits(bits.view(np.uint8), bitorder="little")[: self._vocabulary_size].astype(np.bool_)
        self.error = _error_of(self._matcher) or ("" if allowed.any() else _DEAD_END)
        return None if self.error else allowed


def _error_of(matcher: LLMatcher) -> str:
    """Without what the library writes below it: its state, and the whole grammar."""
    return matcher.get_error().partition("\n")[0]


# Grammar and generated tokens, [num_generated], to a row's constraint. Never raises: errors are the constraint's.
MakeConstraint = Callable[[str, Ints], Constraint]


def no_constraint(grammar: str, generated: Ints) -> Constraint:
    """Where there is no vocabulary to follow grammars with."""
    return Constraint(None, None)


class ConstraintMaker:
    """Makes constraints for a model's vocabulary, which takes seconds to read: in the background, from the start on."""

    def __init__(self, load: Callable[[], LLTokenizer]) -> None:
        """load: called once, in a thread; raises OctavoError, OSError or ValueError where there is no vocabulary."""
        self._tokenizer: Future[LLTokenizer] = Future()
        self._tokenizer.add_done_callback(_report)
        # A daemon: a process that is told to end does not wait for a vocabulary.
        threading.Thread(target=_fill, args=(self._tokenizer, load), name="vocabulary", daemon=True).start()

    def make(self, grammar: str, generated: Ints) -> Constraint:
        """Waits for the vocabulary."""
        try:
            tokenizer = self._tokenizer.result()
        except Exception as error:  # as `load` failed, whatever the library raised: the row's failure, not the step's
            return Constraint(None, None, f"constraints cannot be served: {error}")
        constraint = Constraint(begin(tokenizer, grammar), tokenizer)
        for token_id in generated.tolist():
            constraint.append(token_id)
        return constraint


def _fill(tokenizer: "Future[LLTokenizer]", load: Callable[[], LLTokenizer]) -> None:
    try:
        tokenizer.set_result(load())
    except Exception as error:
        tokenizer.set_exception(error)


def _report(tokenizer: "Future[LLTokenizer]") -> None:
    if tokenizer.exception() is not None:
        log.warning("constraints cannot be served: %s", tokenizer.exception())
