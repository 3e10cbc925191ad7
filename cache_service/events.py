"""What becomes findable and what is no longer, numbered, for those who follow the cache from outside.

From the first follower on the last events are kept; whoever asks for older ones begins with a snapshot. Where nobody
follows, an event costs an addition. Pure. Not here: sending (watching), what makes a block findable (prefix).
"""

from collections import deque
from collections.abc import Callable
from itertools import islice
from typing import NamedTuple

DEFAULT_CAPACITY = 16_384


class Stored(NamedTuple):
    """A block of tokens after one history can be hit from now on.

    Attributes:
        parent_key: of the block before; of the first block, the key of its extras.
        tokens: packed, little-endian uint32.
    """

    key: bytes
    parent_key: bytes
    tokens: bytes


class Removed(NamedTuple):
    """It cannot be hit any more."""

    key: bytes


BlockEvent = Stored | Removed


class BlockEvents:
    """The events of one arena, numbered 1, 2, 3, ... without a gap."""

    def __init__(self, capacity: int = DEFAULT_CAPACITY) -> None:
        self.last_number = 0
        self._kept: deque[BlockEvent] = deque(maxlen=capacity)
        self._listeners: list[Callable[[], None]] = []
        self._is_followed = False  # or was, once

    def stored(self, key: bytes, parent_key: bytes, tokens: bytes) -> None:
        """See `Stored`."""
        self.last_number += 1
        if self._is_followed:
            self._keep(Stored(key, parent_key, tokens))

    def removed(self, key: bytes) -> None:
        """See `Removed`."""
        self.last_number += 1
        if self._is_followed:
            self._keep(Removed(key))

    def _keep(self, event: BlockEvent) -> None:
        self._kept.append(event)
        for listener in self._listeners:
            listener()

    def after(self, number: int, limit: int) -> list[BlockEvent] | None:
        """At most `limit` events, from number + 1 on; None: they are not all kept, or not of this arena."""
        first_kept = self.last_number - len(self._kept) + 1
        if not first_kept - 1 <= number <= self.last_number:
            return None
        start = number + 1 - first_kept
        return list(islice(self._kept, start, start + limit))

    def listen(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Call `listener`, which must neither block nor raise, at every event; returns what ends that."""
        self._is_followed = True
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)
