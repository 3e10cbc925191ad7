"""How long blocks live, lie idle, and wait to be hit: counted in the manager, read at a scrape.

A histogram of our own because these are fed for every block handed out: a bisection instead of a lock and a walk.
Not here: names of metrics and anything of Prometheus.
"""

from bisect import bisect_left
from collections.abc import Sequence

from octavo.metrics import KV_BLOCK_TIME_SECONDS


class DurationHistogram:
    """Counts of durations per bucket, in seconds."""

    __slots__ = ("bounds_s", "counts", "sum_s")

    def __init__(self, bounds_s: Sequence[float] = KV_BLOCK_TIME_SECONDS) -> None:
        self.bounds_s = tuple(bounds_s)  # upper bounds, ascending
        self.counts = [0] * (len(self.bounds_s) + 1)  # not cumulative; the last is +Inf
        self.sum_s = 0.0

    def observe(self, duration_s: float) -> None:
        """Count one duration; a clock that went back counts as 0."""
        if duration_s < 0.0:
            duration_s = 0.0
        self.counts[bisect_left(self.bounds_s, duration_s)] += 1
        self.sum_s += duration_s


class BlockTimes:
    """When each block was handed out and last used, and the histograms that follow from it."""

    __slots__ = ("born_at", "idle_before_evict", "last_used_at", "lifetime", "reuse_gap")

    def __init__(self, num_blocks: int) -> None:
        self.born_at = [0.0] * num_blocks  # block id -> s
        self.last_used_at = [0.0] * num_blocks  # block id -> s: its last table let go of it
        self.lifetime = DurationHistogram()
        self.idle_before_evict = DurationHistogram()
        self.reuse_gap = DurationHistogram()

    def evicted(self, block: int, now: float) -> None:
        """A cached block loses its content."""
        self.lifetime.observe(now - self.born_at[block])
        self.idle_before_evict.observe(now - self.last_used_at[block])

    def reused(self, block: int, now: float) -> None:
        """A cached block is hit."""
        self.reuse_gap.observe(now - self.last_used_at[block])
