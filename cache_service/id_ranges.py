"""A set of ids that grows for ever and stays small: disjoint ranges, merged where they touch.

Ids that count up leave one range behind, however many there were. Not here: what the ids mean.
"""

from bisect import bisect_right
from collections.abc import Iterable


class IdRanges:
    """A set of non-negative integers. O(log ranges) to ask; adding may shift later ranges."""

    __slots__ = ("_ends", "_starts")

    def __init__(self, ranges: Iterable[tuple[int, int]] = ()) -> None:
        """ranges: as `ranges()` gave them."""
        self._starts: list[int] = []  # ascending
        self._ends: list[int] = []  # range i is [starts[i], ends[i])
        for start, end in ranges:
            self._starts.append(start)
            self._ends.append(end)

    def __contains__(self, value: int) -> bool:
        at = bisect_right(self._starts, value) - 1
        return at >= 0 and value < self._ends[at]

    def add(self, value: int) -> None:
        """Put one id in; an id that is in already changes nothing."""
        if value in self:
            return
        at = bisect_right(self._starts, value)  # where a range that starts at value belongs
        joins_before = at > 0 and self._ends[at - 1] == value
        joins_after = at < len(self._starts) and self._starts[at] == value + 1
        if joins_before and joins_after:
            self._ends[at - 1] = self._ends[at]
            del self._starts[at], self._ends[at]
        elif joins_before:
            self._ends[at - 1] = value + 1
        elif joins_after:
            self._starts[at] = value
        else:
            self._starts.insert(at, value)
            self._ends.insert(at, value + 1)

    def ranges(self) -> tuple[tuple[int, int], ...]:
        """Ascending (start, end), end not included."""
        return tuple(zip(self._starts, self._ends, strict=True))

    @property
    def num_ranges(self) -> int:
        return len(self._starts)
