"""Random requests for fuzzing: any field of the message, as a client might set it or as nobody would; broken bytes.

A request is a prompt and a list of assignments to fields, found by walking the message's descriptor, so that a new
field is fuzzed without a word here. `PLAIN` says what a client would write; all else is drawn by type.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from hypothesis import strategies as st

from octavo.v1 import inference_pb2 as pb

MODEL_NAME = "fuzzed"
METHODS = {"Generate": pb.GenerateRequest, "GenerateStream": pb.GenerateStreamRequest}

_FLOATS = [0.0, -0.0, 1.0, 2.0, -2.0, 1e-45, 1e-6, 0.5, 3.4e38, float("inf"), float("-inf"), float("nan")]
_HUGE_STRINGS = st.builds(lambda text, times: text * times, st.text(min_size=1, max_size=4), st.integers(1, 50_000))
_TEXTS = st.one_of(st.text(max_size=40), st.sampled_from(["", "\0", "\x7f", "😀", "</s>", "<turn>"]), _HUGE_STRINGS)


def _integers(low: int, high: int) -> st.SearchStrategy[int]:
    edges = {low, low + 1, -1, 0, 1, 2, 255, 256, 299, 300, 65_536, high - 1, high}
    return st.one_of(st.sampled_from(sorted(edge for edge in edges if low <= edge <= high)), st.integers(low, high))


# Number of a field's type -> any value that its wire can say.
_BY_TYPE: dict[int, st.SearchStrategy[Any]] = {
    FieldDescriptor.TYPE_STRING: _TEXTS,
    FieldDescriptor.TYPE_BOOL: st.booleans(),
    FieldDescriptor.TYPE_FLOAT: st.one_of(st.sampled_from(_FLOATS), st.floats(width=32)),
    FieldDescriptor.TYPE_INT32: _integers(-(2**31), 2**31 - 1),
    FieldDescriptor.TYPE_INT64: _integers(-(2**63), 2**63 - 1),
    FieldDescriptor.TYPE_UINT32: _integers(0, 2**32 - 1),
    FieldDescriptor.TYPE_UINT64: _integers(0, 2**64 - 1),
}

_IDS = st.integers(0, 299)


def _many_ids(least: int, most: int) -> st.SearchStrategy[list[int]]:
    """In one draw: lists of drawn numbers cost most of the time."""
    return st.binary(min_size=least, max_size=most).map(list)


_SCHEMAS = [{"type": "integer"}, {"enum": ["a", 1, None]}, {"type": "array", "items": {"type": "boolean"}}, {}]
_REGEX_PIECES = ["a", "b", "[0-9]", "(", ")", "|", "*", "+", "?", "{2,3}", "{1000}", "\\w", ".", "^", "$", "[^a]", "é"]
_GRAMMAR_PIECES = ["start", ": ", '"a"', "/[a-z]+/", "\n", "x", " | ", "*", "(", ")", "%json {}", "%ignore / /"]
_resumes = st.builds(pb.Resume, index=_integers(0, 2**32 - 1) | st.just(0), token_ids=_many_ids(0, 6))
_messages = st.builds(pb.ChatMessage, role=st.sampled_from(["user", "system", ""]) | _TEXTS, content=_TEXTS)

# What clients write, where any value of the type would hardly ever do.
PLAIN: dict[str, st.SearchStrategy[Any]] = {
    "request_id": st.sampled_from(["one", "two", "three"]),  # few: they meet each other
    "model": st.just(MODEL_NAME),
    "sampling.temperature": st.floats(0, 2, width=32),
    "sampling.top_p": st.floats(0.0625, 1, width=32),
    "sampling.top_k": st.integers(-1, 400),
    "sampling.min_p": st.floats(0, 1, width=32),
    "sampling.presence_penalty": st.floats(-2, 2, width=32),
    "sampling.frequency_penalty": st.floats(-2, 2, width=32),
    "sampling.repetition_penalty": st.floats(0.0625, 2, width=32),
    "sampling.logit_bias": st.dictionaries(_IDS, st.floats(-100, 100, width=32), max_size=6),
    "sampling.allowed_token_ids": _many_ids(0, 8),
    "sampling.bad_words": st.lists(st.text(min_size=1, max_size=4), max_size=4),
    "sampling.n": st.integers(1, 6),
    "sampling.best_of": st.integers(1, 6),
    "sampling.beam.width": st.integers(1, 6),
    "stopping.max_tokens": st.integers(1, 8),
    "stopping.min_tokens": st.integers(0, 8),
    "stopping.stop": st.lists(st.text(min_size=1, max_size=3), max_size=4),
    "stopping.stop_token_ids": _many_ids(0, 6),
    "output.top_logprobs": st.integers(0, 20),
    "constraint.json_schema": st.sampled_from(_SCHEMAS).map(json.dumps),
    "constraint.regex": st.lists(st.sampled_from(_REGEX_PIECES), max_size=8).map("".join),
    "constraint.grammar": st.lists(st.sampled_from(_GRAMMAR_PIECES), max_size=12).map("".join),
    "constraint.choice.options": st.lists(st.text(max_size=6), max_size=4),
    "cache.salt": st.sampled_from(["", "salt"]),
    "priority": st.integers(-2, 2),
    "time_limit.seconds": st.integers(0, 1),
    "time_limit.nanos": st.integers(0, 10**8),
    "resume": st.lists(_resumes, max_size=3),
    "chat.messages": st.lists(_messages, max_size=3),
}


@dataclass(frozen=True)
class Call:
    """A request on its way. `message` is None where its bytes were broken, whatever a server may read in them."""

    method: str
    body: bytes
    message: Any


def _leaves(descriptor: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(path, field) of all that can be set; a message within is walked, a list of messages is one field."""
    for field in descriptor.fields:
        path = f"{prefix}{field.name}"
        if field.type == FieldDescriptor.TYPE_MESSAGE and not field.is_repeated:
            yield from _leaves(field.message_type, f"{path}.")
        else:
            yield path, field


def _any_value(path: str, field: Any) -> st.SearchStrategy[Any]:
    if field.type == FieldDescriptor.TYPE_MESSAGE and not field.message_type.GetOptions().map_entry:
        return PLAIN[path]
    if field.type == FieldDescriptor.TYPE_MESSAGE:
        key, value = (_BY_TYPE[part.type] for part in field.message_type.fields)
        return st.dictionaries(key, value, max_size=4)
    one = _BY_TYPE[field.type]
    return st.lists(one, max_size=4) if field.is_repeated else one


_LEAVES = dict(_leaves(pb.GenerateRequest.DESCRIPTOR))
assert PLAIN.keys() <= _LEAVES.keys(), PLAIN.keys() - _LEAVES.keys()
_PROMPTS = ("text", "token_ids.ids", "chat.messages")
_ALONE_REFUSED = ("sampling.beam.length_penalty", "sampling.beam.early_stopping", "adapter")
_prompt = st.one_of(
    st.tuples(st.just("text"), st.text(min_size=1, max_size=20)),
    st.tuples(st.just("token_ids.ids"), _many_ids(1, 30)),
    st.tuples(st.just("chat.messages"), PLAIN["chat.messages"]),
)
_plain = st.one_of(
    [
        st.tuples(st.just(path), PLAIN.get(path, _any_value(path, field)))
        for path, field in _LEAVES.items()
        if path not in _PROMPTS and path not in _ALONE_REFUSED
    ]
)
_wild = st.one_of([st.tuples(st.just(path), _any_value(path, field)) for path, field in _LEAVES.items()])
_length = st.tuples(st.just("stopping.max_tokens"), PLAIN["stopping.max_tokens"])


def _assign(message: Any, path: str, value: Any) -> None:
    *parents, name = path.split(".")
    for parent in parents:
        message = getattr(message, parent)
    if isinstance(value, list):
        message.SetInParent()
        getattr(message, name).extend(value)
    elif isinstance(value, dict):
        getattr(message, name).update(value)
    else:
        setattr(message, name, value)


@st.composite
def _edits(draw: Any, body: bytes) -> bytes:
    """Bytes flipped, cut, put in or sent twice; a string that is no UTF-8; fields that nobody knows."""
    for _ in range(draw(st.integers(1, 4))):
        place = draw(st.integers(0, len(body)))
        piece = draw(
            st.binary(max_size=4)
            | st.sampled_from([b"\x0a\x02\xff\xfe", b"\x1a\x03\xed\xa0\x80", b"\xf8\x07\x01", b"\x0b", b"\x32\x05\x0d"])
        )
        kept = draw(st.sampled_from([0, 1, len(piece), len(body)]))
        body = body[:place] + piece + body[place + kept :]
    return body


@st.composite
def calls(draw: Any) -> Call:
    """One call: mostly as a client would write it, often with one field as nobody would, sometimes broken."""
    method = draw(st.sampled_from(sorted(METHODS)))
    message = METHODS[method]()
    assignments = [draw(_prompt), draw(_length), *draw(st.lists(_plain, max_size=5))]
    assignments += draw(st.just([]) | st.just([]) | st.lists(_wild, max_size=1) | st.lists(_wild, max_size=6))
    dropped = draw(st.none() | st.none() | st.none() | st.integers(0, len(assignments) - 1))
    for place, (path, value) in enumerate(assignments):
        if place != dropped:
            _assign(message, path, value)
    body = message.SerializeToString()
    if draw(st.sampled_from([False] * 5 + [True])):
        return Call(method, draw(_edits(body)), None)
    return Call(method, body, message)
