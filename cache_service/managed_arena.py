"""Arenas and their managers, by the name of their device.

Not here: how memory is made (arena) and what is in a block table (manager).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from cache_service import refusal
from cache_service.geometry import ArenaDescription
from cache_service.journal import Journal
from cache_service.ledger import BufferLedger
from cache_service.manager import BlockManager


class ArenaMemory(Protocol):
    """Memory that this process owns, with what a later cache service must know of it."""

    @property
    def description(self) -> ArenaDescription: ...

    @property
    def ledger(self) -> BufferLedger: ...

    @property
    def journal(self) -> Journal: ...

    def close(self) -> None: ...

    def leave(self) -> None: ...


@dataclass(frozen=True, slots=True)
class ManagedArena:
    memory: ArenaMemory
    manager: BlockManager
    serial: int  # among those that this service has had
    is_inherited: bool = False  # taken over from an earlier cache service

    @property
    def arena_id(self) -> str:
        return self.memory.description.arena_id


class Arenas:
    """All arenas of this service."""

    def __init__(self) -> None:
        self._by_id: dict[str, ManagedArena] = {}

    def __iter__(self) -> Iterator[ManagedArena]:
        return iter(list(self._by_id.values()))

    def has(self, arena_id: str) -> bool:
        return arena_id in self._by_id

    def find(self, arena_id: str) -> ManagedArena:
        """Raises NOT_FOUND UNKNOWN_ARENA."""
        if arena_id not in self._by_id:
            raise refusal.unknown_arena(arena_id)
        return self._by_id[arena_id]

    def add(self, arena: ManagedArena) -> None:
        self._by_id[arena.arena_id] = arena

    def remove(self, arena: ManagedArena) -> None:
        """Its memory is given back."""
        del self._by_id[arena.arena_id]
        arena.memory.close()

    def check_rebuilt(self) -> None:
        """Raise UNAVAILABLE REBUILDING while blocks are held back that an earlier cache service may have handed out."""
        if any(arena.manager.rebuild.is_unfinished for arena in self._by_id.values()):
            raise refusal.rebuilding()
