"""Executors and their sessions: which processes may write into an arena, and in whose name.

An epoch is one process. It ends when that process is known to be dead, never by a timeout: a stopped process that
wakes would write into shared memory. Here belongs who lives and which sessions are open. Not here: how a process is
watched (process), memory (arena), blocks (manager).
"""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Protocol

from cache_service import refusal
from cache_service.fence import SessionKey, SessionStep
from cache_service.id_ranges import IdRanges
from cache_service.lease import grant_epoch
from cache_service.operation import LeaseId


class Process(Protocol):
    """The process behind an executor epoch."""

    @property
    def started(self) -> int:
        """When it began: with its pid, the name of one process of this machine. 0 where it cannot be seen."""

    def is_alive(self) -> bool:
        """False only when it is certain that the process runs no more."""

    def close(self) -> None:
        """Stop watching."""


@dataclass(slots=True, eq=False)
class Executor:
    """The last process of an executor id."""

    executor_id: str
    epoch: int
    arena_id: str
    process: Process
    pid: int
    is_alive: bool = True
    ended_in_order: bool = False  # it is dead, and held no session then: nobody misses it
    num_restarts: int = 0  # processes of this id before
    metrics_address: str = ""  # as it said when it registered last; empty: none
    owner_of: dict[int, LeaseId] = field(default_factory=dict)  # open session id -> lease it runs for
    closed: IdRanges = field(default_factory=IdRanges)  # session ids that are over

    def sessions(self) -> list[SessionKey]:
        """The open ones."""
        return [SessionKey(self.executor_id, self.epoch, session_id) for session_id in self.owner_of]


class EndedProcess:
    """A process that was dead before it could be watched."""

    started = 0

    def is_alive(self) -> bool:
        return False

    def close(self) -> None:
        """Nothing is watched."""


class SessionStanding(Enum):
    OPEN = auto()
    OVER = auto()  # closed, or of an executor process that is dead
    UNKNOWN = auto()  # never announced


class ExecutorRegistry:
    """Every executor id that ever registered, with its last epoch."""

    def __init__(self) -> None:
        self._executors: dict[str, Executor] = {}
        self._last_epoch = 0  # ever granted to any

    @property
    def last_epoch(self) -> int:
        return self._last_epoch

    def __iter__(self) -> Iterator[Executor]:
        return iter(list(self._executors.values()))

    def find(self, executor_id: str) -> Executor | None:
        return self._executors.get(executor_id)

    def find_alive(self, executor_id: str, epoch: int) -> Executor:
        """The live executor of this very epoch. Raises FAILED_PRECONDITION STALE_EPOCH."""
        executor = self._executors.get(executor_id)
        if executor is None or executor.epoch != epoch or not executor.is_alive:
            raise refusal.stale_epoch(f"executor {executor_id!r}", epoch, executor.epoch if executor else 0)
        return executor

    def any_alive_on(self, arena_id: str) -> bool:
        return any(executor.is_alive and executor.arena_id == arena_id for executor in self._executors.values())

    def admit(self, executor_id: str, arena_id: str, process: Process, pid: int, unix_ms: int) -> Executor:
        """A new epoch, higher than any before of this id, which must not be alive."""
        epoch = self._last_epoch = grant_epoch(self._last_epoch, unix_ms)
        earlier = self._executors.get(executor_id)
        executor = Executor(executor_id, epoch, arena_id, process, pid)
        executor.num_restarts = earlier.num_restarts + 1 if earlier else 0
        self._executors[executor_id] = executor
        return executor

    def restore(self, executor: Executor, last_epoch: int) -> None:
        """An executor of the time before; no epoch up to `last_epoch` is granted again."""
        self._executors[executor.executor_id] = executor
        self._last_epoch = max(self._last_epoch, last_epoch)

    def end_epoch(self, executor: Executor) -> list[SessionKey]:
        """Its process is dead. Returns the sessions that ended with it."""
        executor.is_alive = False
        ended = executor.sessions()
        executor.ended_in_order = not ended
        executor.owner_of.clear()
        executor.closed = IdRanges()
        executor.process.close()
        return ended

    def standing(self, session: SessionKey) -> SessionStanding:
        """Whether steps of this session may still run."""
        executor = self._executors.get(session.executor_id)
        if executor is None or session.executor_epoch > executor.epoch:
            return SessionStanding.UNKNOWN
        if session.executor_epoch < executor.epoch or not executor.is_alive or session.session_id in executor.closed:
            return SessionStanding.OVER
        return SessionStanding.OPEN if session.session_id in executor.owner_of else SessionStanding.UNKNOWN

    def check_sessions(self, own: Collection[SessionKey], steps: Iterable[SessionStep]) -> None:
        """A client speaks of its own sessions only; of one that is over it may, and nothing follows.

        Raises:
            OctavoError: UNKNOWN_SESSION.
        """
        for step in steps:
            if step.session not in own and self.standing(step.session) is not SessionStanding.OVER:
                raise refusal.unknown_session(step.session)

    def open_session(self, session: SessionKey, lease_id: LeaseId) -> Executor:
        """Announce a session for a lease. Idempotent.

        Raises:
            OctavoError: STALE_EPOCH, SESSION_CLOSED, ALREADY_EXISTS SESSION_TAKEN (by another lease).
        """
        executor = self.find_alive(session.executor_id, session.executor_epoch)
        if session.session_id in executor.closed:
            raise refusal.session_closed(session)
        if executor.owner_of.setdefault(session.session_id, lease_id) != lease_id:
            raise refusal.session_taken(session)
        return executor

    def close_session(self, session: SessionKey) -> None:
        """No step of it runs or will run; its id cannot be opened any more. Idempotent."""
        executor = self._executors.get(session.executor_id)
        if executor is not None and executor.is_alive and executor.epoch == session.executor_epoch:
            executor.owner_of.pop(session.session_id, None)
            executor.closed.add(session.session_id)
