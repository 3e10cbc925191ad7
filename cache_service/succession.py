"""What one cache service hands to the next through the journal: executors, sessions, leases. Both directions.

Not here: what blocks hold (ledger, rebuild), and how the journal is kept (journal).
"""

from collections.abc import Callable, Collection, Iterable, Sequence

from cache_service.fence import END_OF_SESSION, SessionKey, SessionStep
from cache_service.id_ranges import IdRanges
from cache_service.journal import ExecutorEntry, JournalEntry, LeaseEntry
from cache_service.lease import Lease, LeaseBook
from cache_service.operation import LeaseId
from cache_service.registry import EndedProcess, Executor, ExecutorRegistry, Process

# (pid, started) -> that very process, or None where it is dead.
Watch = Callable[[int, int], Process | None]


def entry_of(registry: ExecutorRegistry, leases: LeaseBook, number: int) -> JournalEntry:
    """What the next cache service must know. Sequences are not in it: their clients say them."""
    executors = tuple(
        ExecutorEntry(
            executor.executor_id,
            executor.epoch,
            executor.arena_id,
            executor.pid,
            executor.process.started,
            tuple(executor.owner_of.items()),
            executor.closed.ranges(),
        )
        for executor in registry  # dead ones too: so that their sessions are known to be over
    )
    live = tuple(LeaseEntry(lease.lease_id, lease.client_id, lease.client_epoch, lease.ttl_s) for lease in leases)
    last_epoch = max(registry.last_epoch, leases.last_epoch)
    return JournalEntry(executors, live, last_epoch, leases.last_lease_id, number)


def newest(found: Iterable[JournalEntry | None]) -> JournalEntry:
    """The last that was written, of several arenas."""
    return max((entry for entry in found if entry is not None), key=lambda entry: entry.number, default=JournalEntry())


def restore(journal: JournalEntry, registry: ExecutorRegistry, leases: LeaseBook, watch: Watch, now: float) -> None:
    """Fill both from the journal. Leases get their whole time anew, to say in it what they hold."""
    leases.last_epoch, leases.last_lease_id = journal.last_epoch, journal.last_lease_id
    for entry in journal.leases:
        lease = Lease(LeaseId(entry.lease_id), entry.client_id, entry.client_epoch, entry.ttl_s, now + entry.ttl_s)
        lease.is_known = False
        leases.restore(lease)
    for found in journal.executors:
        executor = _executor_of(found, watch(found.pid, found.started))
        registry.restore(executor, journal.last_epoch)
        for session in executor.sessions():
            owner = executor.owner_of[session.session_id]
            if leases.is_live(owner):
                leases.find(owner).sessions.add(session)


def _executor_of(entry: ExecutorEntry, process: Process | None) -> Executor:
    executor = Executor(entry.executor_id, entry.epoch, entry.arena_id, process or EndedProcess(), entry.pid)
    executor.is_alive = process is not None
    executor.ended_in_order = process is None and not entry.sessions
    if process is not None:
        executor.owner_of = {session_id: LeaseId(lease_id) for session_id, lease_id in entry.sessions}
        executor.closed = IdRanges(entry.closed)
    return executor


def last_steps(sessions: Collection[SessionKey], sent: Sequence[SessionStep]) -> list[SessionStep]:
    """For each session the highest step that may still run: as its client says, or, where it says nothing, any."""
    said = dict(sent)
    return [SessionStep(session, said.get(session, END_OF_SESSION)) for session in sessions]
