"""Every field of a request against its range, before anything is allocated. All violations are named at once.

Not here: whether a request fits the pool (admission), and defaults that need the prompt.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from octavo.errors import Code, FieldViolation, OctavoError, invalid_argument
from router.model import Model
from router.raw import RawRequest
from router.request import CheckedRequest, Output, Prompt, Sampling, Stopping, seed_of

MAX_REQUEST_ID_BYTES = 128
MAX_SALT_BYTES = 256
MAX_CHAT_MESSAGES = 4096
MAX_TEMPERATURE = 2.0
MAX_TOP_LOGPROBS = 20

_NOT_SUPPORTED = "is not supported yet; leave it unset"


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Sizes of lists that a request may carry."""

    max_stop_strings: int
    max_stop_string_bytes: int
    max_stop_token_ids: int


class _Violations(list[FieldViolation]):
    """What is wrong, by field."""

    def check(self, is_good: bool, field: str, description: str) -> None:
        if not is_good:
            self.append(FieldViolation(field, description))


def validate(raw: RawRequest, model: Model, limits: RequestLimits, new_request_id: str) -> CheckedRequest:
    """Check every field and fill in the defaults.

    Args:
        new_request_id: for a request that names none.

    Raises:
        OctavoError: NOT_FOUND for the model; INVALID_ARGUMENT with each bad field's path and its allowed range.
    """
    check_model(raw.model, model)
    wrong = _Violations()
    _check_unsupported(raw, model, wrong)
    _check_names(raw, wrong)
    _check_prompt(raw, model, wrong)
    _check_sampling(raw, wrong)
    _check_stopping(raw, model, limits, wrong)
    _check_output(raw, wrong)
    if wrong:
        raise invalid_argument(*wrong)
    return _checked(raw, raw.request_id or new_request_id, model)


def check_model(name: str, model: Model) -> None:
    """Unset is the only model that is served.

    Raises:
        OctavoError: NOT_FOUND.
    """
    if name and name != model.name:
        raise OctavoError(
            Code.NOT_FOUND,
            "MODEL_NOT_FOUND",
            f"model: there is no model of this name; served is {model.name!r}",
            metadata={"served": model.name},
        )


def check_token_ids(field: str, token_ids: Iterable[int], vocabulary_size: int) -> None:
    """Raises OctavoError, INVALID_ARGUMENT, for an id outside of the vocabulary."""
    wrong = _Violations()
    _check_ids(field, token_ids, vocabulary_size, wrong)
    if wrong:
        raise invalid_argument(*wrong)


def _check_unsupported(raw: RawRequest, model: Model, wrong: _Violations) -> None:
    for path, value in raw.floats.items():
        wrong.check(math.isfinite(value), path, f"is {value}; only finite numbers are allowed")
    for path, ids in raw.ids.items():
        _check_ids(path, ids, model.vocabulary_size, wrong)
    named = {violation.field for violation in wrong}
    for path in raw.unsupported:
        if not any(field.startswith(path) for field in named):
            wrong.append(FieldViolation(path, _NOT_SUPPORTED))


def _check_names(raw: RawRequest, wrong: _Violations) -> None:
    size = len(raw.request_id.encode())
    wrong.check(size <= MAX_REQUEST_ID_BYTES, "request_id", f"has {size} bytes; at most {MAX_REQUEST_ID_BYTES}")
    size = len((raw.salt or "").encode())
    wrong.check(size <= MAX_SALT_BYTES, "cache.salt", f"has {size} bytes; at most {MAX_SALT_BYTES}")


def _check_prompt(raw: RawRequest, model: Model, wrong: _Violations) -> None:
    if raw.text is not None:
        wrong.check(raw.text != "", "text", "is empty; at least one character")
    elif raw.token_ids is not None:
        wrong.check(len(raw.token_ids) > 0, "token_ids", "is empty; at least one id")
        # A longer one is refused for its length, which costs nothing, before anybody walks over it.
        if len(raw.token_ids) < model.max_context_tokens:
            _check_ids("token_ids", raw.token_ids, model.vocabulary_size, wrong)
    elif raw.chat is not None:
        count = len(raw.chat.messages)
        is_good = 1 <= count <= MAX_CHAT_MESSAGES
        wrong.check(is_good, "chat.messages", f"has {count} messages; 1 to {MAX_CHAT_MESSAGES}")
    else:
        wrong.append(FieldViolation("prompt", "is unset; set text, token_ids or chat"))


def _check_sampling(raw: RawRequest, wrong: _Violations) -> None:
    _check_range("sampling.temperature", raw.temperature, 0.0, MAX_TEMPERATURE, wrong)
    if raw.top_p is not None:
        wrong.check(0 < raw.top_p <= 1, "sampling.top_p", f"is {raw.top_p}; allowed is (0, 1]")
    _check_range("sampling.min_p", raw.min_p, 0.0, 1.0, wrong)
    if raw.top_k is not None:
        wrong.check(raw.top_k >= -1, "sampling.top_k", f"is {raw.top_k}; allowed are -1 and 0 (off), and 1 and more")


def _check_stopping(raw: RawRequest, model: Model, limits: RequestLimits, wrong: _Violations) -> None:
    if raw.max_tokens is not None:
        field, allowed = "stopping.max_tokens", "allowed is 1 and more, or unset: as far as context and pool reach"
        wrong.check(raw.max_tokens >= 1, field, f"is {raw.max_tokens}; {allowed}")
    min_tokens = raw.min_tokens or 0
    wrong.check(min_tokens >= 0, "stopping.min_tokens", f"is {min_tokens}; allowed is 0 and more")
    if raw.max_tokens is not None and raw.max_tokens >= 1:
        message = f"is {min_tokens}; at most stopping.max_tokens, {raw.max_tokens}"
        wrong.check(min_tokens <= raw.max_tokens, "stopping.min_tokens", message)
    _check_stop_strings(raw.stop, limits, wrong)
    _check_stop_ids(raw, model, limits, wrong)


def _check_stop_strings(stops: Sequence[str], limits: RequestLimits, wrong: _Violations) -> None:
    if len(stops) > limits.max_stop_strings:
        wrong.append(FieldViolation("stopping.stop", f"has {len(stops)} strings; at most {limits.max_stop_strings}"))
        return
    for index, stop in enumerate(stops):
        size = len(stop.encode())
        message = f"has {size} bytes; 1 to {limits.max_stop_string_bytes}"
        wrong.check(1 <= size <= limits.max_stop_string_bytes, f"stopping.stop[{index}]", message)


def _check_stop_ids(raw: RawRequest, model: Model, limits: RequestLimits, wrong: _Violations) -> None:
    count, field = len(raw.stop_token_ids), "stopping.stop_token_ids"
    if count > limits.max_stop_token_ids:
        wrong.append(FieldViolation(field, f"has {count} ids; at most {limits.max_stop_token_ids}"))
        return
    _check_ids(field, raw.stop_token_ids, model.vocabulary_size, wrong)
    if raw.min_tokens and len({*raw.stop_token_ids, *model.eos_token_ids}) >= model.vocabulary_size:
        wrong.append(FieldViolation(field, "leaves no token that min_tokens allows; name fewer ids"))


def _check_output(raw: RawRequest, wrong: _Violations) -> None:
    field, count = "output.top_logprobs", raw.top_logprobs
    wrong.check(count <= MAX_TOP_LOGPROBS, field, f"is {count}; allowed is 0 to {MAX_TOP_LOGPROBS}")
    wrong.check(raw.logprobs or not count, field, f"is {count}, but output.logprobs is not set; set it too")


def _check_ids(field: str, token_ids: Iterable[int], vocabulary_size: int, wrong: _Violations) -> None:
    for index, token_id in enumerate(token_ids):
        if not 0 <= token_id < vocabulary_size:
            wrong.append(FieldViolation(f"{field}[{index}]", f"is {token_id}; allowed is 0 to {vocabulary_size - 1}"))
            return


def _check_range(field: str, value: float | None, low: float, high: float, wrong: _Violations) -> None:
    """NaN is in no range."""
    if value is not None:
        wrong.check(low <= value <= high, field, f"is {value}; allowed is [{low:g}, {high:g}]")


def _checked(raw: RawRequest, request_id: str, model: Model) -> CheckedRequest:
    sampling = Sampling(
        temperature=1.0 if raw.temperature is None else raw.temperature,
        top_k=min(max(raw.top_k or 0, 0), model.vocabulary_size),
        top_p=1.0 if raw.top_p is None else raw.top_p,
        min_p=raw.min_p or 0.0,
        seed=seed_of(request_id) if raw.seed is None else raw.seed,
    )
    stopping = Stopping(
        max_tokens=raw.max_tokens,
        min_tokens=raw.min_tokens or 0,
        stop=tuple(raw.stop),
        stop_token_ids=frozenset(raw.stop_token_ids),
        include_stop=raw.include_stop,
        ignore_eos=raw.ignore_eos,
    )
    return CheckedRequest(
        request_id=request_id,
        prompt=_prompt(raw),
        sampling=sampling,
        stopping=stopping,
        output=Output(raw.logprobs, raw.top_logprobs, raw.skip_special_tokens),
        salt=raw.salt,
        bypass_cache=raw.bypass_cache,
        priority=raw.priority,
    )


def _prompt(raw: RawRequest) -> Prompt:
    if raw.text is not None:
        return raw.text
    if raw.token_ids is not None:
        return raw.token_ids
    assert raw.chat is not None, "checked before"
    return raw.chat
