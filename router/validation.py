"""Every field of a request against its range, before anything is allocated. All violations are named at once.

Not here: whether a request fits the pool (admission), and defaults that need the prompt.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from octavo.errors import FieldViolation, invalid_argument
from router.beam_validation import check_beam
from router.model import Model
from router.raw import RawRequest
from router.request import CacheScope, CheckedRequest, Output, Prompt, Sampling, Stopping, seed_of
from router.tenants.tenant import NOBODY, Tenant

MAX_REQUEST_ID_BYTES = 128
MAX_SALT_BYTES = 256
MAX_CHAT_MESSAGES = 4096
MAX_TEMPERATURE = 2.0
MAX_PENALTY = 2.0  # of presence, frequency and repetition
MAX_BIAS = 100.0
MAX_LOGIT_BIASES = 1024
MAX_BAD_WORDS = 64
MAX_BAD_WORD_BYTES = 256
MAX_TOP_LOGPROBS = 20
MAX_CONSTRAINT_BYTES = 65536
MAX_CONSTRAINT_OPTIONS = 256
MAX_TIME_LIMIT_S = 1e9

_NOT_SUPPORTED = "is not supported yet; leave it unset"


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Sizes of lists that a request may carry."""

    max_stop_strings: int
    max_stop_string_bytes: int
    max_stop_token_ids: int
    max_choices: int = 16


class _Violations(list[FieldViolation]):
    """What is wrong, by field."""

    def check(self, is_good: bool, field: str, description: str) -> None:
        if not is_good:
            self.append(FieldViolation(field, description))


def validate(
    raw: RawRequest, model: Model, limits: RequestLimits, new_request_id: str, tenant: Tenant = NOBODY
) -> CheckedRequest:
    """Check every field and fill in the defaults.

    Args:
        new_request_id: for a request that names none.
        tenant: whose request it is.

    Raises:
        OctavoError: INVALID_ARGUMENT with each bad field's path and its allowed range.
    """
    wrong = _Violations()
    _check_unsupported(raw, model, wrong)
    _check_names(raw, wrong)
    _check_prompt(raw, model, wrong)
    _check_sampling(raw, wrong)
    _check_logit_rules(raw, model, wrong)
    _check_choices(raw, limits, wrong)
    check_beam(raw, limits.max_choices, wrong.check)
    _check_stopping(raw, model, limits, wrong)
    _check_output(raw, wrong)
    _check_constraint(raw, wrong)
    _check_time_limit(raw, wrong)
    _check_resume(raw, model, wrong)
    if wrong:
        raise invalid_argument(*wrong)
    return _checked(raw, raw.request_id or new_request_id, model, tenant)


def check_count(field: str, count: int, most: int) -> None:
    """Raises OctavoError, INVALID_ARGUMENT, for a list so long that walking over it would hold up everybody."""
    if count > most:
        raise invalid_argument(FieldViolation(field, f"has {count} ids; at most {most}, the model's context"))


def check_token_ids(field: str, token_ids: Iterable[int], vocabulary_size: int) -> None:
    """Raises OctavoError, INVALID_ARGUMENT, for an id outside of the vocabulary."""
    wrong = _Violations()
    _check_ids(field, token_ids, vocabulary_size, wrong)
    if wrong:
        raise invalid_argument(*wrong)


def _check_unsupported(raw: RawRequest, model: Model, wrong: _Violations) -> None:
    for path, ids in raw.ids.items():
        _check_ids(path, ids[: model.max_context_tokens], model.vocabulary_size, wrong)
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


def _check_logit_rules(raw: RawRequest, model: Model, wrong: _Violations) -> None:
    _check_range("sampling.presence_penalty", raw.presence_penalty, -MAX_PENALTY, MAX_PENALTY, wrong)
    _check_range("sampling.frequency_penalty", raw.frequency_penalty, -MAX_PENALTY, MAX_PENALTY, wrong)
    if (penalty := raw.repetition_penalty) is not None:
        message = f"is {penalty}; allowed is (0, {MAX_PENALTY:g}], 1 is off"
        wrong.check(0 < penalty <= MAX_PENALTY, "sampling.repetition_penalty", message)
    _check_biases(raw.logit_bias, model, wrong)
    _check_allowed(raw, model, wrong)
    field, count = "sampling.bad_words", len(raw.bad_words)
    wrong.check(count <= MAX_BAD_WORDS, field, f"has {count} words; at most {MAX_BAD_WORDS}")
    for index, word in enumerate(raw.bad_words[:MAX_BAD_WORDS]):
        size = len(word.encode())
        message = f"has {size} bytes; 1 to {MAX_BAD_WORD_BYTES}"
        wrong.check(1 <= size <= MAX_BAD_WORD_BYTES, f"{field}[{index}]", message)


def _check_biases(biases: Mapping[int, float], model: Model, wrong: _Violations) -> None:
    field = "sampling.logit_bias"
    if len(biases) > MAX_LOGIT_BIASES:
        wrong.append(FieldViolation(field, f"has {len(biases)} ids; at most {MAX_LOGIT_BIASES}"))
        return
    for token_id, bias in biases.items():
        is_known = 0 <= token_id < model.vocabulary_size
        wrong.check(is_known, f"{field}[{token_id}]", f"is no id; allowed are 0 to {model.vocabulary_size - 1}")
        _check_range(f"{field}[{token_id}]", bias, -MAX_BIAS, MAX_BIAS, wrong)


def _check_allowed(raw: RawRequest, model: Model, wrong: _Violations) -> None:
    count, field = len(raw.allowed_token_ids), "sampling.allowed_token_ids"
    if count > model.vocabulary_size:
        wrong.append(
            FieldViolation(field, f"has {count} ids; at most as many as the vocabulary, {model.vocabulary_size}")
        )
        return
    _check_ids(field, raw.allowed_token_ids, model.vocabulary_size, wrong)


def _check_choices(raw: RawRequest, limits: RequestLimits, wrong: _Violations) -> None:
    n, most = 1 if raw.n is None else raw.n, limits.max_choices
    wrong.check(1 <= n <= most, "sampling.n", f"is {n}; allowed is 1 to {most}")
    if raw.best_of is not None:
        message = f"is {raw.best_of}; allowed is sampling.n, {n}, to {most}"
        wrong.check(n <= raw.best_of <= most, "sampling.best_of", message)


def _check_time_limit(raw: RawRequest, wrong: _Violations) -> None:
    if (limit_s := raw.time_limit_s) is not None:
        message = f"is {limit_s:g} s; allowed is more than 0, up to {MAX_TIME_LIMIT_S:g}"
        wrong.check(0 < limit_s <= MAX_TIME_LIMIT_S, "time_limit", message)


def _check_resume(raw: RawRequest, model: Model, wrong: _Violations) -> None:
    """Ids of tokens are checked with all others."""
    if not raw.resume:
        return
    n, most = raw.n or 1, model.max_context_tokens
    if len(raw.resume) > n:
        wrong.append(FieldViolation("resume", f"has {len(raw.resume)} entries or more; at most sampling.n, {n}"))
        return
    indices = [index for index, _ in raw.resume]
    for place, (index, token_ids) in enumerate(raw.resume):
        field = f"resume[{place}].index"
        message = f"has {len(token_ids)} ids; the context is {most}"
        wrong.check(len(token_ids) < most, f"resume[{place}].token_ids", message)
        wrong.check(index < n, field, f"is {index}; allowed is 0 to {n - 1}, below sampling.n")
        wrong.check(index not in indices[:place], field, f"is {index} again; each choice once")
    is_known = bool(raw.request_id) or raw.seed is not None
    wrong.check(is_known, "request_id", "is unset; resume needs the request_id or the seed of the call it goes on with")
    message = f"is {raw.best_of}, above sampling.n, {n}: the answers are chosen at the end; leave it or resume unset"
    wrong.check((raw.best_of or n) == n, "sampling.best_of", message)


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


def _check_output(raw: RawRequest, wrong: _Violations) -> None:
    field, count = "output.top_logprobs", raw.top_logprobs
    wrong.check(count <= MAX_TOP_LOGPROBS, field, f"is {count}; allowed is 0 to {MAX_TOP_LOGPROBS}")
    is_used = raw.logprobs or raw.prompt_logprobs or not count
    wrong.check(is_used, field, f"is {count}, but neither output.logprobs nor output.prompt_logprobs is true")


def _check_constraint(raw: RawRequest, wrong: _Violations) -> None:
    if (constraint := raw.constraint) is None:
        return
    count, size = len(constraint.texts), sum(len(text.encode()) for text in constraint.texts)
    field = f"constraint.{constraint.kind}" if constraint.kind else "constraint"
    message = f"has {count} texts of {size} bytes; 1 to {MAX_CONSTRAINT_OPTIONS} of 1 to {MAX_CONSTRAINT_BYTES} in all"
    is_good = 1 <= count <= MAX_CONSTRAINT_OPTIONS and 1 <= size <= MAX_CONSTRAINT_BYTES
    wrong.check(is_good, field, message)
    # Each of these could leave no token that the grammar allows.
    others = {
        "stopping.ignore_eos": raw.ignore_eos,
        "stopping.min_tokens": raw.min_tokens,
        "sampling.allowed_token_ids": raw.allowed_token_ids,
        "sampling.bad_words": raw.bad_words,
    }
    for other, is_set in others.items():
        wrong.check(not is_set, other, "does not go with a constraint, which says itself what may come and when to end")


def _check_ids(field: str, token_ids: Iterable[int], vocabulary_size: int, wrong: _Violations) -> None:
    for index, token_id in enumerate(token_ids):
        if not 0 <= token_id < vocabulary_size:
            wrong.append(FieldViolation(f"{field}[{index}]", f"is {token_id}; allowed is 0 to {vocabulary_size - 1}"))
            return


def _check_range(field: str, value: float | None, low: float, high: float, wrong: _Violations) -> None:
    """NaN is in no range."""
    if value is not None:
        wrong.check(low <= value <= high, field, f"is {value}; allowed is [{low:g}, {high:g}]")


def _checked(raw: RawRequest, request_id: str, model: Model, tenant: Tenant) -> CheckedRequest:
    sampling = Sampling(
        temperature=1.0 if raw.temperature is None else raw.temperature,
        top_k=min(max(raw.top_k or 0, 0), model.vocabulary_size),
        top_p=1.0 if raw.top_p is None else raw.top_p,
        min_p=raw.min_p or 0.0,
        seed=seed_of(request_id) if raw.seed is None else raw.seed,
        presence_penalty=raw.presence_penalty or 0.0,
        frequency_penalty=raw.frequency_penalty or 0.0,
        repetition_penalty=1.0 if raw.repetition_penalty is None else raw.repetition_penalty,
        logit_bias=tuple(sorted(raw.logit_bias.items())),
        allowed_token_ids=tuple(sorted(set(raw.allowed_token_ids))),
        bad_words=tuple(raw.bad_words),
        n=raw.n or 1,
        num_choices=raw.beam.width if raw.beam is not None else raw.best_of or raw.n or 1,
        beam=raw.beam,
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
        tenant=tenant.name,
        request_id=request_id,
        prompt=_prompt(raw),
        sampling=sampling,
        stopping=stopping,
        output=Output(raw.logprobs, raw.top_logprobs, raw.prompt_logprobs, raw.echo, raw.skip_special_tokens),
        constraint=raw.constraint,
        scope=CacheScope(tenant.cache_tenant, raw.salt),
        # A cached token is not computed, and what is not computed has no log-probability.
        bypass_cache=raw.bypass_cache or raw.prompt_logprobs,
        priority=raw.priority,
        time_limit_s=raw.time_limit_s,
        resume=tuple((index, tuple(token_ids)) for index, token_ids in raw.resume),
        max_kv_share=tenant.max_kv_share,
    )


def _prompt(raw: RawRequest) -> Prompt:
    if raw.text is not None:
        return raw.text
    if raw.token_ids is not None:
        return raw.token_ids
    assert raw.chat is not None, "checked before"
    return raw.chat
