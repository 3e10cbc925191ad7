"""Constraints into grammars: what a client asks for becomes the one text that executors follow, or is refused.

Compiling a grammar takes milliseconds, a hard one seconds: call it off the event loop. Not here: what goes with a
constraint and what does not (validation).
"""

import json

from llguidance import LLMatcher

from octavo.errors import FieldViolation, OctavoError, invalid_argument
from router.request import Constraint

_MAX_MESSAGE_CHARS = 300
# Enough to indent by; without a bound a model could write spaces for ever.
_WHITESPACE = r"[ \n]{1,24}"


def grammar_of(constraint: Constraint) -> str:
    """The grammar in the library's own form.

    Raises:
        OctavoError: INVALID_ARGUMENT, with what is wrong and where.
    """
    try:
        grammar = _MAKERS[constraint.kind](constraint)
    except (ValueError, RecursionError) as error:
        raise _refused(constraint, f"is no JSON Schema: {error}") from None
    is_error, messages = LLMatcher.validate_grammar_with_warnings(grammar)
    if is_error or messages:  # a warning says that something of the constraint would not be held to
        raise _refused(constraint, "; ".join(messages))
    return grammar


def _of_schema(constraint: Constraint) -> str:
    # Read and written anew: the library pastes the text into a document of its own.
    schema = json.loads(constraint.texts[0])
    if not isinstance(schema, dict):
        raise ValueError("a schema is an object")
    return LLMatcher.grammar_from_json_schema(json.dumps(schema), defaults={"whitespace_pattern": _WHITESPACE})


def _of_regex(constraint: Constraint) -> str:
    return LLMatcher.grammar_from_regex(constraint.texts[0])


def _of_grammar(constraint: Constraint) -> str:
    return LLMatcher.grammar_from_lark(constraint.texts[0])


def _of_choice(constraint: Constraint) -> str:
    # Strings of the grammar are written as those of JSON.
    return LLMatcher.grammar_from_lark("start: " + " | ".join(json.dumps(text) for text in constraint.texts))


_MAKERS = {"json_schema": _of_schema, "regex": _of_regex, "grammar": _of_grammar, "choice": _of_choice}


def _refused(constraint: Constraint, message: str) -> OctavoError:
    return invalid_argument(FieldViolation(f"constraint.{constraint.kind}", message[:_MAX_MESSAGE_CHARS]))
