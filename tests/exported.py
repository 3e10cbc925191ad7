"""What the three processes export: every series' name and labels, read from their own registries without any load."""

import functools

from docs.metric_tables import families_by_process

# What Prometheus adds to every series that it scrapes; the last three in Kubernetes.
TARGET_LABELS = {"job", "instance", "namespace", "pod", "container"}
# Series that Prometheus makes itself.
OF_PROMETHEUS = {"up": set[str](), "ALERTS": {"alertname", "alertstate", "severity"}}

_SUFFIXES = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "gauge": ("",)}


@functools.cache
def exported_series() -> dict[str, set[str]]:
    """Labels by the name of each series, those of the process alone. Of a name that two processes export, of both."""
    series: dict[str, set[str]] = {}
    for families in families_by_process().values():
        for family in families:
            for suffix in _SUFFIXES[family.kind]:
                own = {*family.labels, *(["le"] if suffix == "_bucket" else [])}
                series[family.name + suffix] = series.get(family.name + suffix, set()) | own
    return series
