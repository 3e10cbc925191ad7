"""The whole cache service without its edge: arenas and their managers, executors, leases, and what joins them.

Pure and synchronous like the manager: time is an argument, making memory and watching processes come in from outside.
Here belongs the order of a lease's messages, tombstones, what ends with a lease, a session or an executor. Not here:
rules about blocks (manager), messages of the wire (servicer).
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from cache_service import refusal
from cache_service.fence import END_OF_SESSION, SessionKey, SessionStep
from cache_service.geometry import ArenaDescription
from cache_service.lease import Lease, LeaseBook
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
    LeaseHeader,
    LeaseId,
    Release,
    Released,
    SequenceId,
)
from cache_service.prefix import HashFunction, blake2b_key
from cache_service.registration import Registration, mismatch_of
from cache_service.registry import Executor, ExecutorRegistry, Process, SessionStanding
from octavo.errors import FieldViolation, OctavoError, invalid_argument

log = logging.getLogger(__name__)

Item = TypeVar("Item")
Answer = TypeVar("Answer")


class ArenaMemory(Protocol):
    """Memory that this process owns."""

    @property
    def description(self) -> ArenaDescription: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class ManagedArena:
    memory: ArenaMemory
    manager: BlockManager


class CacheService:
    """The one owner and mutator of everything that the cache service knows."""

    def __init__(self, hash_function: HashFunction = blake2b_key) -> None:
        self._hash_function = hash_function
        self._arenas: dict[str, ManagedArena] = {}
        self._registry = ExecutorRegistry()
        self._leases = LeaseBook()

    @property
    def num_leases(self) -> int:
        return len(self._leases)

    @property
    def num_executors(self) -> int:
        return self._registry.num_alive

    def arenas(self) -> list[ManagedArena]:
        return list(self._arenas.values())

    def has_arena(self, arena_id: str) -> bool:
        return arena_id in self._arenas

    def find_arena(self, arena_id: str) -> ManagedArena:
        """Raises NOT_FOUND UNKNOWN_ARENA."""
        if arena_id not in self._arenas:
            raise refusal.unknown_arena(arena_id)
        return self._arenas[arena_id]

    def close(self) -> None:
        """Give every arena's memory back."""
        for arena in self._arenas.values():
            arena.memory.close()
        self._arenas.clear()

    # ------------------------------------------------------------------------------------------------------ executors

    def begin_registration(self, asked: Registration, now: float) -> Executor | None:
        """Decide whether an executor may register; what it does not share is removed to make room for its arena.

        Returns:
            The live executor if this is the same process again. Otherwise None: if the arena exists now, it is to be
            joined, if not, it is to be made; then `finish_registration` follows. Registrations do not overlap.

        Raises:
            OctavoError: EXECUTOR_ALIVE, GEOMETRY_MISMATCH, STALE_EPOCH, INVALID_ARGUMENT.
        """
        if not asked.executor_id:
            raise invalid_argument(
                FieldViolation("executor_id", "is empty; a name that tells this executor from others")
            )
        if asked.executor_epoch:
            executor = self._registry.find_alive(asked.executor_id, asked.executor_epoch)
            self._check_same_arena(executor, asked)
            return executor
        earlier = self._registry.find(asked.executor_id)
        if earlier is not None and earlier.is_alive:
            if earlier.process.is_alive():
                return self._same_process(earlier, asked)
            self.end_executor(earlier, now)
        self._make_room(asked)
        return None

    def finish_registration(
        self, asked: Registration, made: ArenaMemory | None, process: Process, unix_ms: int
    ) -> Executor:
        """Install the arena that was made (None: the one that is there is joined) and grant the executor its epoch."""
        if made is not None:
            num_blocks, block_size = made.description.num_blocks, made.description.geometry.block_size
            manager = BlockManager(num_blocks, block_size, self._hash_function)
            self._arenas[asked.arena_id] = ManagedArena(made, manager)
        executor = self._registry.admit(asked.executor_id, asked.arena_id, process, asked.pid, unix_ms)
        log.info("executor %s registered with epoch %d on %s", executor.executor_id, executor.epoch, executor.arena_id)
        return executor

    def _same_process(self, alive: Executor, asked: Registration) -> Executor:
        """The living executor, if it is the one that asks: the answer to its first registration was lost."""
        if not asked.pid or asked.pid != alive.pid:
            raise refusal.executor_alive(alive.executor_id, alive.epoch)
        self._check_same_arena(alive, asked)
        return alive

    def _check_same_arena(self, executor: Executor, asked: Registration) -> None:
        if executor.arena_id != asked.arena_id:
            raise invalid_argument(
                FieldViolation("arena_id", f"is {asked.arena_id!r}; this process registered for {executor.arena_id!r}")
            )
        mismatch = mismatch_of(self.find_arena(asked.arena_id).memory.description, asked)
        if mismatch is not None:
            raise mismatch

    def _make_room(self, asked: Registration) -> None:
        """Remove an arena of another shape, if nobody uses it."""
        arena = self._arenas.get(asked.arena_id)
        mismatch = mismatch_of(arena.memory.description, asked) if arena else None
        if arena is None or mismatch is None:
            return
        if arena.manager.num_sequences or self._registry.any_alive_on(asked.arena_id):
            raise mismatch
        del self._arenas[asked.arena_id]
        arena.memory.close()

    def end_executor(self, executor: Executor, now: float) -> None:
        """The process of this epoch is known to be dead: its sessions are over and their fences fall."""
        if not executor.is_alive:
            return
        ended = self._registry.end_epoch(executor)
        for session in ended:
            self._end_session(session, executor.arena_id, now)
        # One that stops in order has closed its sessions before.
        level = logging.WARNING if ended else logging.INFO
        log.log(
            level,
            "executor %s, epoch %d, has ended; sessions cut: %d",
            executor.executor_id,
            executor.epoch,
            len(ended),
        )

    # ------------------------------------------------------------------------------------------------------- sessions

    def open_session(self, session: SessionKey, client_id: str, client_epoch: int) -> None:
        """Announce a session of a live lease. Idempotent. Raises STALE_EPOCH, LEASE_EXPIRED, SESSION_CLOSED."""
        self._registry.find_alive(session.executor_id, session.executor_epoch)
        lease = self._leases.find_client(client_id, client_epoch)
        executor = self._registry.open_session(session, lease.lease_id)
        lease.sessions.add(session)
        self._arenas[executor.arena_id].manager.open_session(session)

    def close_session(self, session: SessionKey, now: float) -> None:
        """An executor says that no step of this session runs or will run. Idempotent."""
        executor = self._registry.find(session.executor_id)
        if executor is None:
            raise refusal.stale_epoch(f"executor {session.executor_id!r}", session.executor_epoch, 0)
        self._registry.close_session(session)
        if executor.arena_id in self._arenas:
            self._end_session(session, executor.arena_id, now)

    def orphaned_sessions(self, executor_id: str, executor_epoch: int) -> list[int]:
        """Open sessions of this executor whose lease is over. Raises STALE_EPOCH."""
        executor = self._registry.find_alive(executor_id, executor_epoch)
        return [session_id for session_id, owner in executor.owner_of.items() if not self._leases.is_live(owner)]

    def _end_session(self, session: SessionKey, arena_id: str, now: float) -> None:
        self._arenas[arena_id].manager.close_session(session, now)
        for lease in self._leases:
            lease.sessions.discard(session)

    # --------------------------------------------------------------------------------------------------------- leases

    def open_lease(self, client_id: str, client_epoch: int, ttl_s: float, now: float, unix_ms: int) -> Lease:
        """The live lease of this epoch, or a new one, which ends the client's older one. Raises STALE_EPOCH."""
        self._leases.check_epoch(client_id, client_epoch)
        live = self._leases.live_of_client(client_id)
        if live is not None and live.client_epoch == client_epoch:
            live.renew(now)
            return live
        if live is not None:
            self._abandon(live, now, "replaced by a higher epoch")
        return self._leases.open(client_id, client_epoch, ttl_s, now, unix_ms)

    def keep_lease_alive(self, lease_id: LeaseId, acknowledged: Sequence[SessionStep], now: float) -> Lease:
        """Renew a lease. Raises LEASE_EXPIRED, UNKNOWN_SESSION."""
        lease = self._leases.find(lease_id)
        self._acknowledge(lease, acknowledged, now)
        lease.renew(now)
        return lease

    def close_lease(self, lease_id: LeaseId, free_after: Sequence[SessionStep], now: float) -> None:
        """End a lease in order. Its open sessions must be closed by their executors all the same."""
        lease = self._leases.find(lease_id)
        self._check_sessions(lease, free_after)
        self._end_lease(lease, free_after, now)

    def expire_leases(self, now: float) -> None:
        """End every lease whose client was silent for its whole ttl."""
        for lease in self._leases.overdue(now):
            self._abandon(lease, now, f"silent for {lease.ttl_s:g} s")

    def postpone_expiry(self, delay_s: float) -> None:
        """This process stood still for so long, and could hear nobody."""
        self._leases.postpone(delay_s)

    def _abandon(self, lease: Lease, now: float, why: str) -> None:
        """Nobody knows which steps its client has sent: everything stays fenced until its sessions are over."""
        log.warning(
            "lease %d of %s ended: %s; it held %d sequences", lease.lease_id, lease.client_id, why, len(lease.arena_of)
        )
        self._end_lease(lease, [SessionStep(session, END_OF_SESSION) for session in lease.sessions], now)

    def _end_lease(self, lease: Lease, free_after: Sequence[SessionStep], now: float) -> None:
        for sequence_id, arena_id in lease.arena_of.items():
            release = Release(sequence_id, free_after=tuple(free_after))
            self._arenas[arena_id].manager.release(lease.lease_id, release, now)
        lease.arena_of.clear()
        self._leases.remove(lease)

    # ------------------------------------------------------------------------------------------------------ mutations

    def in_order(self, header: LeaseHeader, request: object, apply: Callable[[Lease], Answer], now: float) -> Answer:
        """Apply a mutation in its lease's order; the last one again (an equal request) is answered as before.

        A mutation that raises as a whole has changed nothing and its number is still the next.

        Raises:
            OctavoError: LEASE_EXPIRED, SEQUENCE_GAP, UNKNOWN_SESSION, and what `apply` raises.
        """
        lease = self._leases.find(header.lease_id)
        lease.renew(now)
        if lease.is_repeat(header.sequence_number, request):
            return lease.last_answer
        self._acknowledge(lease, header.acknowledged, now)
        answer = apply(lease)
        lease.store_answer(header.sequence_number, request, answer)
        return answer

    def match_prefix(self, arena_id: str, allocation: Allocation) -> int:
        """How many leading tokens are cached now; a hint."""
        return self.find_arena(arena_id).manager.match_prefix(allocation.token_ids, allocation.extras)

    def allocate(
        self, lease: Lease, arena_id: str, allocations: Sequence[Allocation], now: float
    ) -> list[Allocated | OctavoError]:
        """One answer per allocation. Raises UNKNOWN_ARENA."""
        manager = self.find_arena(arena_id).manager
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
        """One answer per extension."""
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
            extended = self._arenas[arena_id].manager.extend(lease.lease_id, batch, now)
            for position, answer in zip(positions, extended, strict=True):
                answers[position] = answer
        return answers

    def commit(self, lease: Lease, commits: Sequence[Commit], now: float) -> list[Committed | OctavoError]:
        """One answer per commit."""
        return _each(commits, lambda item: self._manager_of(lease, item.sequence_id).commit(lease.lease_id, item, now))

    def fork(self, lease: Lease, forks: Sequence[Fork], now: float) -> list[Forked | OctavoError]:
        """One answer per fork."""
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
        self._check_sessions(lease, release.free_after)
        arena_id = lease.arena_of.get(release.sequence_id)
        if arena_id is None:
            lease.released.add(release.sequence_id)
            return Released(was_held=False)
        released = self._arenas[arena_id].manager.release(lease.lease_id, release, now)
        del lease.arena_of[release.sequence_id]
        lease.released.add(release.sequence_id)
        return released

    def _manager_of(self, lease: Lease, sequence_id: SequenceId) -> BlockManager:
        arena_id = lease.arena_of.get(sequence_id)
        if arena_id is not None:
            return self._arenas[arena_id].manager
        if sequence_id in lease.released:
            raise refusal.sequence_released(sequence_id)
        raise refusal.unknown_sequence(sequence_id)

    # -------------------------------------------------------------------------------------------------------- helpers

    def _acknowledge(self, lease: Lease, steps: Sequence[SessionStep], now: float) -> None:
        self._check_sessions(lease, steps)
        for step in steps:
            executor = self._registry.find(step.session.executor_id)
            if executor is not None and executor.arena_id in self._arenas:
                self._arenas[executor.arena_id].manager.acknowledge(step, now)

    def _check_sessions(self, lease: Lease, steps: Sequence[SessionStep]) -> None:
        """A lease speaks of its own sessions only; of one that is over it may, and nothing follows."""
        for step in steps:
            if step.session in lease.sessions or self._registry.standing(step.session) is SessionStanding.OVER:
                continue
            raise refusal.unknown_session(step.session)

    def violations(self) -> list[str]:
        """What is wrong between leases, sessions and managers; empty when healthy. Managers check themselves."""
        found: list[str] = []
        num_held = dict.fromkeys(self._arenas, 0)
        for lease in self._leases:
            for sequence_id, arena_id in lease.arena_of.items():
                num_held[arena_id] += 1
                if sequence_id in lease.released:
                    found.append(f"sequence {sequence_id} of lease {lease.lease_id} is held and released")
            for session in lease.sessions:
                if self._registry.standing(session) is not SessionStanding.OPEN:
                    found.append(f"lease {lease.lease_id} names {session}, which is not open")
        for arena_id, arena in self._arenas.items():
            if arena.manager.num_sequences != num_held[arena_id]:
                found.append(
                    f"{arena_id} has {arena.manager.num_sequences} sequences, leases hold {num_held[arena_id]}"
                )
        return found


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
