"""Public messages to our words. Nothing is checked here but that a field is set; checks are in `router.validation`."""

from collections.abc import Sequence
from typing import Any

from octavo.v1 import inference_pb2
from router.raw import RawRequest
from router.request import BeamSearch, Chat, ChatMessage, Constraint

# Of a list that no request needs longer: a message may hold millions, and reading them would hold up every stream.
MAX_ENTRIES_READ = 64


def read_request(message: inference_pb2.GenerateRequest | inference_pb2.GenerateStreamRequest) -> RawRequest:
    """A Generate or GenerateStream call, field for field."""
    sampling, stopping, kind = message.sampling, message.stopping, message.WhichOneof("prompt")
    return RawRequest(
        request_id=message.request_id,
        text=message.text if kind == "text" else None,
        token_ids=message.token_ids.ids if kind == "token_ids" else None,
        chat=read_chat(message.chat) if kind == "chat" else None,
        temperature=_optional(sampling, "temperature"),
        top_p=_optional(sampling, "top_p"),
        top_k=_optional(sampling, "top_k"),
        min_p=_optional(sampling, "min_p"),
        seed=_optional(sampling, "seed"),
        presence_penalty=_optional(sampling, "presence_penalty"),
        frequency_penalty=_optional(sampling, "frequency_penalty"),
        repetition_penalty=_optional(sampling, "repetition_penalty"),
        logit_bias=sampling.logit_bias,
        allowed_token_ids=sampling.allowed_token_ids,
        bad_words=sampling.bad_words,
        n=_optional(sampling, "n"),
        best_of=_optional(sampling, "best_of"),
        beam=_beam(sampling.beam) if sampling.HasField("beam") else None,
        max_tokens=_optional(stopping, "max_tokens"),
        min_tokens=_optional(stopping, "min_tokens"),
        stop=stopping.stop,
        stop_token_ids=stopping.stop_token_ids,
        include_stop=stopping.include_stop,
        ignore_eos=stopping.ignore_eos,
        constraint=_constraint(message),
        logprobs=message.output.logprobs,
        top_logprobs=message.output.top_logprobs,
        prompt_logprobs=message.output.prompt_logprobs,
        echo=message.output.echo,
        skip_special_tokens=wants_special_tokens_skipped(message.output),
        salt=_optional(message.cache, "salt"),
        bypass_cache=message.cache.bypass,
        priority=message.priority,
        time_limit_s=message.time_limit.ToNanoseconds() / 1e9 if message.HasField("time_limit") else None,
        resume=[(resume.index, resume.token_ids) for resume in message.resume[:MAX_ENTRIES_READ]],
        ids=_ids(message),
        unsupported=_unsupported(message),
    )


def read_chat(chat: inference_pb2.Chat) -> Chat:
    """Unset add_generation_prompt is true."""
    messages = tuple(ChatMessage(message.role, message.content) for message in chat.messages)
    return Chat(messages, chat.add_generation_prompt if chat.HasField("add_generation_prompt") else True)


def wants_special_tokens_skipped(output: Any) -> bool:
    """Unset is true; `output` is any message with the field."""
    return output.skip_special_tokens if output.HasField("skip_special_tokens") else True


def wants_token_ids(output: inference_pb2.Output) -> bool:
    """Unset is true."""
    return output.token_ids if output.HasField("token_ids") else True


def _optional(message: Any, field: str) -> Any:
    return getattr(message, field) if message.HasField(field) else None


def _constraint(message: Any) -> Constraint | None:
    """None: unset. A kind that is unset too has no texts."""
    if not message.HasField("constraint"):
        return None
    kind = message.constraint.WhichOneof("kind") or ""
    if kind == "choice":
        return Constraint(kind, tuple(message.constraint.choice.options))
    return Constraint(kind, (getattr(message.constraint, kind),) if kind else ())


def _beam(beam: inference_pb2.BeamSearch) -> BeamSearch:
    """Unset: a length penalty of 1, and no early stopping."""
    return BeamSearch(beam.width, beam.length_penalty if beam.HasField("length_penalty") else 1.0, beam.early_stopping)


def _ids(message: Any) -> dict[str, Sequence[int]]:
    resumed = message.resume[:MAX_ENTRIES_READ]
    return {f"resume[{index}].token_ids": resume.token_ids for index, resume in enumerate(resumed)}


def _unsupported(message: Any) -> list[str]:
    """Paths of what is set and not supported."""
    return ["adapter"] if message.HasField("adapter") else []
