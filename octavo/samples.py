"""What the processes of a running stack say at `/metrics`, for the commands that show it, and where executors say it.

Not here: what is made of the numbers (stats, top).
"""

import urllib.request
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

BLOCK_STATES = ("free", "cached", "used", "fenced", "reserved")
_EVERY_HOST = ("0.0.0.0", "[::]", "")


class Samples:
    """One scrape: sums over the series of a name."""

    def __init__(self, text: str) -> None:
        self._samples: dict[str, list[tuple[Mapping[str, str], float]]] = defaultdict(list)
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                self._samples[sample.name].append((sample.labels, sample.value))

    def total(self, name: str, **labels: str) -> float:
        """The sum of the series with these labels; 0 where there is none."""
        return sum(value for has, value in self._samples[name] if labels.items() <= has.items())

    def values(self, name: str, label: str) -> list[str]:
        """What a label of this name is, each once, in the order of the scrape."""
        return list(dict.fromkeys(has[label] for has, _ in self._samples[name] if label in has))


def scrape(address: str, timeout_s: float | None) -> Samples:
    """The metrics served there. Raises OSError where nobody serves any, ValueError where something else is served."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=timeout_s) as response:
        return Samples(response.read().decode("utf-8"))


def executor_addresses(cache_service: Samples, scraped_at: str) -> tuple[str, ...]:
    """Where the executors that a cache service knows say their metrics.

    Args:
        scraped_at: host:port of these metrics. An executor that listens on every address is on the same host.
    """
    found = cache_service.values("octavo_registered_executor_info", "metrics_address")
    return tuple(sorted(_reachable(address, scraped_at) for address in found if address))


def _reachable(listen: str, scraped_at: str) -> str:
    host, _, port = listen.rpartition(":")
    return f"{scraped_at.rpartition(':')[0]}:{port}" if host in _EVERY_HOST else listen


@dataclass(frozen=True)
class Executors:
    """Those that answered, by name, and why the others did not, by address."""

    samples: Mapping[str, Samples]
    away: Mapping[str, str]


def scrape_executors(addresses: Iterable[str], timeout_s: float | None) -> Executors:
    """Ask each; one that does not say its name has its address for one."""
    samples: dict[str, Samples] = {}
    away: dict[str, str] = {}
    for address in addresses:
        try:
            answer = scrape(address, timeout_s)
        except (OSError, ValueError) as error:
            away[address] = str(error)
        else:
            name = next(iter(answer.values("octavo_executor_info", "executor")), address)
            samples[address if name in samples else name] = answer
    return Executors(samples, away)
