"""Whether a process's certificates can be used, as metrics: read from the files at each scrape."""

from collections.abc import Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from octavo.tls import TlsSource


class TlsCollector(Collector):
    """Of the sources that there are, by what they are for: `public`, `internal`.

    Args:
        sources: None: no TLS there, and no series.
    """

    def __init__(self, sources: Mapping[str, TlsSource | None]) -> None:
        self._sources = {use: source for use, source in sources.items() if source is not None}

    def describe(self) -> list[Metric]:
        """Nothing to run at registration."""
        return []

    def collect(self) -> Iterator[Metric]:
        good = GaugeMetricFamily("octavo_tls_files_good", "Whether the files could be used as they are", labels=["use"])
        text = "Changes of certificate files, by whether they could be used"
        reloads = CounterMetricFamily("octavo_tls_reloads", text, labels=["use", "outcome"])
        for use, source in self._sources.items():
            source.latest()  # a change is seen now, not with the next call
            good.add_metric([use], source.is_good)
            for outcome, count in (("ok", source.num_reloads), ("failed", source.num_failures)):
                reloads.add_metric([use, outcome], count)
        yield good
        yield reloads
