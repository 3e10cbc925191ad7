"""`octavo top`: a picture of a running stack that keeps up with it: blocks by state and tenant, requests, steps, hits.

It reads the metrics of the processes and asks nothing else, so it needs no token, and a process that is away is
named and left out until it is back. Here belongs what is read and what follows from two readings. Not here: how it is
drawn (top_screen), a single look at more detail (stats).
"""

import sys
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from pydantic import BaseModel, ConfigDict, Field
from rich.console import Console
from rich.live import Live

from octavo.samples import BLOCK_STATES, Samples, executor_addresses, scrape, scrape_executors
from octavo.settings import load_settings
from octavo.top_screen import BAR_CELLS, draw

ROUTER, CACHE_SERVICE = "router", "cache service"


class TopConfig(BaseModel):
    """A running stack in the terminal, until Ctrl-C."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    router_metrics: str = Field("127.0.0.1:9700", description="host:port of the router's metrics; empty: none")
    cache_service_metrics: str = Field("127.0.0.1:9701", description="host:port of the cache service's; empty: none")
    executor_metrics: tuple[str, ...] = Field(
        (),
        description="host:port of an executor's, may be given several times; "
        "none given: of all that the cache service knows",
    )
    interval_s: float = Field(1.0, ge=0.1, description="seconds between two readings; rates are over the last")
    timeout_s: float = Field(2.0, gt=0, description="seconds until a process must have answered")
    frames: int = Field(0, ge=0, description="end after so many pictures; 0: never")


@dataclass(frozen=True)
class Reading:
    """What the processes said at one moment.

    Attributes:
        at_s: of a monotonic clock.
        samples: by process, an executor by its name; one that does not answer is missing, and in `away` with why.
        executor_addresses: that were asked; the next reading asks them too where nobody tells it of others.
    """

    at_s: float
    samples: Mapping[str, Samples]
    away: Mapping[str, str] = field(default_factory=dict)
    executor_addresses: tuple[str, ...] = ()

    @property
    def executors(self) -> list[str]:
        """The names of those that answered, in order."""
        return sorted(name for name in self.samples if name not in (ROUTER, CACHE_SERVICE))

    def total(self, process: str, name: str, **labels: str) -> float | None:
        """The sum of the series with these labels; None: the process does not answer."""
        found = self.samples.get(process)
        return None if found is None else found.total(name, **labels)


@dataclass(frozen=True)
class Picture:
    """What a reading and the one before it come to. None: not known."""

    now: Reading
    before: Reading | None

    def rate(self, process: str, name: str, **labels: str) -> float | None:
        """Of a counter, a second; a process that began anew counts from 0."""
        grown = self.grown(process, name, **labels)
        if grown is None or self.before is None:
            return None
        return grown / (self.now.at_s - self.before.at_s)

    def grown(self, process: str, name: str, **labels: str) -> float | None:
        """Of a counter, since the reading before."""
        if self.before is None:
            return None
        now, before = (each.total(process, name, **labels) for each in (self.now, self.before))
        if now is None or before is None:
            return None
        return now - before if now >= before else now

    def ratio(self, process: str, part: str, whole: str, **labels: str) -> float | None:
        """Between two counters, since the reading before; None also where the whole did not grow."""
        grown, of = self.grown(process, part, **labels), self.grown(process, whole, **labels)
        return grown / of if grown is not None and of else None

    def blocks(self) -> dict[str, int]:
        """By state; empty: the cache service does not answer."""
        counts = {state: self.now.total(CACHE_SERVICE, "octavo_kv_blocks", state=state) for state in BLOCK_STATES}
        return {state: int(count) for state, count in counts.items() if count is not None}

    def tenants(self) -> dict[str, dict[str, float]]:
        """Blocks and tokens a second by tenant (empty: requests without one), who has most blocks first."""
        found: dict[str, dict[str, float]] = {}
        cache, router = self.now.samples.get(CACHE_SERVICE), self.now.samples.get(ROUTER)
        for name in cache.values("octavo_kv_tenant_blocks", "tenant") if cache else ():
            for state in ("cached", "in_use"):
                count = self.now.total(CACHE_SERVICE, "octavo_kv_tenant_blocks", tenant=name, state=state)
                found.setdefault(name, {})[state] = count or 0.0
        for name in router.values("octavo_tenant_tokens_total", "tenant") if router else ():
            rates = [
                self.rate(ROUTER, "octavo_tenant_tokens_total", tenant=name, kind=kind)
                for kind in ("prompt", "generated")
            ]
            found.setdefault(name, {})["tokens_per_s"] = sum(rate or 0.0 for rate in rates)
        return dict(sorted(found.items(), key=lambda item: -sum(item[1].get(key, 0.0) for key in ("cached", "in_use"))))


def read(config: TopConfig, before: Reading | None = None) -> Reading:
    """Ask every process that has an address; `before` knows executors while the cache service is away."""
    samples: dict[str, Samples] = {}
    away: dict[str, str] = {}
    for process, address in ((ROUTER, config.router_metrics), (CACHE_SERVICE, config.cache_service_metrics)):
        if address:
            try:
                samples[process] = scrape(address, config.timeout_s)
            except (OSError, ValueError) as error:
                away[process] = f"http://{address}/metrics: {error}"
    addresses = config.executor_metrics
    if not addresses and CACHE_SERVICE in samples:
        addresses = executor_addresses(samples[CACHE_SERVICE], config.cache_service_metrics)
    elif not addresses and before is not None:
        addresses = before.executor_addresses
    executors = scrape_executors(addresses, config.timeout_s)
    away |= {f"executor at {address}": f"http://{address}/metrics: {why}" for address, why in executors.away.items()}
    return Reading(time.monotonic(), {**samples, **executors.samples}, away, addresses)


def main(argv: list[str] | None = None, console: Console | None = None) -> int:
    """Run the command; returns its exit code: 1 where no process answers the first time, 2 for bad usage."""
    config = load_settings(TopConfig, section="top", program="octavo top", argv=argv)
    now = read(config)
    if not now.samples:
        sys.stderr.write("".join(f"octavo top: the {process}: {why}\n" for process, why in now.away.items()))
        return 1
    history: deque[float] = deque(maxlen=BAR_CELLS)  # tokens a second
    before: Reading | None = None
    num_drawn = 0
    with Live(console=console or Console(), auto_refresh=False, screen=config.frames == 0) as live:
        try:
            while True:
                picture = Picture(now, before)
                history.append(picture.rate(ROUTER, "octavo_generation_tokens_total") or 0.0)
                live.update(draw(picture, list(history)), refresh=True)
                num_drawn += 1
                if num_drawn == config.frames:
                    return 0
                time.sleep(config.interval_s)
                before, now = now, read(config, now)
        except KeyboardInterrupt:
            return 0
