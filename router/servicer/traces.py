"""The trace of a request: a span for its call, and under it its queueing, prefill and decode, made when it has ended.

Names and attributes are those of the semantic conventions for generative AI where there are such; never a word of a
prompt or an answer. What cache service and executor do for the request joins the same trace by `LiveRequest.trace`.
"""

import asyncio
import logging
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from octavo.errors import OctavoError
from octavo.tracing import NO_SPAN, Attributes, Span, Tracing, Value, context_of
from router.backend import Backend
from router.live import LiveRequest
from router.request import Sampling

log = logging.getLogger(__name__)

PROVIDER = "octavo"


class RequestTraces:
    """Traces of the Generate calls of a router."""

    def __init__(self, tracing: Tracing) -> None:
        self._tracing = tracing

    @contextmanager
    def call(
        self, request: Any, metadata: Iterable[tuple[str, str | bytes]], *, is_stream: bool
    ) -> Iterator["RequestTrace"]:
        """While a call runs. What ends it ends its span too, and goes on as it came."""
        trace = RequestTrace(self._tracing, NO_SPAN)
        if self._tracing.is_on:
            name, attributes = _named(request, is_stream)
            span = self._tracing.begin(name, context_of(metadata), attributes, is_server=True)
            trace = RequestTrace(self._tracing, span)
        try:
            yield trace
        except BaseException as error:
            trace.fail(error)
            raise
        finally:
            trace.end()


class RequestTrace:
    """The trace of one call."""

    def __init__(self, tracing: Tracing, span: Span) -> None:
        self._tracing = tracing
        self._span = span
        self._live: LiveRequest | None = None
        self._backend: Backend | None = None
        # Between the engine's clock and that of spans, in nanoseconds.
        self._unix_offset_ns = time.time_ns() - time.monotonic_ns()

    def follow(self, live: LiveRequest) -> None:
        """The call became a request: other processes are to know whose part they do."""
        live.trace = self._span.context
        self._live = live

    def at(self, backend: Backend) -> None:
        """The engine that has it."""
        self._backend = backend

    def fail(self, error: BaseException) -> None:
        if isinstance(error, asyncio.CancelledError | GeneratorExit):
            self._span.fail("cancelled", "the client left, or its deadline was past")
        else:
            self._span.fail(error.reason if isinstance(error, OctavoError) else type(error).__name__)

    def end(self) -> None:
        """Say how it went. A fault of this is logged: it must not hide what ended the call."""
        try:
            if self._span.is_recording and self._live is not None:
                self._tell(self._live)
        except Exception:
            log.exception("a trace is not whole")
        self._span.end()

    def _tell(self, live: LiveRequest) -> None:
        self._span.set(_asked(live.checked.sampling) | _answered(live))
        if live.is_submitted:
            self._span.set({"gen_ai.request.max_tokens": live.spec.max_tokens})
        if self._backend is not None:
            self._span.set({"octavo.engine": self._backend.name, "gen_ai.response.model": self._backend.model.name})
        now, times = time.monotonic(), live.times
        scheduled, first = times.first_scheduled, times.first_token
        self._part("queue", times.arrived, now if scheduled is None else scheduled, {})
        if scheduled is not None:
            computed = live.usage().prompt_tokens - live.usage().cached_tokens
            until = now if first is None else first
            self._part("prefill", scheduled, until, {"octavo.computed_tokens": computed})
        if first is not None and times.last_token is not None:
            about = {"gen_ai.usage.output_tokens": live.usage().new_tokens, "octavo.preemptions": live.num_preemptions}
            self._part("decode", first, times.last_token, about)

    def _part(self, name: str, began: float, ended: float, attributes: Attributes) -> None:
        span = self._tracing.begin(name, self._span.context, attributes, at_ns=self._unix_ns(began))
        span.end(self._unix_ns(ended))

    def _unix_ns(self, moment: float) -> int:
        return int(moment * 1e9) + self._unix_offset_ns


def _named(request: Any, is_stream: bool) -> tuple[str, dict[str, Value]]:
    """The span's name, and what is known when it begins: what samplers choose by."""
    operation = "chat" if request.HasField("chat") else "text_completion"
    attributes: dict[str, Value] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.stream": is_stream,
    }
    model = request.model[:256]
    if model:
        attributes["gen_ai.request.model"] = model
    return f"{operation} {model}".strip(), attributes


def _asked(sampling: Sampling) -> dict[str, Value]:
    return {
        "gen_ai.request.choice.count": sampling.n,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.top_k": sampling.top_k,
        "gen_ai.request.frequency_penalty": sampling.frequency_penalty,
        "gen_ai.request.presence_penalty": sampling.presence_penalty,
    }


def _answered(live: LiveRequest) -> dict[str, Value]:
    usage = live.usage()
    reasons = [choice.finish_reason.name.lower() for choice in live.choices if choice.finish_reason is not None]
    told: dict[str, Value] = {
        "gen_ai.response.id": live.request_id,
        "gen_ai.usage.input_tokens": usage.prompt_tokens,
        "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
        "gen_ai.usage.output_tokens": usage.new_tokens,
        "octavo.tenant": live.checked.tenant,
    }
    if reasons:
        told["gen_ai.response.finish_reasons"] = reasons
    if live.times.first_token is not None:
        told["gen_ai.response.time_to_first_chunk"] = live.times.first_token - live.times.arrived
    return told
