"""The router's Prometheus metrics, in a registry of their own. Gauges are read from the state at scrape time.

Not here: buckets that other processes share (`octavo.metrics`), and any decision.
"""

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from octavo import metrics as shared
from router.backend import Backend
from router.live import Phase
from router.observer import StepTimes
from router.request import Timing, Usage
from router.trace import StepTrace

LABELS = ("model_name", "engine")
# Longest answer that its histogram tells apart; the model's own length is known only once it is served.
MAX_COUNTED_TOKENS = 200_000


class RouterMetrics:
    """Counters and histograms of requests; an `Observer` of the engine.

    Args:
        backend: what is served now; read at each scrape and for each label.
        engine: name of the engine behind, as a label.
        trace: is told of every step too.
    """

    def __init__(self, backend: Callable[[], Backend | None], engine: str, trace: StepTrace | None = None) -> None:
        self.registry = CollectorRegistry()
        self._backend = backend
        self._trace = trace
        self._engine = engine
        self.registry.register(_Gauges(backend, engine))
        self._make_counters()
        self._make_histograms()

    def _make_counters(self) -> None:
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of ended requests")
        self._generation_tokens = self._counter("generation_tokens", "Tokens generated")
        self._queries = self._counter("prefix_cache_queries", "Prompt tokens looked up, once per request")
        self._hits = self._counter("prefix_cache_hits", "Prompt tokens found, once per request")
        self._preemptions = self._counter("num_preemptions", "Requests that gave up their blocks")
        self._rejections = self._counter("admission_rejections", "Requests refused before they queued", "reason")
        self._ended = self._counter("request_success", "Ended requests, aborted ones too", "finished_reason")
        self._calls = Counter(
            "octavo_grpc_requests", "Calls by method and status", ("method", "grpc_code"), registry=self.registry
        )

    def _make_histograms(self) -> None:
        latency, token_gap = shared.REQUEST_LATENCY_SECONDS, shared.INTER_TOKEN_LATENCY_SECONDS
        counts = shared.token_count_buckets(MAX_COUNTED_TOKENS)
        self._first_token = self._histogram(
            "time_to_first_token_seconds", "Arrival to first token", shared.TIME_TO_FIRST_TOKEN_SECONDS
        )
        self._token_gap = self._histogram("inter_token_latency_seconds", "Between two tokens", token_gap)
        self._per_token = self._histogram(
            "request_time_per_output_token_seconds", "Mean time per token after the first", token_gap
        )
        self._e2e = self._histogram("e2e_request_latency_seconds", "Arrival to end", latency)
        self._queue = self._histogram("request_queue_time_seconds", "Arrival to first step", latency)
        self._prefill = self._histogram("request_prefill_time_seconds", "First step to first token", latency)
        self._decode = self._histogram("request_decode_time_seconds", "First token to last", latency)
        self._inference = self._histogram("request_inference_time_seconds", "First step to last token", latency)
        self._request_prompt = self._histogram("request_prompt_tokens", "Prompt tokens of a request", counts)
        self._request_generation = self._histogram("request_generation_tokens", "Tokens generated for one", counts)
        self._iteration = self._histogram("iteration_tokens", "Tokens of a step", shared.ITERATION_TOKENS)
        self._step_time = self._histogram("step_time_seconds", "Parts of a step", shared.STEP_TIME_SECONDS, "part")

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"octavo_{name}", text, (*LABELS, *labels), registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: Iterable[float], *labels: str) -> Histogram:
        return Histogram(f"octavo_{name}", text, (*LABELS, *labels), buckets=tuple(buckets), registry=self.registry)

    @property
    def _labels(self) -> tuple[str, str]:
        backend = self._backend()
        return (backend.model.name if backend else "", self._engine)

    # -------------------------------------------------------------------------------------------------------- observer

    def on_admitted(self, num_queried_tokens: int, num_hit_tokens: int) -> None:
        self._queries.labels(*self._labels).inc(num_queried_tokens)
        self._hits.labels(*self._labels).inc(num_hit_tokens)

    def on_first_token(self, elapsed_s: float) -> None:
        self._first_token.labels(*self._labels).observe(elapsed_s)

    def on_token(self, gap_s: float | None) -> None:
        self._generation_tokens.labels(*self._labels).inc()
        if gap_s is not None:
            self._token_gap.labels(*self._labels).observe(gap_s)

    def on_preempted(self) -> None:
        self._preemptions.labels(*self._labels).inc()

    def on_step(self, times: StepTimes) -> None:
        labels = self._labels
        self._step_time.labels(*labels, "plan").observe(times.send_began - times.plan_began)
        self._step_time.labels(*labels, "deliver").observe(times.delivered - times.deliver_began)
        if times.num_tokens:
            self._iteration.labels(*labels).observe(times.num_tokens)
        if self._trace is not None:
            self._trace.add(times)

    def on_ended(self, outcome: str, usage: Usage, timing: Timing, elapsed_s: float) -> None:
        labels = self._labels
        self._ended.labels(*labels, outcome).inc()
        self._prompt_tokens.labels(*labels).inc(usage.prompt_tokens)
        self._request_prompt.labels(*labels).observe(usage.prompt_tokens)
        self._request_generation.labels(*labels).observe(usage.generated_tokens)
        self._e2e.labels(*labels).observe(elapsed_s)
        self._queue.labels(*labels).observe(timing.queue_s)
        if usage.generated_tokens:
            self._prefill.labels(*labels).observe(timing.prefill_s)
            self._decode.labels(*labels).observe(timing.decode_s)
            self._inference.labels(*labels).observe(timing.prefill_s + timing.decode_s)
        if usage.generated_tokens > 1:
            self._per_token.labels(*labels).observe(timing.decode_s / (usage.generated_tokens - 1))

    def on_rejected(self, reason: str) -> None:
        self._rejections.labels(*self._labels, reason).inc()

    def on_call(self, method: str, grpc_code: str) -> None:
        """A call of the public API ended."""
        self._calls.labels(method, grpc_code).inc()


class _Gauges(Collector):
    """Read from the engine when somebody asks, so that they cannot freeze."""

    def __init__(self, backend: Callable[[], Backend | None], engine: str) -> None:
        self._backend = backend
        self._engine = engine

    def collect(self) -> Iterable[Metric]:
        backend = self._backend()
        if backend is None:
            return
        labels = (backend.model.name, self._engine)
        load = backend.engine.load()
        yield _gauge("num_requests_running", "Requests that hold blocks", labels, load.num_running)
        yield _gauge("num_requests_waiting", "Requests that wait", labels, load.num_waiting)
        yield _gauge("kv_cache_usage_ratio", "Blocks that requests hold, of the pool", labels, load.kv_usage_ratio)
        by_reason = GaugeMetricFamily(
            "octavo_num_requests_waiting_by_reason", "Requests that wait, by what for", labels=(*LABELS, "reason")
        )
        for reason, count in _waiting_by_reason(backend).items():
            by_reason.add_metric((*labels, reason), count)
        yield by_reason

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


def _gauge(name: str, text: str, labels: tuple[str, ...], value: float) -> GaugeMetricFamily:
    family = GaugeMetricFamily(f"octavo_{name}", text, labels=LABELS)
    family.add_metric(labels, value)
    return family
