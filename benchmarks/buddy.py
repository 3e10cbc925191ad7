"""A buddy allocator over a span of any length: the allocation that the paper gave its contiguous baselines.

Here belongs the arithmetic of chunks. Not here: what the slots are for.

Source of the algorithm: K. C. Knowlton, "A Fast Storage Allocator", CACM 8(10), 1965.
"""


class BuddyAllocator:
    """Chunks of powers of two in `num_slots` slots; the span begins as the largest chunks that it is the sum of."""

    def __init__(self, num_slots: int) -> None:
        self._free: dict[int, set[int]] = {1 << order: set() for order in range(num_slots.bit_length())}
        start = 0
        for size in sorted(self._free, reverse=True):
            if num_slots & size:
                self._free[size].add(start)
                start += size

    def allocate(self, num_slots: int) -> tuple[int, int] | None:
        """(start, size) of the smallest chunk that holds `num_slots`, or None where there is none."""
        size = 1 << (num_slots - 1).bit_length()
        found = next((each for each in sorted(self._free) if each >= size and self._free[each]), None)
        if found is None:
            return None
        start = min(self._free[found])
        self._free[found].remove(start)
        while found > size:
            found //= 2
            self._free[found].add(start + found)
        return start, size

    def free(self, start: int, size: int) -> None:
        """Give a chunk back; it joins its buddy as long as that is free too."""
        while (buddy := start ^ size) in self._free.get(size, ()):
            self._free[size].remove(buddy)
            start, size = min(start, buddy), size * 2
        self._free[size].add(start)

    @property
    def num_free(self) -> int:
        """Slots in no chunk."""
        return sum(size * len(starts) for size, starts in self._free.items())
