"""The router's Prometheus metrics, in a registry of their own. Gauges are read from the state at scrape time.

Not here: buckets that other processes share (`octavo.metrics`), and any decision.
"""

from collections.abc import Callable, Iterable
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from octavo import metrics as shared
from router.backend import Backend
from router.live import Phase
from router.model import Model
from router.observer import StepTimes
from router.request import Timing, Usage
from router.trace import StepTrace

LABELS = ("model_name", "engine")
ANSWERING = ("Generate", "GenerateStream")
FAILURES = ("UNAVAILABLE", "INTERNAL", "UNKNOWN", "DATA_LOSS")  # by the server's fault, as alerts count them
CAUSES_OF_PREEMPTION = ("pool", "quota")
CAUSES_OF_RECOMPUTING = ("executor_lost", "cache_service_lost", "preemption")
# Longest answer that its histogram tells apart; the model's own length is known only once it is served.
MAX_COUNTED_TOKENS = 200_000


class EngineView(Protocol):
    """What gauges read of an engine."""

    @property
    def name(self) -> str: ...

    @property
    def model(self) -> Model | None: ...

    @property
    def backend(self) -> Backend | None: ...

    @property
    def is_ready(self) -> bool: ...

    @property
    def num_wanted_spares(self) -> int: ...

    @property
    def num_ready_spares(self) -> int: ...


class RouterMetrics:
    """Counters and histograms of all engines' requests; hands each engine its own `Observer`.

    What alerts watch begins at 0, before anything of it has happened: a series that appears with its first event has
    not grown in the eyes of Prometheus, and that event, often the only one, would be missed.

    Args:
        engines: all that are configured; read at each scrape.
        trace: is told of every step too.
    """

    def __init__(self, engines: Callable[[], Iterable[EngineView]], trace: StepTrace | None = None) -> None:
        self.registry = CollectorRegistry()
        self.trace = trace
        self.registry.register(_Gauges(engines))
        self._make_counters()
        self._make_histograms()

    def of(self, engine: str, model_name: str) -> "EngineMetrics":
        """The observer of an engine while it serves a model."""
        return EngineMetrics(self, engine, model_name)

    def begin(self, engines: Iterable[str]) -> None:
        """The names of the engines are known."""
        for engine in engines:
            self.faults.labels(engine)
        for method in ANSWERING:
            for code in ("OK", *FAILURES):
                self.calls.labels(method, code)

    def on_rejected(self, reason: str, model_name: str = "", engine: str = "") -> None:
        """A request was refused before it was queued; by what engine, as far as it came."""
        self.rejections.labels(model_name, engine, reason).inc()

    def on_fault(self, engine: str) -> None:
        """The router itself failed on an engine, or on one of its requests."""
        self.faults.labels(engine).inc()

    def on_call(self, method: str, grpc_code: str) -> None:
        """A call of the public API ended."""
        self.calls.labels(method, grpc_code).inc()

    def _make_counters(self) -> None:
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of ended requests")
        self.generation_tokens = self._counter("generation_tokens", "Tokens generated")
        self.queries = self._counter("prefix_cache_queries", "Prompt tokens looked up, once per request")
        self.hits = self._counter("prefix_cache_hits", "Prompt tokens found, once per request")
        self.preemptions = self._counter(
            "num_preemptions", "Requests that gave up their blocks: what had none left, pool or tenant's quota", "cause"
        )
        self.recomputed = self._counter("recomputed_tokens", "Tokens computed again, by why", "cause")
        self.rejections = self._counter("admission_rejections", "Requests refused before they queued", "reason")
        self.ended = self._counter("request_success", "Ended requests, aborted ones too", "finished_reason")
        self.faults = Counter(
            "octavo_router_faults", "Exceptions that nobody expected", ("engine",), registry=self.registry
        )
        self.calls = Counter(
            "octavo_grpc_requests", "Calls by method and status", ("method", "grpc_code"), registry=self.registry
        )

    def _make_histograms(self) -> None:
        latency, token_gap = shared.REQUEST_LATENCY_SECONDS, shared.INTER_TOKEN_LATENCY_SECONDS
        counts = shared.token_count_buckets(MAX_COUNTED_TOKENS)
        self.first_token = self._histogram(
            "time_to_first_token_seconds", "Arrival to first token", shared.TIME_TO_FIRST_TOKEN_SECONDS
        )
        self.token_gap = self._histogram("inter_token_latency_seconds", "Between two tokens", token_gap)
        self.per_token = self._histogram(
            "request_time_per_output_token_seconds", "Mean time per token after the first", token_gap
        )
        self.e2e = self._histogram("e2e_request_latency_seconds", "Arrival to end", latency)
        self.takeover = self._histogram(
            "takeover_time_seconds",
            "A session's loss to the opening of the next one; its first step comes after",
            latency,
        )
        self.queue = self._histogram("request_queue_time_seconds", "Arrival to first step", latency)
        self.prefill = self._histogram("request_prefill_time_seconds", "First step to first token", latency)
        self.decode = self._histogram("request_decode_time_seconds", "First token to last", latency)
        self.inference = self._histogram("request_inference_time_seconds", "First step to last token", latency)
        self.request_prompt = self._histogram("request_prompt_tokens", "Prompt tokens of a request", counts)
        self.request_generation = self._histogram("request_generation_tokens", "Tokens generated for one", counts)
        self.iteration = self._histogram("iteration_tokens", "Tokens of a step", shared.ITERATION_TOKENS)
        self.step_time = self._histogram("step_time_seconds", "Parts of a step", shared.STEP_TIME_SECONDS, "part")

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"octavo_{name}", text, (*LABELS, *labels), registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: Iterable[float], *labels: str) -> Histogram:
        return Histogram(f"octavo_{name}", text, (*LABELS, *labels), buckets=tuple(buckets), registry=self.registry)


class EngineMetrics:
    """An `Observer` that counts under the labels of its engine."""

    def __init__(self, metrics: RouterMetrics, engine: str, model_name: str) -> None:
        self._metrics = metrics
        self._engine = engine
        self._labels = labels = (model_name, engine)
        # Found once: these are counted for every token or step.
        self._generation_tokens = metrics.generation_tokens.labels(*labels)
        self._token_gap = metrics.token_gap.labels(*labels)
        self._iteration = metrics.iteration.labels(*labels)
        self._plan_time = metrics.step_time.labels(*labels, "plan")
        self._deliver_time = metrics.step_time.labels(*labels, "deliver")
        for cause in CAUSES_OF_PREEMPTION:
            metrics.preemptions.labels(*labels, cause)
        metrics.takeover.labels(*labels)
        for cause in CAUSES_OF_RECOMPUTING:
            metrics.recomputed.labels(*labels, cause)

    def on_admitted(self, num_queried_tokens: int, num_hit_tokens: int) -> None:
        self._metrics.queries.labels(*self._labels).inc(num_queried_tokens)
        self._metrics.hits.labels(*self._labels).inc(num_hit_tokens)

    def on_first_token(self, elapsed_s: float) -> None:
        self._metrics.first_token.labels(*self._labels).observe(elapsed_s)

    def on_token(self, gap_s: float | None) -> None:
        self._generation_tokens.inc()
        if gap_s is not None:
            self._token_gap.observe(gap_s)

    def on_preempted(self, cause: str) -> None:
        self._metrics.preemptions.labels(*self._labels, cause).inc()

    def on_recomputed(self, cause: str, num_tokens: int) -> None:
        if num_tokens:
            self._metrics.recomputed.labels(*self._labels, cause).inc(num_tokens)

    def on_takeover(self, elapsed_s: float) -> None:
        self._metrics.takeover.labels(*self._labels).observe(elapsed_s)

    def on_fault(self) -> None:
        self._metrics.on_fault(self._engine)

    def on_step(self, times: StepTimes) -> None:
        self._plan_time.observe(times.send_began - times.plan_began)
        self._deliver_time.observe(times.delivered - times.deliver_began)
        if times.num_tokens:
            self._iteration.observe(times.num_tokens)
        if self._metrics.trace is not None:
            self._metrics.trace.add(self._engine, times)

    def on_ended(self, outcome: str, usage: Usage, timing: Timing, elapsed_s: float) -> None:
        metrics, labels = self._metrics, self._labels
        metrics.ended.labels(*labels, outcome).inc()
        metrics.prompt_tokens.labels(*labels).inc(usage.prompt_tokens)
        metrics.request_prompt.labels(*labels).observe(usage.prompt_tokens)
        metrics.request_generation.labels(*labels).observe(usage.generated_tokens)
        metrics.e2e.labels(*labels).observe(elapsed_s)
        metrics.queue.labels(*labels).observe(timing.queue_s)
        if usage.generated_tokens:
            metrics.prefill.labels(*labels).observe(timing.prefill_s)
            metrics.decode.labels(*labels).observe(timing.decode_s)
            metrics.inference.labels(*labels).observe(timing.prefill_s + timing.decode_s)
        if usage.generated_tokens > 1:
            metrics.per_token.labels(*labels).observe(timing.decode_s / (usage.generated_tokens - 1))


class _Gauges(Collector):
    """Read from the engines when somebody asks, so that they cannot freeze."""

    def __init__(self, engines: Callable[[], Iterable[EngineView]]) -> None:
        self._engines = engines

    def collect(self) -> Iterable[Metric]:
        up = _gauge("engine_up", "Whether the router takes requests for the engine")
        spares = _gauge("spare_executors_ready", "Executors that are attached, loaded and idle")
        wanted = _gauge("spare_executors", "Executors that should be attached, loaded and idle, as configured")
        running = _gauge("num_requests_running", "Requests that hold blocks")
        waiting = _gauge("num_requests_waiting", "Requests that wait")
        usage = _gauge(
            "kv_cache_usage_ratio", "Blocks that requests hold, of the pool; one that several share counts once"
        )
        by_reason = _gauge("num_requests_waiting_by_reason", "Requests that wait, by what for", "reason")
        for engine in self._engines():
            labels = (engine.model.name if engine.model is not None else "", engine.name)
            up.add_metric(labels, engine.is_ready)
            spares.add_metric(labels, engine.num_ready_spares)
            wanted.add_metric(labels, engine.num_wanted_spares)
            if engine.backend is None:
                continue
            load = engine.backend.engine.load()
            running.add_metric(labels, load.num_running)
            waiting.add_metric(labels, load.num_waiting)
            usage.add_metric(labels, load.kv_usage_ratio)
            for reason, count in _waiting_by_reason(engine.backend).items():
                by_reason.add_metric((*labels, reason), count)
        return (up, spares, wanted, running, waiting, usage, by_reason)

    def describe(self) -> Iterable[Metric]:
        return ()


def _waiting_by_reason(backend: Backend) -> dict[str, int]:
    counts = dict.fromkeys(("tokenizing", "capacity", "blocks"), 0)
    for request in backend.engine.roster:
        phases = {choice.phase for choice in request.choices}
        if Phase.PREPARING in phases:
            counts["tokenizing"] += 1
        elif Phase.RUNNING not in phases:
            counts["capacity" if Phase.WAITING in phases else "blocks"] += 1
    return counts


def _gauge(name: str, text: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"octavo_{name}", text, labels=(*LABELS, *labels))
