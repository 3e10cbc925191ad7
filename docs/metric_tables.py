"""Writes docs/metrics.md, every metric of every process, from the processes' own registries; `make docs` runs it."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from prometheus_client import CollectorRegistry
from prometheus_client.metrics import MetricWrapperBase

from cache_service.metrics import make_registry
from cache_service.service import CacheService
from executor.metrics import ExecutorMetrics, StateCollector
from octavo.tls_metrics import TlsCollector
from router.metrics import RouterMetrics
from router.tenants.metrics import TenantMetrics

PAGE = Path(__file__).parent / "metrics.md"
HEAD = """# Metrics

What each process exports at `/metrics`, in the order of its code. A counter's series ends in `_total`, a histogram has
`_bucket`, `_sum` and `_count`; durations are in seconds. How they are scraped, alerted on and shown:
[operations](operations/monitoring.md#metrics). `make docs` writes this page.
"""


@dataclass(frozen=True)
class Family:
    """A metric before it has any sample."""

    name: str
    kind: str
    labels: tuple[str, ...]
    text: str


def families_by_process() -> dict[str, list[Family]]:
    """Of processes that have done nothing yet."""
    return {process: list(_families(registry)) for process, registry in _registries().items()}


def render() -> str:
    """The page."""
    return HEAD + "".join(_table(process, families) for process, families in families_by_process().items())


def _table(process: str, families: list[Family]) -> str:
    rows = [
        f"| `{family.name}{'_total' if family.kind == 'counter' else ''}` | {family.kind} "
        f"| {', '.join(f'`{label}`' for label in family.labels)} | {family.text.rstrip('.')} |"
        for family in families
    ]
    return f"\n## {process}\n\n| metric | kind | labels | |\n|---|---|---|---|\n" + "\n".join(rows) + "\n"


def _registries() -> dict[str, CollectorRegistry]:
    of_router = RouterMetrics(list).registry
    of_router.register(TlsCollector({}))
    TenantMetrics(of_router, 0, dict, lambda: True)
    of_executor = CollectorRegistry()
    ExecutorMetrics(of_executor, "")
    info = dict.fromkeys(("executor", "model_name", "device", "attention", "weights_dtype", "kv_dtype", "version"), "")
    of_executor.register(TlsCollector({}))
    of_executor.register(StateCollector(info, lambda: 0, lambda: 0))
    return {"Router": of_router, "Cache service": make_registry(CacheService()), "Executor": of_executor}


def _families(registry: CollectorRegistry) -> Iterator[Family]:
    """Names and labels of a metric without samples are private to its library."""
    for collector in registry._collector_to_names:
        if isinstance(collector, MetricWrapperBase):
            yield Family(collector._name, collector._type, collector._labelnames, collector._documentation)
        else:
            for found in collector.collect():
                yield Family(found.name, found.type, tuple(found._labelnames), found.documentation)


if __name__ == "__main__":
    PAGE.write_text(render(), "utf-8")
