"""What the three processes export: every series' name and labels, read from their own registries without any load."""

import functools

from prometheus_client import CollectorRegistry
from prometheus_client.metrics import MetricWrapperBase

from cache_service.metrics import make_registry
from cache_service.service import CacheService
from executor.metrics import ExecutorMetrics, StateCollector
from router.metrics import RouterMetrics
from router.tenants.metrics import TenantMetrics

# What Prometheus adds to every series that it scrapes; the last three in Kubernetes.
TARGET_LABELS = {"job", "instance", "namespace", "pod", "container"}
# Series that Prometheus makes itself.
OF_PROMETHEUS = {"up": set[str](), "ALERTS": {"alertname", "alertstate", "severity"}}

_SUFFIXES = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "gauge": ("",)}


@functools.cache
def exported_series() -> dict[str, set[str]]:
    """Labels by the name of each series, those of the process alone. Of a name that two processes export, of both."""
    series: dict[str, set[str]] = {}
    for registry in _registries():
        for name, kind, labels in _families(registry):
            for suffix in _SUFFIXES[kind]:
                own = labels | ({"le"} if suffix == "_bucket" else set())
                series[name + suffix] = series.get(name + suffix, set()) | own
    return series


def _registries() -> list[CollectorRegistry]:
    of_executor = CollectorRegistry()
    ExecutorMetrics(of_executor, "model")
    of_executor.register(StateCollector({"executor": "", "model_name": "", "device": ""}, lambda: 0, lambda: 0))
    of_router = RouterMetrics(list).registry
    TenantMetrics(of_router, 0, dict, lambda: True)
    return [of_router, make_registry(CacheService()), of_executor]


def _families(registry: CollectorRegistry) -> list[tuple[str, str, set[str]]]:
    """Name, kind and labels of all families, those without a sample too: hence the private names."""
    found = []
    for collector in list(registry._collector_to_names):
        if isinstance(collector, MetricWrapperBase):
            found.append((collector._name, collector._type, set(collector._labelnames)))
        else:
            found += [(family.name, family.type, set(family._labelnames)) for family in collector.collect()]
    return found
