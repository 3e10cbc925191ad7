"""The executor's metrics, in a registry of their own. Gauges are read from the state at each scrape."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from executor.batch import Batch
from executor.pending import PendingOutput, StepRunner
from executor.step import REASONS, Ints, StepError, StepOutput
from octavo.metrics import ITERATION_TOKENS, STEP_TIME_SECONDS


class ExecutorMetrics:
    """What is counted as it happens."""

    def __init__(self, registry: CollectorRegistry, model_name: str) -> None:
        self._tokens = Histogram(
            "octavo_iteration_tokens",
            "Tokens computed in a step.",
            ["model_name"],
            buckets=ITERATION_TOKENS,
            registry=registry,
        ).labels(model_name)
        self._seconds = Histogram(
            "octavo_step_time_seconds",
            "Time of a part of a step.",
            ["model_name", "part"],
            buckets=STEP_TIME_SECONDS,
            registry=registry,
        ).labels(model_name, "execute")
        self._failures = Counter(
            "octavo_steps_failed_total", "Steps that failed in the model.", ["model_name", "reason"], registry=registry
        )
        self._model_name = model_name
        for reason in REASONS:  # they begin at 0: growth is what is looked for, and what appears has not grown
            self._failures.labels(model_name, reason)

    def ran(self, num_tokens: int, seconds: float) -> None:
        """A step of num_tokens ran."""
        self._tokens.observe(num_tokens)
        self._seconds.observe(seconds)

    @contextmanager
    def failures_counted(self) -> Iterator[None]:
        """Count the step that fails here."""
        try:
            yield
        except StepError as error:
            self._failures.labels(self._model_name, error.reason).inc()
            raise


class MeteredRunner:
    """A runner whose steps are counted."""

    def __init__(self, runner: StepRunner, metrics: ExecutorMetrics) -> None:
        self._runner = runner
        self._metrics = metrics

    def begin(
        self, copy_sources: Ints, copy_targets: Ints, batch: Batch | None, before: PendingOutput | None = None
    ) -> PendingOutput:
        """See `StepRunner`."""
        inner = before.inner if isinstance(before, _MeteredOutput) else before
        with self._metrics.failures_counted():
            output = self._runner.begin(copy_sources, copy_targets, batch, inner)
        return _MeteredOutput(output, batch.num_tokens if batch is not None else None, self._metrics)


@dataclass(frozen=True, slots=True)
class _MeteredOutput:
    """Counts a step when its output is taken."""

    inner: PendingOutput
    num_tokens: int | None  # None: no row ran
    metrics: ExecutorMetrics

    @property
    def is_done(self) -> bool:
        return self.inner.is_done

    def wait(self) -> None:
        self.inner.wait()

    def take(self) -> StepOutput:
        with self.metrics.failures_counted():
            output = self.inner.take()
        if self.num_tokens is not None:
            self.metrics.ran(self.num_tokens, output.execute_microseconds / 1e6)
        return output


class StateCollector(Collector):
    """Gauges computed at scrape time."""

    def __init__(self, info: dict[str, str], num_sessions: Callable[[], int], num_rows: Callable[[], int]) -> None:
        self._info = info
        self._num_sessions = num_sessions
        self._num_rows = num_rows

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """See `Collector`."""
        info = GaugeMetricFamily("octavo_executor_info", "What this executor runs.", labels=tuple(self._info))
        info.add_metric(tuple(self._info.values()), 1)
        yield info
        yield GaugeMetricFamily("octavo_executor_sessions", "Sessions held.", value=self._num_sessions())
        yield GaugeMetricFamily("octavo_executor_rows", "Rows in the slots of all sessions.", value=self._num_rows())
