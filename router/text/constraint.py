"""Constraints into grammars: what a client asks for becomes the one text that executors follow, or is refused.

Compiling a grammar takes milliseconds, and one that means harm any time and memory: only the compiler's own process
does it (`constraint_worker`). Not here: what goes with a constraint and what does not (validation).
"""

import json
from collections.abc import Iterator, Sequence

from llguidance import LLMatcher, LLTokenizer

from octavo.grammar import begin
from router.request import Constraint

# Enough to indent by; without a bound a model could write spaces for ever.
_WHITESPACE = r"[ \n]{1,24}"
_NO_TEXT = "NoExtensionBias"
_NO_FORCING = '%llguidance {"no_forcing": true}'


class RefusedError(Exception):
    """What is wrong with a constraint."""


def grammar_of(constraint: Constraint, vocabulary: LLTokenizer) -> str:
    """The grammar in the library's own form, which a row can begin with.

    Raises:
        RefusedError: it is wrong, something of it would not be held to, or it is beyond a limit of the library.
    """
    try:
        grammar = _MAKERS[constraint.kind](constraint)
    except (ValueError, RecursionError) as error:
        raise RefusedError(f"is no JSON Schema: {error}") from None
    is_error, messages = LLMatcher.validate_grammar_with_warnings(grammar)
    if is_error or messages:  # a warning says that something of the constraint would not be held to
        raise RefusedError("; ".join(messages))
    grammar = _without_forcing(grammar)
    _check_begins(grammar, vocabulary)
    return grammar


def allows(grammar: str, vocabulary: LLTokenizer, token_ids: Sequence[int]) -> bool:
    """Whether an answer may have begun so. What follows an end is not the grammar's."""
    matcher, ends = begin(vocabulary, grammar), frozenset(vocabulary.eos_tokens)
    for token_id in token_ids:
        if token_id in ends:
            return bool(matcher.is_accepting())
        if matcher.is_stopped() or not matcher.consume_token(token_id):
            return False
    return True


def _without_forcing(grammar: str) -> str:
    """Where only one text can follow, the library lets pass nothing but the tokens that its tokenizer makes of it.

    Of a text that reads as a special token, as "<s>", that is the special token, which the grammar then refuses.
    """
    lark = grammar
    if grammar.startswith("{"):  # the library's own form of a regex or a schema
        (inner,) = json.loads(grammar)["grammars"]
        schema = inner.get("json_schema")
        lark = inner["lark_grammar"] if schema is None else f"start: %json {json.dumps(schema)}"
    return LLMatcher.grammar_from_lark(f"{lark}\n{_NO_FORCING}\n")


def _check_begins(grammar: str, vocabulary: LLTokenizer) -> None:
    """What an executor would do for a first token, and for one behind it: many limits are met only there."""
    matcher = begin(vocabulary, grammar)
    allowed = b"" if matcher.is_error() else matcher.compute_bitmask()
    ends = frozenset(vocabulary.eos_tokens)
    going_on = next((token for token in _set_bits(allowed) if token not in ends), None)
    if going_on is not None:
        matcher.consume_token(going_on)
    elif not matcher.is_error() and not matcher.is_accepting():
        raise RefusedError("can begin with no token of the vocabulary: nothing matches it")
    if matcher.is_error():
        reason = matcher.get_error().partition("\n")[0]  # its state is below
        if reason == _NO_TEXT:
            raise RefusedError("is matched by no text")
        raise RefusedError(f"is beyond a limit of the grammar library: {reason}")


def _set_bits(bits: bytes) -> Iterator[int]:
    return (8 * place + bit for place, byte in enumerate(bits) if byte for bit in range(8) if byte >> bit & 1)


def _of_schema(constraint: Constraint) -> str:
    # Read and written anew: the library pastes the text into a document of its own.
    schema = json.loads(constraint.texts[0])
    if not isinstance(schema, dict):
        raise ValueError("a schema is an object")
    return LLMatcher.grammar_from_json_schema(json.dumps(schema), defaults={"whitespace_pattern": _WHITESPACE})


def _of_regex(constraint: Constraint) -> str:
    return LLMatcher.grammar_from_regex(constraint.texts[0])


def _of_grammar(constraint: Constraint) -> str:
    text = constraint.texts[0]
    if text.lstrip().startswith("{"):
        raise RefusedError("is no grammar in Lark's form: it begins with {")
    return LLMatcher.grammar_from_lark(text)


def _of_choice(constraint: Constraint) -> str:
    # Strings of the grammar are written as those of JSON.
    return LLMatcher.grammar_from_lark("start: " + " | ".join(json.dumps(text) for text in constraint.texts))


_MAKERS = {"json_schema": _of_schema, "regex": _of_regex, "grammar": _of_grammar, "choice": _of_choice}
