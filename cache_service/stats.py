"""What the manager of one arena counts. Not here: how counts are exported (metrics) and sent (servicer)."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ManagerStats:
    """Counts of one arena: blocks per state now, and totals since it was made."""

    total_blocks: int
    free_blocks: int
    cached_blocks: int
    used_blocks: int
    fenced_blocks: int
    reserved_blocks: int
    num_sequences: int
    queried_tokens: int
    hit_tokens: int
    evicted_blocks: int
    allocated_blocks: int
    copied_blocks: int
