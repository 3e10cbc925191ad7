"""The stream of block events to one follower: a snapshot where it is needed, then what happens.

A follower that reads too slowly costs no memory: it is told the events that are kept, and where it fell behind those,
everything anew. Not here: what an event is (events), its message (servicer_messages).
"""

import asyncio
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from cache_service import refusal
from cache_service.events import BlockEvent, Stored
from cache_service.managed_arena import ManagedArena
from cache_service.service import CacheService

MAX_WATCHES = 64
MAX_EVENTS = 1024  # of one message
LOOK_INTERVAL_S = 1.0  # between two looks whether the arena is still there


@dataclass(frozen=True, slots=True)
class Batch:
    """One message.

    Attributes:
        last_number: to come back with; 0 inside a snapshot, which cannot be taken up in its middle.
        begins_snapshot: what was known is to be forgotten first.
    """

    stream_id: str
    last_number: int
    events: list[BlockEvent]
    begins_snapshot: bool = False


class Watching:
    """All followers of a cache service."""

    def __init__(self, service: CacheService) -> None:
        self._service = service
        self._process = uuid.uuid4().hex  # numbers mean nothing in another process
        self._wakers: set[asyncio.Event] = set()
        self._is_over = False

    def end(self) -> None:
        """The process stops: every stream ends, and no other begins."""
        self._is_over = True
        for waker in self._wakers:
            waker.set()

    async def follow(self, arena_id: str, stream_id: str, last_number: int) -> AsyncIterator[Batch]:
        """Batches without end.

        Args:
            stream_id: of the last batch that was received; empty, or of another stream: a snapshot comes first.
            last_number: of the last batch that was received.

        Raises:
            OctavoError: UNKNOWN_ARENA, TOO_MANY_WATCHES; ARENA_REPLACED, STOPPING while it lasts.
        """
        arena = self._service.find_arena(arena_id)
        own_id = f"{self._process}-{arena.serial}"
        number = last_number if stream_id == own_id else -1
        with self._waker(arena) as waker:
            while True:
                waker.clear()
                for batch in self._batches(arena, own_id, number):
                    yield batch
                    number = batch.last_number
                await self._wait(arena, waker, number)

    def _batches(self, arena: ManagedArena, stream_id: str, number: int) -> Iterator[Batch]:
        """All that there is now; looked up one by one, since time passes while one is sent."""
        events = arena.manager.events
        found = events.after(number, MAX_EVENTS)
        if found is None:
            yield from _snapshot(arena, stream_id)
            return
        while found:
            number += len(found)
            yield Batch(stream_id, number, found)
            found = events.after(number, MAX_EVENTS)

    async def _wait(self, arena: ManagedArena, waker: asyncio.Event, number: int) -> None:
        while arena.manager.events.last_number == number:
            if self._is_over:
                raise refusal.stopping()
            if not self._service.has_arena(arena.arena_id) or self._service.find_arena(arena.arena_id) is not arena:
                raise refusal.arena_replaced(arena.arena_id)
            try:
                async with asyncio.timeout(LOOK_INTERVAL_S):
                    await waker.wait()
            except TimeoutError:
                continue
            waker.clear()

    @contextmanager
    def _waker(self, arena: ManagedArena) -> Iterator[asyncio.Event]:
        if len(self._wakers) >= MAX_WATCHES:
            raise refusal.too_many_watches(MAX_WATCHES)
        waker = asyncio.Event()
        stop_listening = arena.manager.events.listen(waker.set)
        self._wakers.add(waker)
        try:
            yield waker
        finally:
            self._wakers.remove(waker)
            stop_listening()


def _snapshot(arena: ManagedArena, stream_id: str) -> Iterator[Batch]:
    """Everything findable, a block before those that come after it; what happens meanwhile follows as events."""
    number = arena.manager.events.last_number
    found = arena.manager.findable()
    for start in range(0, max(len(found), 1), MAX_EVENTS):
        events: list[BlockEvent] = [
            Stored(node.key, node.parent.key, node.tokens)
            for node in found[start : start + MAX_EVENTS]
            if node.parent is not None
        ]
        is_last = start + MAX_EVENTS >= len(found)
        yield Batch(stream_id, number if is_last else 0, events, begins_snapshot=start == 0)
