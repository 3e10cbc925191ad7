"""What a lease's messages do to its sequences, across arenas: one answer per item.

Here belongs which ids a lease may use and which manager an item goes to. Not here: the order of messages (service),
rules about blocks (manager).
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

from cache_service import refusal
from cache_service.fence import SessionStep
from cache_service.lease import Lease
from cache_service.managed_arena import Arenas
from cache_service.manager import BlockManager
from cache_service.operation import (
    Allocated,
    Allocation,
    Commit,
    Committed,
    Extended,
    Extension,
    Fork,
    Forked,
    Release,
    Released,
    SequenceId,
    SequenceSnapshot,
)
from cache_service.registry import ExecutorRegistry
from octavo.errors import OctavoError

Item = TypeVar("Item")
Answer = TypeVar("Answer")


class LeaseOperations:
    """Part of the service, on its arenas and executors."""

    def __init__(self, arenas: Arenas, registry: ExecutorRegistry) -> None:
        self._arenas = arenas
        self._registry = registry

    def allocate(
        self, lease: Lease, arena_id: str, allocations: Sequence[Allocation], now: float
    ) -> list[Allocated | OctavoError]:
        """One answer per allocation. Raises UNKNOWN_ARENA, REBUILDING."""
        manager = self._arenas.find(arena_id).manager
        self._arenas.check_rebuilt()
        refused = {
            position: error
            for position, allocation in enumerate(allocations)
            if (error := _barred(lease, allocation.sequence_id)) is not None
        }
        admitted = [allocation for position, allocation in enumerate(allocations) if position not in refused]
        answers = iter(manager.allocate(lease.lease_id, admitted, now))
        merged: list[Allocated | OctavoError] = [
            refused[position] if position in refused else next(answers) for position in range(len(allocations))
        ]
        for allocation, answer in zip(allocations, merged, strict=True):
            if isinstance(answer, Allocated):
                lease.arena_of[allocation.sequence_id] = arena_id
        return merged

    def extend(self, lease: Lease, extensions: Sequence[Extension], now: float) -> list[Extended | OctavoError]:
        """One answer per extension. Raises REBUILDING."""
        self._arenas.check_rebuilt()
        answers: list[Extended | OctavoError] = [refusal.unknown_sequence(SequenceId(0))] * len(extensions)
        positions_of: dict[str, list[int]] = {}
        for position, extension in enumerate(extensions):
            try:
                self._manager_of(lease, extension.sequence_id)
                positions_of.setdefault(lease.arena_of[extension.sequence_id], []).append(position)
            except OctavoError as error:
                answers[position] = error
        for arena_id, positions in positions_of.items():
            batch = [extensions[position] for position in positions]
            extended = self._arenas.find(arena_id).manager.extend(lease.lease_id, batch, now)
            for position, answer in zip(positions, extended, strict=True):
                answers[position] = answer
        return answers

    def commit(self, lease: Lease, commits: Sequence[Commit], now: float) -> list[Committed | OctavoError]:
        """One answer per commit."""
        return _each(commits, lambda item: self._manager_of(lease, item.sequence_id).commit(lease.lease_id, item, now))

    def fork(self, lease: Lease, forks: Sequence[Fork], now: float) -> list[Forked | OctavoError]:
        """One answer per fork. Raises REBUILDING."""
        self._arenas.check_rebuilt()
        return _each(forks, lambda item: self._fork_one(lease, item, now))

    def _fork_one(self, lease: Lease, fork: Fork, now: float) -> Forked:
        manager = self._manager_of(lease, fork.parent_sequence_id)
        for child_id in fork.child_sequence_ids:
            if (error := _barred(lease, child_id)) is not None:
                raise error
        forked = manager.fork(lease.lease_id, fork, now)
        arena_id = lease.arena_of[fork.parent_sequence_id]
        lease.arena_of.update(dict.fromkeys(fork.child_sequence_ids, arena_id))
        return forked

    def release(self, lease: Lease, releases: Sequence[Release], now: float) -> list[Released | OctavoError]:
        """One answer per release; an unknown or released sequence is no error, its id is only barred from then on."""
        return _each(releases, lambda item: self._release_one(lease, item, now))

    def _release_one(self, lease: Lease, release: Release, now: float) -> Released:
        self._registry.check_sessions(lease.sessions, release.free_after)
        arena_id = lease.arena_of.get(release.sequence_id)
        if arena_id is None:
            lease.released.add(release.sequence_id)
            return Released(was_held=False)
        released = self._arenas.find(arena_id).manager.release(lease.lease_id, release, now)
        del lease.arena_of[release.sequence_id]
        lease.released.add(release.sequence_id)
        return released

    def reconcile(
        self, lease: Lease, snapshots: Sequence[SequenceSnapshot], sent: Sequence[SessionStep], now: float
    ) -> list[OctavoError | None]:
        """Replace all that the lease holds by what its client says; one answer per snapshot."""
        answers: dict[SequenceId, OctavoError | None] = {}
        for snapshot in snapshots:
            if snapshot.sequence_id in lease.released:
                answers[snapshot.sequence_id] = refusal.sequence_released(snapshot.sequence_id)
            elif not self._arenas.has(snapshot.arena_id):
                answers[snapshot.sequence_id] = refusal.unknown_arena(snapshot.arena_id)
        for arena in self._arenas:
            own = [each for each in snapshots if each.arena_id == arena.arena_id and each.sequence_id not in answers]
            found = arena.manager.rebuild.reconcile(lease.lease_id, own, sent, now)
            answers |= {each.sequence_id: error for each, error in zip(own, found, strict=True)}
        lease.arena_of = {each.sequence_id: each.arena_id for each in snapshots if answers[each.sequence_id] is None}
        return [answers[each.sequence_id] for each in snapshots]

    def _manager_of(self, lease: Lease, sequence_id: SequenceId) -> BlockManager:
        arena_id = lease.arena_of.get(sequence_id)
        if arena_id is not None:
            return self._arenas.find(arena_id).manager
        if sequence_id in lease.released:
            raise refusal.sequence_released(sequence_id)
        raise refusal.unknown_sequence(sequence_id)


def _barred(lease: Lease, sequence_id: SequenceId) -> OctavoError | None:
    """Why this id cannot become a new sequence."""
    if sequence_id in lease.released:
        return refusal.sequence_released(sequence_id)
    return refusal.sequence_exists(sequence_id) if sequence_id in lease.arena_of else None


def _each(items: Sequence[Item], apply: Callable[[Item], Answer]) -> list[Answer | OctavoError]:
    """Each item's answer, or the error that it alone met."""
    answers: list[Answer | OctavoError] = []
    for item in items:
        try:
            answers.append(apply(item))
        except OctavoError as error:
            answers.append(error)
    return answers
