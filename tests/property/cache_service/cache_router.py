"""A router of a few words, for tests that say what happens to blocks step by step."""

from array import array
from typing import Any

from cache_service.fence import SessionKey, SessionStep
from cache_service.operation import (
    Allocated,
    Commit,
    Extended,
    Extension,
    Fork,
    Forked,
    LeaseHeader,
    Release,
    SequenceId,
)
from octavo.errors import OctavoError
from tests.property.cache_service.cache_drivers import CacheDriver, allocation


class ScriptedRouter:
    """One client of a cache service; keeps the numbers of its lease. Answers are unwrapped; refusals are raised."""

    def __init__(self, driver: CacheDriver, client_id: str = "router") -> None:
        self.driver = driver
        self.client_id = client_id
        self.lease_id, self.epoch = driver.open_lease(client_id)
        self.number = 0
        self.acknowledged: dict[SessionKey, int] = {}
        self.num_sequences = 0

    def header(self) -> LeaseHeader:
        self.number += 1
        steps = tuple(SessionStep(session, step_id) for session, step_id in self.acknowledged.items())
        return LeaseHeader(self.lease_id, self.number, steps)

    def open_session(self, executor_id: str, executor_epoch: int, session_id: int = 1) -> SessionKey:
        session = SessionKey(executor_id, executor_epoch, session_id)
        self.driver.open_session(session, self.client_id, self.epoch)
        return session

    def try_allocate(
        self, *token_ids: int, sequence_id: int = 0, **options: Any
    ) -> tuple[int, Allocated | OctavoError]:
        """A new sequence id unless one is given, and the answer."""
        if not sequence_id:
            self.num_sequences += 1
            sequence_id = self.num_sequences
        item = allocation(sequence_id, array("I", token_ids), **options)
        return sequence_id, self.driver.allocate(self.header(), [item])[0]

    def allocate(self, *token_ids: int, **options: Any) -> tuple[int, Allocated]:
        sequence_id, answer = self.try_allocate(*token_ids, **options)
        return sequence_id, _unwrap(answer)

    def extend(self, sequence_id: int, have: int, need: int, want: int) -> Extended:
        item = Extension(SequenceId(sequence_id), have, need, want)
        return _unwrap(self.driver.extend(self.header(), [item])[0])

    def commit(self, sequence_id: int, num_computed: int, *token_ids: int, offset: int = 0) -> None:
        item = Commit(SequenceId(sequence_id), num_computed, offset, array("I", token_ids))
        _raise(self.driver.commit(self.header(), [item])[0])

    def fork(self, sequence_id: int, *child_ids: int) -> Forked:
        item = Fork(SequenceId(sequence_id), tuple(map(SequenceId, child_ids)))
        return _unwrap(self.driver.fork(self.header(), [item])[0])

    def release(self, sequence_id: int, *free_after: SessionStep, commit: Commit | None = None) -> None:
        item = Release(SequenceId(sequence_id), commit, free_after)
        _raise(self.driver.release(self.header(), [item])[0])

    def compute(self, *token_ids: int, **options: Any) -> tuple[int, ...]:
        """Allocate, compute, commit and release a prompt: it is cached then. Returns its blocks."""
        sequence_id, allocated = self.allocate(*token_ids, **options)
        self.commit(sequence_id, len(token_ids))
        self.release(sequence_id)
        return allocated.block_ids


def _unwrap(answer: Any) -> Any:
    _raise(answer)
    return answer


def _raise(answer: Any) -> None:
    if isinstance(answer, OctavoError):
        raise answer
