"""The whole cache service without its edge: arenas and their managers, executors, leases, and what joins them.

Pure and synchronous like the manager: time is an argument, making memory and watching processes come in from outside.
Here belongs the order of a lease's messages, tombstones, what ends with a lease, a session or an executor. Not here:
rules about blocks (manager), messages of the wire (servicer).
"""

import logging
from collections.abc import Callable, Sequence
from typing import TypeVar

from cache_service import refusal, succession
from cache_service.eviction import Eviction
from cache_service.fence import END_OF_SESSION, SessionKey, SessionStep
from cache_service.lease import Lease, LeaseBook
from cache_service.lease_operations import LeaseOperations
from cache_service.managed_arena import ArenaMemory, Arenas, ManagedArena
from cache_service.manager import BlockManager
from cache_service.operation import Allocation, LeaseHeader, LeaseId, Release, SequenceSnapshot
from cache_service.prefix import HashFunction, blake2b_key
from cache_service.registration import Registrar, Registration
from cache_service.registry import Executor, ExecutorRegistry, Process, SessionStanding
from cache_service.succession import Watch
from octavo.errors import OctavoError

log = logging.getLogger(__name__)

Answer = TypeVar("Answer")


class CacheService:
    """The one owner and mutator of everything that the cache service knows."""

    def __init__(self, hash_function: HashFunction = blake2b_key, eviction: Eviction = Eviction()) -> None:  # noqa: B008
        self._hash_function = hash_function
        self._eviction = eviction
        self._arenas = Arenas()
        self._registry = ExecutorRegistry()
        self._leases = LeaseBook()
        self.operations = LeaseOperations(self._arenas, self._registry)
        self._registrar = Registrar(self._arenas, self._registry, self._leases, self.end_executor)
        self._sent_before: list[SessionStep] = []  # what nobody claims waits for these, in a rebuild
        self._journal_number = 0
        self._num_arenas = 0  # ever

    @property
    def num_leases(self) -> int:
        return len(self._leases)

    def executors(self) -> list[Executor]:
        """The last process of every executor id that ever registered."""
        return list(self._registry)

    def arenas(self) -> list[ManagedArena]:
        return list(self._arenas)

    def has_arena(self, arena_id: str) -> bool:
        return self._arenas.has(arena_id)

    def find_arena(self, arena_id: str) -> ManagedArena:
        """Raises NOT_FOUND UNKNOWN_ARENA."""
        return self._arenas.find(arena_id)

    def match_prefix(self, arena_id: str, allocation: Allocation) -> int:
        """How many leading tokens are cached now; a hint."""
        return self.find_arena(arena_id).manager.match_prefix(allocation.token_ids, allocation.extras)

    def close(self) -> None:
        """Give every arena's memory back."""
        for arena in self._arenas:
            self._arenas.remove(arena)

    def leave(self) -> None:
        """Let go of every arena as a death would, for another cache service to take over."""
        for arena in self._arenas:
            arena.memory.leave()

    # ----------------------------------------------------------------------------------------------------- succession

    def take_over(self, memories: Sequence[ArenaMemory], watch: Watch, now: float) -> list[Executor]:
        """Go on where a cache service that died left off: its arenas, executors, sessions and leases.

        Args:
            memories: its arenas; each has a whole journal.
            watch: of (pid, started), the process; None if that one is dead.

        Returns:
            The executors that live, for their ends to be watched.
        """
        journal = succession.newest(memory.journal.read() for memory in memories)
        for memory in memories:
            arena = self._manage(memory, is_inherited=True)
            num_cached = arena.manager.rebuild.begin(memory.ledger.read_all())
            log.warning("took over %s: %d findable blocks", memory.description.path, num_cached)
        self._journal_number = journal.number
        succession.restore(journal, self._registry, self._leases, watch, now)
        for executor in self._registry:
            for session in executor.sessions():
                if self._arenas.has(executor.arena_id):
                    self._arenas.find(executor.arena_id).manager.open_session(session)
        orphans = [
            session
            for executor in self._registry
            for session in executor.sessions()
            if not self._leases.is_live(executor.owner_of[session.session_id])
        ]
        self._sent_before = [SessionStep(session, END_OF_SESSION) for session in orphans]
        self._write_journal()
        self._finish_rebuild(now)
        return [executor for executor in self._registry if executor.is_alive]

    def reconcile(
        self,
        header: LeaseHeader,
        request: object,
        snapshots: Sequence[SequenceSnapshot],
        sent: Sequence[SessionStep],
        now: float,
    ) -> list[OctavoError | None]:
        """What a client holds, by its own word, in place of all that is known of it; one answer per snapshot.

        Its number may be any that is higher than those before; the numbers of later messages follow it.

        Raises:
            OctavoError: LEASE_EXPIRED, SEQUENCE_GAP (a late message), UNKNOWN_SESSION.
        """
        lease = self._leases.find(header.lease_id)
        lease.renew(now)
        number = header.sequence_number
        if number <= lease.last_number and lease.is_repeat(number, request):
            return lease.last_answer
        self._registry.check_sessions(lease.sessions, sent)
        self._acknowledge(lease, header.acknowledged, now)
        steps = succession.last_steps(lease.sessions, sent)
        answers = self.operations.reconcile(lease, snapshots, steps, now)
        lease.store_answer(number, request, answers)
        self._hear(lease, steps, now)
        return answers

    def _hear(self, lease: Lease, sent: Sequence[SessionStep], now: float) -> None:
        """It is known now what this lease holds, or it holds nothing any more."""
        if not lease.is_known:
            lease.is_known = True
            self._sent_before.extend(sent)
            self._finish_rebuild(now)

    def _finish_rebuild(self, now: float) -> None:
        if self._leases.count_unknown():
            return
        for arena in self._arenas:
            if arena.manager.rebuild.unclaimed:
                arena.manager.rebuild.finish(self._sent_before, now)
                violations = [*arena.manager.self_check(), *self.violations()]
                arena.manager.rebuild.is_broken = bool(violations)
                log.log(
                    logging.ERROR if violations else logging.INFO,
                    "rebuilt %s: %s; violations: %s",
                    arena.arena_id,
                    arena.manager.stats(),
                    violations or "none",
                )
        self._sent_before = []

    def _write_journal(self) -> None:
        self._journal_number += 1
        entry = succession.entry_of(self._registry, self._leases, self._journal_number)
        for arena in self._arenas:
            if not arena.memory.journal.write(entry):
                log.error("too many leases and sessions for the journal: a killed cache service takes the KV with it")

    def _manage(self, memory: ArenaMemory, *, is_inherited: bool) -> ManagedArena:
        about = memory.description
        manager = BlockManager(
            about.num_blocks, about.geometry.block_size, self._hash_function, memory.ledger, self._eviction
        )
        self._num_arenas += 1
        arena = ManagedArena(memory, manager, self._num_arenas, is_inherited)
        self._arenas.add(arena)
        return arena

    # ------------------------------------------------------------------------------------------------------ executors

    def begin_registration(self, asked: Registration, now: float) -> Executor | None:
        """As `Registrar.begin`; then `finish_registration` follows, where an arena is to be made or joined."""
        return self._registrar.begin(asked, now)

    def finish_registration(
        self, asked: Registration, made: ArenaMemory | None, process: Process, unix_ms: int
    ) -> Executor:
        """Install the arena that was made (None: the one that is there is joined) and grant the executor its epoch."""
        if made is not None:
            self._manage(made, is_inherited=False)
        executor = self._registry.admit(asked.executor_id, asked.arena_id, process, asked.pid, unix_ms)
        self._write_journal()
        log.info("executor %s registered with epoch %d on %s", executor.executor_id, executor.epoch, executor.arena_id)
        return executor

    def end_executor(self, executor: Executor, now: float) -> None:
        """The process of this epoch is known to be dead: its sessions are over and their fences fall."""
        if not executor.is_alive:
            return
        ended = self._registry.end_epoch(executor)
        for session in ended:
            self._end_session(session, executor.arena_id, now)
        self._write_journal()
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

    def open_session(
        self, session: SessionKey, client_id: str, client_epoch: int, now: float, *, takeover: bool = False
    ) -> None:
        """Announce a session of a live lease. Idempotent.

        Args:
            takeover: it takes the place of the lease's sessions on all other executors.

        Raises:
            OctavoError: STALE_EPOCH, LEASE_EXPIRED, SESSION_CLOSED, PREDECESSOR_ALIVE.
        """
        self._registry.find_alive(session.executor_id, session.executor_epoch)
        lease = self._leases.find_client(client_id, client_epoch)
        if takeover:
            self._check_predecessors(lease, session, now)
        executor = self._registry.open_session(session, lease.lease_id)
        lease.sessions.add(session)
        self._arenas.find(executor.arena_id).manager.open_session(session)
        self._write_journal()

    def _check_predecessors(self, lease: Lease, session: SessionKey, now: float) -> None:
        """Raise while another executor may write into the blocks of this lease.

        One that has just died may not have been heard of yet; an earlier session of the same process is no matter: one
        thread runs the steps of both, and those of the newer one alone.
        """
        for other in list(lease.sessions):
            executor = self._registry.find(other.executor_id)
            if executor is None or other.executor_id == session.executor_id:
                continue
            if executor.process.is_alive():
                raise refusal.predecessor_alive(other)
            self.end_executor(executor, now)

    def close_session(self, session: SessionKey, now: float) -> None:
        """An executor says that no step of this session runs or will run. Idempotent."""
        executor = self._registry.find(session.executor_id)
        if executor is None:
            raise refusal.stale_epoch(f"executor {session.executor_id!r}", session.executor_epoch, 0)
        self._registry.close_session(session)
        self._end_session(session, executor.arena_id, now)
        self._write_journal()

    def orphaned_sessions(self, executor_id: str, executor_epoch: int) -> list[int]:
        """Open sessions of this executor whose lease is over. Raises STALE_EPOCH."""
        executor = self._registry.find_alive(executor_id, executor_epoch)
        return [session_id for session_id, owner in executor.owner_of.items() if not self._leases.is_live(owner)]

    def _end_session(self, session: SessionKey, arena_id: str, now: float) -> None:
        if self._arenas.has(arena_id):
            self._arenas.find(arena_id).manager.close_session(session, now)
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
        opened = self._leases.open(client_id, client_epoch, ttl_s, now, unix_ms)
        self._write_journal()
        return opened

    def keep_lease_alive(self, lease_id: LeaseId, acknowledged: Sequence[SessionStep], now: float) -> Lease:
        """Renew a lease. Raises LEASE_EXPIRED, UNKNOWN_SESSION, RECONCILE."""
        lease = self._leases.find(lease_id)
        lease.renew(now)
        if not lease.is_known:
            raise refusal.reconcile_first(lease_id)
        self._acknowledge(lease, acknowledged, now)
        return lease

    def close_lease(self, lease_id: LeaseId, free_after: Sequence[SessionStep], now: float) -> None:
        """End a lease in order. Its open sessions must be closed by their executors all the same."""
        lease = self._leases.find(lease_id)
        self._registry.check_sessions(lease.sessions, free_after)
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
            self._arenas.find(arena_id).manager.release(lease.lease_id, release, now)
        lease.arena_of.clear()
        self._leases.remove(lease)
        self._hear(lease, succession.last_steps(lease.sessions, free_after), now)
        self._write_journal()

    def in_order(self, header: LeaseHeader, request: object, apply: Callable[[Lease], Answer], now: float) -> Answer:
        """Apply a mutation in its lease's order; the last one again (an equal request) is answered as before.

        A mutation that raises as a whole has changed nothing and its number is still the next.

        Raises:
            OctavoError: LEASE_EXPIRED, RECONCILE, SEQUENCE_GAP, UNKNOWN_SESSION, and what `apply` raises.
        """
        lease = self._leases.find(header.lease_id)
        lease.renew(now)
        if not lease.is_known:
            raise refusal.reconcile_first(header.lease_id)
        if lease.is_repeat(header.sequence_number, request):
            return lease.last_answer
        self._acknowledge(lease, header.acknowledged, now)
        answer = apply(lease)
        lease.store_answer(header.sequence_number, request, answer)
        return answer

    def _acknowledge(self, lease: Lease, steps: Sequence[SessionStep], now: float) -> None:
        self._registry.check_sessions(lease.sessions, steps)
        for step in steps:
            executor = self._registry.find(step.session.executor_id)
            if executor is not None and self._arenas.has(executor.arena_id):
                self._arenas.find(executor.arena_id).manager.acknowledge(step, now)

    def violations(self) -> list[str]:
        """What is wrong between leases, sessions and managers; empty when healthy. Managers check themselves."""
        found: list[str] = []
        num_held = dict.fromkeys((arena.arena_id for arena in self._arenas), 0)
        for lease in self._leases:
            for sequence_id, arena_id in lease.arena_of.items():
                num_held[arena_id] += 1
                if sequence_id in lease.released:
                    found.append(f"sequence {sequence_id} of lease {lease.lease_id} is held and released")
            for session in lease.sessions:
                if self._registry.standing(session) is not SessionStanding.OPEN:
                    found.append(f"lease {lease.lease_id} names {session}, which is not open")
        for arena in self._arenas:
            num_sequences = arena.manager.num_sequences
            if num_sequences != num_held[arena.arena_id]:
                found.append(f"{arena.arena_id} has {num_sequences} sequences, leases hold {num_held[arena.arena_id]}")
        return found
