"""How a grammar is begun over a vocabulary, and its limits: the router refuses by them what an executor would fail at.

Here and in `router/text/constraint.py` only does llguidance appear, beside the executor's state of a row.
"""

from collections.abc import Iterable

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

# Work on a grammar when it begins, in the step thread. With the library's own million "(a{1000}){1000}" stands in the
# way of every stream for seconds; with a tenth it fails in 0.2 s, and what people write still passes.
_INITIAL_LEXER_FUEL = 100_000
_SILENT = 0


def vocabulary_of(tokenizer: str, vocabulary_size: int, end_ids: Iterable[int]) -> LLTokenizer:
    """The bytes of every token. Takes up to seconds, and holds Python's lock meanwhile.

    Args:
        tokenizer: of the tokenizers library, as the JSON that it writes itself as.
        end_ids: tokens that end a sequence.

    Raises:
        ValueError: a tokenizer of a kind whose bytes are not known.
    """
    return LLTokenizer(tokenizer, n_vocab=vocabulary_size, eos_token=sorted(end_ids))


def begin(vocabulary: LLTokenizer, grammar: str) -> LLMatcher:
    """The state before the first token. Never raises: ask its `get_error`."""
    return LLMatcher(
        vocabulary, grammar, log_level=_SILENT, limits=LLParserLimits(initial_lexer_fuel=_INITIAL_LEXER_FUEL)
    )
