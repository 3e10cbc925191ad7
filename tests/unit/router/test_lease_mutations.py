"""Messages of a lease while the cache service is restarted: what it refuses then, and who hears of it."""

import logging

import pytest
from google.rpc import status_pb2

from cache_service import refusal
from octavo.errors import OctavoError
from octavo.rpc import status_of
from octavo.v1 import cache_pb2
from router.clients.cache import Lease, LeaseMutations
from router.ids import SequenceId
from router.model import Model
from router.outbox import Commit, Outbox, Snapshot
from router.request import CacheScope

GIVEN_UP, HELD, REFUSED = map(SequenceId, (5, 6, 7))
MODEL = Model("m", "", "", "f", "a", 100, 64, frozenset(), "cpu", 4, 40, "float32", "", "", "cpu", 8, 16, 2)
OK = status_pb2.Status()


class RestartedService:
    """Must be told first what is held; then knows some sequences no more."""

    def __init__(self, refused_claims: set[SequenceId], unknown: set[SequenceId]) -> None:
        self.refused_claims, self.unknown = refused_claims, unknown
        self.knows = False
        self.on_reconcile = lambda: None
        self.commits: list[list[int]] = []

    async def CommitBlocks(self, request: cache_pb2.CommitBlocksRequest, timeout: float) -> object:
        if not self.knows:
            raise refusal.reconcile_first(1)
        self.commits.append([commit.sequence_id for commit in request.commits])
        return cache_pb2.CommitBlocksResponse(
            statuses=[self._status(each, self.unknown, refusal.unknown_sequence(each)) for each in self.commits[-1]]
        )

    async def Reconcile(self, request: cache_pb2.ReconcileRequest, timeout: float) -> object:
        self.knows = True
        self.on_reconcile()
        claims = [claim.sequence_id for claim in request.sequences]
        return cache_pb2.ReconcileResponse(
            statuses=[self._status(each, self.refused_claims, refusal.claim_refused(each, "torn")) for each in claims]
        )

    @staticmethod
    def _status(sequence_id: int, refused: set[SequenceId], error: OctavoError) -> status_pb2.Status:
        return status_of(error) if sequence_id in refused else OK


class Holder:
    """Who holds two sequences, and has given up a third."""

    def __init__(self) -> None:
        self.disowned: list[SequenceId] = []

    def snapshots(self) -> list[Snapshot]:
        return [Snapshot(each, (1, 2), 2, (1,), CacheScope(), False, None) for each in (HELD, REFUSED)]

    def sent_steps(self) -> dict:
        return {}

    def on_disowned(self, sequence_id: SequenceId, error: OctavoError) -> None:
        self.disowned.append(sequence_id)


def lease(service: RestartedService, outbox: Outbox, holder: Holder) -> LeaseMutations:
    for sequence_id in (GIVEN_UP, HELD):
        outbox.commit(Commit(sequence_id, 2, 0, (1, 2)))
    return LeaseMutations(None, service, Lease(1, 1, 30.0, 0), 5.0, MODEL, outbox, holder)  # type: ignore[arg-type]


def said(caplog: pytest.LogCaptureFixture) -> list[tuple[int, SequenceId]]:
    """Level and sequence of each refusal that was logged."""
    records = [record for record in caplog.records if "refused the commit" in record.getMessage()]
    caplog.clear()
    return [(record.levelno, record.args[1]) for record in records]


async def test_what_was_given_up_before_a_restart_is_no_error(caplog):
    """A commit was on its way for a sequence that was not claimed any more: nobody misses it."""
    caplog.set_level(logging.INFO)
    service = RestartedService(refused_claims=set(), unknown={GIVEN_UP, HELD})
    outbox = Outbox()
    mutations = lease(service, outbox, Holder())
    await mutations.flush()
    assert service.commits == [[GIVEN_UP, HELD]]
    assert said(caplog) == [(logging.INFO, GIVEN_UP), (logging.ERROR, HELD)], "who was given its blocks is known"
    outbox.commit(Commit(GIVEN_UP, 4, 2, (3, 4)))
    await mutations.flush()
    assert said(caplog) == [(logging.ERROR, GIVEN_UP)], "this message never waited for the restart"


async def test_a_refused_claim_is_not_committed(caplog):
    """Its blocks are not its own: what waits to be committed in them is dropped, and its holder hears why."""
    service, outbox, holder = RestartedService(refused_claims={REFUSED}, unknown={REFUSED}), Outbox(), Holder()
    mutations = lease(service, outbox, holder)
    service.on_reconcile = lambda: outbox.commit(Commit(REFUSED, 2, 0, (1, 2)))  # while the first ones are on their way
    await mutations.flush()
    assert holder.disowned == [REFUSED]
    assert service.commits == [[GIVEN_UP, HELD]]
    assert not said(caplog)
