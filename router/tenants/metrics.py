"""Metrics of tenants and of who was not let in. As many tenants as configured have a label of their own, no more."""

from collections.abc import Callable, Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from router.request import Usage

OTHERS = "other"


class TenantLabels:
    """Names as labels: the first `most` that are seen, and one label for all others."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._known: set[str] = set()

    def of(self, name: str) -> str:
        if name not in self._known:
            if len(self._known) >= self._most:
                return OTHERS
            self._known.add(name)
        return name


class TenantMetrics:
    """Counters by tenant.

    Args:
        registry: of the router.
        max_labels: tenants that are told apart.
        in_flight: calls now, by tenant; read at each scrape.
        is_file_good: whether the tenants file could be used; None: there is none.
    """

    def __init__(
        self,
        registry: CollectorRegistry,
        max_labels: int,
        in_flight: Callable[[], Mapping[str, int]],
        is_file_good: Callable[[], bool | None],
    ) -> None:
        self._labels = TenantLabels(max_labels)
        self._requests = Counter("octavo_tenant_requests", "Calls that were let in", ("tenant",), registry=registry)
        self._refusals = Counter(
            "octavo_tenant_refusals", "Calls over a limit of their tenant", ("tenant", "limit"), registry=registry
        )
        self._tokens = Counter(
            "octavo_tenant_tokens",
            "Tokens of ended requests; cached ones are among those of prompts",
            ("tenant", "kind"),
            registry=registry,
        )
        self._failures = Counter(
            "octavo_authentication_failures", "Calls that were not let in", ("reason",), registry=registry
        )
        self._reloads = Counter(
            "octavo_tenants_reloads",
            "Changes of the tenants file, by whether it could be used",
            ("outcome",),
            registry=registry,
        )
        for outcome in ("ok", "failed"):
            self._reloads.labels(outcome)  # begins at 0, so that the first one is seen to be one more
        registry.register(_Gauges(self._labels, in_flight, is_file_good))

    def on_begun(self, tenant: str) -> None:
        self._requests.labels(self._labels.of(tenant)).inc()

    def on_over_limit(self, tenant: str, limit: str) -> None:
        self._refusals.labels(self._labels.of(tenant), limit).inc()

    def on_used(self, tenant: str, usage: Usage) -> None:
        label = self._labels.of(tenant)
        self._tokens.labels(label, "prompt").inc(usage.prompt_tokens)
        self._tokens.labels(label, "cached").inc(usage.cached_tokens)
        self._tokens.labels(label, "generated").inc(usage.new_tokens)

    def on_not_let_in(self, reason: str) -> None:
        self._failures.labels(reason.lower()).inc()

    def on_reload(self, is_good: bool) -> None:
        self._reloads.labels("ok" if is_good else "failed").inc()


class _Gauges(Collector):
    """Read when somebody asks, so that they cannot freeze."""

    def __init__(
        self,
        labels: TenantLabels,
        in_flight: Callable[[], Mapping[str, int]],
        is_file_good: Callable[[], bool | None],
    ) -> None:
        self._labels = labels
        self._in_flight = in_flight
        self._is_file_good = is_file_good

    def collect(self) -> Iterable[Metric]:
        totals: dict[str, int] = {}
        for name, count in self._in_flight().items():
            label = self._labels.of(name)
            totals[label] = totals.get(label, 0) + count
        running = GaugeMetricFamily("octavo_tenant_requests_in_flight", "Calls now", labels=("tenant",))
        for label, count in totals.items():
            running.add_metric((label,), count)
        yield running
        is_good = self._is_file_good()
        if is_good is not None:
            yield GaugeMetricFamily("octavo_tenants_file_good", "Whether the file could be used", value=is_good)

    def describe(self) -> Iterable[Metric]:
        return ()
