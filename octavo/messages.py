"""Requests from keyword options, and plain results from responses; pure, the same for both clients.

The only place besides the servers where a field of `octavo.v1.InferenceService` is named.
"""

import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from google.protobuf.duration_pb2 import Duration

from octavo.continuation import AnswerShape
from octavo.errors import FieldViolation, OctavoError, invalid_argument
from octavo.options import FIELD_PATHS, Messages, Prompt
from octavo.results import (
    BeamScore,
    Completed,
    Delta,
    EngineInfo,
    Event,
    Finished,
    FinishReason,
    Limits,
    ModelInfo,
    ModelLoad,
    PromptLogprobs,
    ServerInfo,
    Started,
    Timing,
    TokenLogprob,
    TopLogprob,
    Usage,
)
from octavo.v1 import inference_pb2 as pb

_LEAST_TIME_LIMIT_NS = 1_000_000
_REASON_PREFIX = "FINISH_REASON_"


# ------------------------------------------------------------------------------------------------------------ requests


def generate_request(prompt: Prompt, options: Mapping[str, Any]) -> pb.GenerateStreamRequest:
    """A request, always with an id: one that is sent again replaces itself instead of running twice.

    Raises:
        TypeError: an option that does not exist, or a prompt of no known form.
        OctavoError: INVALID_ARGUMENT for a value that its field cannot hold.
    """
    request = pb.GenerateStreamRequest(request_id=uuid.uuid4().hex)
    _set_prompt(request, prompt)
    for name, value in options.items():
        if name not in FIELD_PATHS:
            raise TypeError(f"unknown option {name!r}; there are {', '.join(FIELD_PATHS)}")
        if value is not None:
            _set_field(request, FIELD_PATHS[name], value)
    return request


def shape_of(request: pb.GenerateStreamRequest) -> AnswerShape:
    """How the answer to a request comes."""
    sampling, output = request.sampling, request.output
    return AnswerShape(
        echoes=output.echo,
        is_ranked=sampling.HasField("beam") or sampling.best_of > (sampling.n or 1),
        shows_token_ids=output.token_ids if output.HasField("token_ids") else True,
    )


def request_to_send(
    request: pb.GenerateStreamRequest, resume: Mapping[int, Sequence[int]], elapsed_s: float
) -> pb.GenerateStreamRequest:
    """The same request for its next call: with the tokens that are there, and what is left of its time limit.

    Token ids are always asked for: they are what can be resumed.
    """
    sent = pb.GenerateStreamRequest()
    sent.CopyFrom(request)
    sent.output.token_ids = True
    for index, token_ids in resume.items():
        sent.resume.add(index=index, token_ids=token_ids)
    if request.HasField("time_limit") and elapsed_s > 0:
        left_ns = request.time_limit.ToNanoseconds() - int(elapsed_s * 1e9)
        sent.time_limit.FromNanoseconds(max(left_ns, min(_LEAST_TIME_LIMIT_NS, request.time_limit.ToNanoseconds())))
    return sent


def messages_of(messages: Messages) -> Sequence[Mapping[str, str]]:
    """A chat; a plain string is what the user says."""
    return [{"role": "user", "content": messages}] if isinstance(messages, str) else messages


def tokenize_request(text: Prompt, model: str, add_special_tokens: bool | None) -> pb.TokenizeRequest:
    """Text or the messages of a chat. Raises TypeError for anything else."""
    request = pb.TokenizeRequest(model=model)
    if add_special_tokens is not None:
        request.add_special_tokens = add_special_tokens
    if isinstance(text, str):
        request.text = text
    elif _is_chat(text):
        _set_chat(request.chat, text)
    else:
        raise TypeError("tokenize takes a string or the messages of a chat")
    return request


def detokenize_request(token_ids: Sequence[int], model: str, skip_special_tokens: bool | None) -> pb.DetokenizeRequest:
    """Token ids of one text. Raises OctavoError as `generate_request`."""
    request = pb.DetokenizeRequest(model=model)
    _set_field(request, "token_ids", token_ids)
    if skip_special_tokens is not None:
        request.skip_special_tokens = skip_special_tokens
    return request


def _set_prompt(request: pb.GenerateStreamRequest, prompt: Prompt) -> None:
    if isinstance(prompt, str):
        request.text = prompt
    elif _is_chat(prompt):
        _set_chat(request.chat, prompt)
    elif all(hasattr(token_id, "__index__") for token_id in prompt):
        request.token_ids.SetInParent()
        _set_field(request, "token_ids.ids", prompt)
    else:
        raise TypeError("a prompt is a string, a sequence of token ids, or a sequence of messages")


def _is_chat(prompt: Any) -> bool:
    return len(prompt) > 0 and all(isinstance(message, Mapping) for message in prompt)


def _set_chat(chat: pb.Chat, messages: Any) -> None:
    for index, message in enumerate(messages):
        if set(message) != {"role", "content"}:
            raise invalid_argument(FieldViolation(f"chat.messages[{index}]", "a message has a role and a content"))
        _set_field(chat.messages.add(), "role", message["role"])
        _set_field(chat.messages[index], "content", message["content"])


def _set_field(message: Any, path: str, value: Any) -> None:
    *groups, name = path.split(".")
    for group in groups:
        message = getattr(message, group)
        message.SetInParent()  # 0 is a value too, which the server may refuse
    try:
        _assign(message, name, value)
    except (TypeError, ValueError) as error:
        raise invalid_argument(FieldViolation(path, f"{error}, got {_short(value)}")) from error


def _assign(message: Any, name: str, value: Any) -> None:
    current = getattr(message, name)
    if isinstance(current, Duration):
        current.FromNanoseconds(int(value * 1e9))
    elif hasattr(current, "update"):  # a map
        current.update(value)
    elif hasattr(current, "extend"):
        current.extend([value] if isinstance(value, str) else value)
    else:
        setattr(message, name, value)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


# ------------------------------------------------------------------------------------------------------------- results


def event_of(response: pb.GenerateStreamResponse) -> Event | None:
    """One event; None for a kind that a newer server may have."""
    kind = response.WhichOneof("event")
    if kind == "delta":
        return _delta(response.delta)
    if kind == "started":
        return _started(response.started)
    if kind == "finished":
        finished = response.finished
        beam = BeamScore(**_scalars(finished.beam)) if finished.HasField("beam") else None
        return Finished(finished.index, _reason(finished.reason), finished.matched_stop, beam)
    if kind == "prompt_logprobs":
        return PromptLogprobs(response.prompt_logprobs.token_offset, _logprobs(response.prompt_logprobs.logprobs))
    if kind == "completed":
        return Completed(_usage(response.completed.usage), _timing(response.completed.timing))
    return None


def _started(started: pb.Started) -> Started:
    return Started(
        started.request_id, started.model, started.prompt_tokens, started.cached_tokens, started.effective_seed
    )


def _delta(delta: pb.Delta) -> Delta:
    return Delta(delta.index, delta.token_offset, delta.text, tuple(delta.token_ids), _logprobs(delta.logprobs))


def _reason(reason: pb.FinishReason) -> FinishReason:
    return FinishReason(pb.FinishReason.Name(reason).removeprefix(_REASON_PREFIX).lower())


def _logprobs(logprobs: Any) -> tuple[TokenLogprob, ...]:
    return tuple(
        TokenLogprob(
            one.token_id, one.logprob, one.rank, tuple(TopLogprob(top.token_id, top.logprob) for top in one.top)
        )
        for one in logprobs
    )


def _usage(usage: pb.Usage) -> Usage:
    return Usage(usage.prompt_tokens, usage.cached_tokens, usage.generated_tokens)


def _timing(timing: pb.Timing) -> Timing:
    return Timing(timing.queue_seconds, timing.prefill_seconds, timing.first_token_seconds, timing.decode_seconds)


def models_of(response: pb.ListModelsResponse) -> list[ModelInfo]:
    """The models that a server has."""
    return [ModelInfo(**{**_scalars(model), "engines": tuple(model.engines)}) for model in response.models]


def server_info_of(response: pb.GetServerInfoResponse) -> ServerInfo:
    """Which router answered, and its limits."""
    limits = Limits(**_scalars(response.limits))
    engines = tuple(_engine(engine) for engine in response.engines)
    return ServerInfo(response.version, response.router_id, engines, limits)


def _engine(engine: pb.EngineInfo) -> EngineInfo:
    state = pb.EngineState.Name(engine.state).removeprefix("ENGINE_STATE_").lower()
    return EngineInfo(engine.name, engine.model, state, engine.router_epoch)


def load_of(response: pb.GetLoadResponse) -> list[ModelLoad]:
    """How busy each model is."""
    return [ModelLoad(**_scalars(load)) for load in response.models]


def _scalars(message: Any) -> dict[str, Any]:
    return {field.name: getattr(message, field.name) for field in message.DESCRIPTOR.fields}


def with_target(error: OctavoError, target: str) -> OctavoError:
    """The error of a call that no server answered, with where it went; any other as it is."""
    if error.reason != error.code.name:  # a server gave a reason of its own
        return error
    return OctavoError(
        error.code, error.reason, f"{target}: {error.message}", metadata=error.metadata, violations=error.violations
    )
