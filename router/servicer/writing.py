"""Our words to public messages."""

from collections.abc import Iterable, Sequence
from typing import Any

from octavo.v1 import inference_pb2
from router.backend import Backend
from router.link import Link
from router.logprob import TokenLogprob
from router.model import Model
from router.request import FinishReason, Timing, Usage
from router.stream import BeamScore, Completed, Delta, Event, Finished, PromptLogprobs, Started


def stream_response(
    event: Event, model_name: str, *, with_token_ids: bool
) -> inference_pb2.GenerateStreamResponse | None:
    """One event of a stream; None where the client did not ask for what it says."""
    response = inference_pb2.GenerateStreamResponse()
    if isinstance(event, Started):
        response.started.request_id = event.request_id
        response.started.model = model_name
        response.started.prompt_tokens = event.prompt_tokens
        response.started.cached_tokens = event.cached_tokens
        response.started.effective_seed = event.seed
    elif isinstance(event, Delta):
        if not (event.text or event.logprobs or with_token_ids):
            return None
        response.delta.index = event.index
        response.delta.token_offset = event.token_offset
        response.delta.text = event.text
        response.delta.token_ids.extend(event.token_ids if with_token_ids else ())
        response.delta.logprobs.extend(map(_logprob_message, event.logprobs))
    elif isinstance(event, PromptLogprobs):
        response.prompt_logprobs.token_offset = event.token_offset
        response.prompt_logprobs.logprobs.extend(map(_logprob_message, event.logprobs))
    elif isinstance(event, Finished):
        response.finished.index = event.index
        response.finished.reason = _reason(event.reason)
        response.finished.matched_stop = event.matched_stop
        if event.beam is not None:
            response.finished.beam.CopyFrom(_beam_message(event.beam))
    else:
        response.completed.usage.CopyFrom(usage_message(event.usage))
        response.completed.timing.CopyFrom(timing_message(event.timing))
    return response


class UnaryAnswer:
    """Gathers the events of a request into one message: the same bytes that a stream would have carried."""

    def __init__(self, model_name: str, num_choices: int, *, with_token_ids: bool) -> None:
        self._response = inference_pb2.GenerateResponse(model=model_name)
        self._texts: list[list[str]] = [[] for _ in range(num_choices)]
        for index in range(num_choices):
            self._response.choices.add(index=index)
        self._with_token_ids = with_token_ids

    def add(self, event: Event) -> None:
        """Take the next event."""
        if isinstance(event, Started):
            self._response.request_id = event.request_id
            self._response.effective_seed = event.seed
        elif isinstance(event, Delta):
            choice = self._response.choices[event.index]
            self._texts[event.index].append(event.text)
            choice.token_ids.extend(event.token_ids if self._with_token_ids else ())
            choice.logprobs.extend(map(_logprob_message, event.logprobs))
        elif isinstance(event, PromptLogprobs):
            self._response.prompt_logprobs.extend(map(_logprob_message, event.logprobs))
        elif isinstance(event, Finished):
            choice = self._response.choices[event.index]
            choice.finish_reason = _reason(event.reason)
            choice.matched_stop = event.matched_stop
            if event.beam is not None:
                choice.beam.CopyFrom(_beam_message(event.beam))
        elif isinstance(event, Completed):
            self._response.usage.CopyFrom(usage_message(event.usage))
            self._response.timing.CopyFrom(timing_message(event.timing))

    def message(self) -> inference_pb2.GenerateResponse:
        """The whole answer, after the last event."""
        for choice, texts in zip(self._response.choices, self._texts, strict=True):
            choice.text = "".join(texts)
        while not self._response.choices[-1].finish_reason:  # a search may find fewer answers
            del self._response.choices[-1]
        return self._response


def usage_message(usage: Usage) -> inference_pb2.Usage:
    return inference_pb2.Usage(
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=usage.cached_tokens,
        generated_tokens=usage.generated_tokens,
        resumed_tokens=usage.resumed_tokens,
    )


def timing_message(timing: Timing) -> inference_pb2.Timing:
    return inference_pb2.Timing(
        queue_seconds=timing.queue_s,
        prefill_seconds=timing.prefill_s,
        first_token_seconds=timing.first_token_s,
        decode_seconds=timing.decode_s,
    )


def model_messages(backends: Iterable[Backend]) -> list[inference_pb2.Model]:
    """One of each name, as its first engine serves it, with the names of all."""
    messages: dict[str, inference_pb2.Model] = {}
    for backend in backends:
        name = backend.model.name
        messages.setdefault(name, _model_message(backend.model)).engines.append(backend.name)
    return list(messages.values())


def engine_message(link: Link) -> inference_pb2.EngineInfo:
    return inference_pb2.EngineInfo(
        name=link.name,
        model=link.model.name if link.model is not None else "",
        state=f"ENGINE_STATE_{link.state.name}",
        router_epoch=link.router_epoch,
    )


def load_message(backends: Sequence[Backend]) -> inference_pb2.GetLoadResponse:
    """Of each engine, and of each model over its engines."""
    response = inference_pb2.GetLoadResponse()
    for backend in backends:
        load = backend.engine.load()
        response.engines.add(
            name=backend.name,
            model=backend.model.name,
            running_requests=load.num_running,
            waiting_requests=load.num_waiting,
            kv_cache_usage_ratio=load.kv_usage_ratio,
        )
    for name in dict.fromkeys(backend.model.name for backend in backends):
        engines = [engine for engine in response.engines if engine.model == name]
        response.models.add(
            name=name,
            running_requests=sum(engine.running_requests for engine in engines),
            waiting_requests=sum(engine.waiting_requests for engine in engines),
            kv_cache_usage_ratio=_usage_ratio([backend for backend in backends if backend.model.name == name]),
        )
    return response


def _usage_ratio(backends: Sequence[Backend]) -> float:
    """Engines that share a pool fill it together."""
    pools = {backend.pool: backend.model.num_usable_blocks for backend in backends}
    used = sum(backend.engine.num_held_blocks for backend in backends)
    return min(1.0, used / max(1, sum(pools.values())))


def _model_message(model: Model) -> inference_pb2.Model:
    return inference_pb2.Model(
        name=model.name,
        fingerprint=model.fingerprint,
        architecture=model.architecture,
        vocabulary_size=model.vocabulary_size,
        max_context_tokens=model.max_context_tokens,
        block_size=model.block_size,
        num_blocks=model.num_blocks,
        kv_dtype=model.kv_dtype,
        weights_dtype=model.weights_dtype,
        attention=model.attention,
        device=model.device,
    )


def _logprob_message(logprob: TokenLogprob) -> inference_pb2.TokenLogprob:
    top = [inference_pb2.TopLogprob(token_id=token_id, logprob=value) for token_id, value in logprob.top]
    return inference_pb2.TokenLogprob(token_id=logprob.token_id, logprob=logprob.logprob, rank=logprob.rank, top=top)


def _beam_message(beam: BeamScore) -> inference_pb2.BeamScore:
    return inference_pb2.BeamScore(score=beam.score, cumulative_logprob=beam.cumulative_logprob)


def _reason(reason: FinishReason) -> Any:
    return inference_pb2.FinishReason.Value(f"FINISH_REASON_{reason.name}")
