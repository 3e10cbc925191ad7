"""The metrics of the cache service, computed from its state at each scrape, so that none can freeze.

Here belongs what each is called and what it counts. Not here: counting, which the state does for itself.
"""

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from cache_service.managed_arena import ManagedArena
from cache_service.registry import Executor
from cache_service.service import CacheService
from cache_service.times import DurationHistogram
from octavo.tls import TlsSource
from octavo.tls_metrics import TlsCollector

MAX_TENANT_LABELS = 100
OTHER_TENANTS = "other"
STATES = ("free", "cached", "used", "fenced", "reserved")


def make_registry(service: CacheService, tls: TlsSource | None = None) -> CollectorRegistry:
    """A registry of its own with everything that this process exports."""
    registry = CollectorRegistry()
    registry.register(CacheServiceCollector(service))
    registry.register(TlsCollector({"internal": tls}))
    return registry


class CacheServiceCollector(Collector):
    """Reads the service from the scraper's thread: plain numbers and copies of small tables, nothing is locked."""

    def __init__(self, service: CacheService) -> None:
        self._service = service

    def describe(self) -> Iterable[Metric]:
        """Nothing to run at registration."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Every family, with one sample or set of samples per arena."""
        arenas = self._service.arenas()
        yield _blocks(arenas)
        yield GaugeMetricFamily("octavo_kv_leases", "Live leases.", value=self._service.num_leases)
        yield from _executors(self._service.executors())
        yield _sequences(arenas)
        yield _tenants(arenas)
        yield _config_info(arenas)
        yield from _counters(arenas)
        yield from _histograms(arenas)


def _name(arena: ManagedArena) -> str:
    return arena.memory.description.arena_id


def _blocks(arenas: list[ManagedArena]) -> Metric:
    family = GaugeMetricFamily("octavo_kv_blocks", "KV blocks by state.", labels=["arena", "state"])
    for arena in arenas:
        stats = arena.manager.stats()
        for state in STATES:
            family.add_metric([_name(arena), state], getattr(stats, f"{state}_blocks"))
    return family


def _executors(executors: list[Executor]) -> Iterator[Metric]:
    up = GaugeMetricFamily(
        "octavo_executor_up",
        "Whether the executor's process is alive; not of one that held no session when it ended.",
        labels=["executor"],
    )
    restarts = CounterMetricFamily(
        "octavo_executor_restarts", "Processes that took an earlier one's place.", labels=["executor"]
    )
    info = GaugeMetricFamily(
        "octavo_registered_executor_info",
        "Always 1; the executors that live, and the address of each one's own metrics (empty: none).",
        labels=["executor", "metrics_address"],
    )
    for executor in executors:
        if not executor.ended_in_order:
            up.add_metric([executor.executor_id], executor.is_alive)
        restarts.add_metric([executor.executor_id], executor.num_restarts)
        if executor.is_alive:
            info.add_metric([executor.executor_id, executor.metrics_address], 1)
    num_alive = sum(executor.is_alive for executor in executors)
    yield GaugeMetricFamily("octavo_kv_executors", "Registered executors alive.", value=num_alive)
    yield up
    yield restarts
    yield info


def _sequences(arenas: list[ManagedArena]) -> Metric:
    family = GaugeMetricFamily("octavo_kv_sequences", "Sequences that hold blocks.", labels=["arena"])
    for arena in arenas:
        family.add_metric([_name(arena)], arena.manager.num_sequences)
    return family


def _tenants(arenas: list[ManagedArena]) -> Metric:
    """Tenants with most blocks by name, all others as one."""
    family = GaugeMetricFamily(
        "octavo_kv_tenant_blocks",
        "KV blocks by tenant (empty: requests without one; group:NAME: of a prefix group): cached ones, and those in "
        "use or fenced.",
        labels=["arena", "tenant", "state"],
    )
    for arena in arenas:
        tenants = sorted(arena.manager.tenants(), key=lambda tenant: tenant.num_held, reverse=True)
        counts: dict[str, tuple[int, int]] = {}  # label -> (cached, others)
        for place, tenant in enumerate(tenants):
            label = (tenant.name or "") if place < MAX_TENANT_LABELS else OTHER_TENANTS
            num_cached, num_other = counts.get(label, (0, 0))
            cached = len(tenant.cached)
            counts[label] = (num_cached + cached, num_other + tenant.num_held - cached)
        for label, (num_cached, num_other) in counts.items():
            family.add_metric([_name(arena), label, "cached"], num_cached)
            family.add_metric([_name(arena), label, "in_use"], num_other)
    return family


def _config_info(arenas: list[ManagedArena]) -> Metric:
    labels = ["arena", "block_size", "num_blocks", "block_bytes", "kv_dtype", "model_fingerprint"]
    family = GaugeMetricFamily("octavo_cache_config_info", "Always 1; the labels say what the arena is.", labels=labels)
    for arena in arenas:
        about = arena.memory.description
        values = [about.geometry.block_size, about.num_blocks, about.layout.block_bytes, about.geometry.dtype]
        family.add_metric([_name(arena), *map(str, values), about.model_fingerprint], 1)
    return family


def _counters(arenas: list[ManagedArena]) -> Iterator[Metric]:
    for name, text, field in (
        ("octavo_prefix_cache_queries", "Tokens of allocations that looked for a cached prefix.", "queried_tokens"),
        ("octavo_prefix_cache_hits", "Tokens of those that were cached.", "hit_tokens"),
        ("octavo_kv_blocks_allocated", "Blocks handed out.", "allocated_blocks"),
        ("octavo_kv_blocks_evicted", "Cached blocks whose content was given up.", "evicted_blocks"),
        ("octavo_kv_blocks_copied", "Blocks copied by forks.", "copied_blocks"),
    ):
        family = CounterMetricFamily(name, text, labels=["arena"])
        for arena in arenas:
            family.add_metric([_name(arena)], getattr(arena.manager.stats(), field))
        yield family


def _histograms(arenas: list[ManagedArena]) -> Iterator[Metric]:
    for name, text, field in (
        ("octavo_kv_block_lifetime_seconds", "From handing a block out to giving its content up.", "lifetime"),
        ("octavo_kv_block_idle_before_evict_seconds", "From a block's last use to eviction.", "idle_before_evict"),
        ("octavo_kv_block_reuse_gap_seconds", "From a cached block's last use to its next hit.", "reuse_gap"),
    ):
        family = HistogramMetricFamily(name, text, labels=["arena"])
        for arena in arenas:
            histogram: DurationHistogram = getattr(arena.manager.block_times, field)
            family.add_metric([_name(arena)], _cumulative(histogram), histogram.sum_s)
        yield family


def _cumulative(histogram: DurationHistogram) -> list[tuple[str, float]]:
    buckets: list[tuple[str, float]] = []
    total = 0
    for bound, count in zip([*map(str, histogram.bounds_s), "+Inf"], list(histogram.counts), strict=True):
        total += count
        buckets.append((bound, total))
    return buckets
