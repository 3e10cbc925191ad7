"""Whose session it is: epochs, takeover, connections, time, drain."""

import pytest

from executor.ids import RouterEpoch, RouterId, SessionId, StepId
from executor.session import Session
from executor.sessions import Opening, SessionStore
from executor.step import StepGap, StepResult
from octavo.errors import Code, OctavoError
from tests.executor_cases import LIMITS, ScriptedRunner, process_in, row, step


@pytest.fixture
def store() -> SessionStore:
    runner = ScriptedRunner()
    return SessionStore(lambda session_id: Session(session_id, 4, LIMITS, runner), timeout_s=30)


def opening(router: str = "a", epoch: int = 5, **fields: object) -> Opening:
    return Opening(RouterId(router), RouterEpoch(epoch), **fields)  # type: ignore[arg-type]


FIRST = step(1, [(0, 0, 1)], started_rows=(row(0, [10], [1]),))


def test_sessions_of_several_routers_interleave(store):
    a, b = store.open(opening("a")), store.open(opening("b", 1))
    assert a.session_id != b.session_id
    assert process_in(store, a, FIRST).token_ids.tolist() == [11]
    assert process_in(store, b, FIRST).token_ids.tolist() == [11]
    assert process_in(store, a, step(2, [(0, 1, 1)])).token_ids.tolist() == [12]
    assert process_in(store, b, step(2, [(0, 1, 1)])).token_ids.tolist() == [12]
    assert (store.num_sessions, store.num_rows) == (2, 2)


def test_an_equal_epoch_continues_with_rows_and_results(store):
    first = store.open(opening())
    result = process_in(store, first, FIRST)
    again = store.open(opening())
    assert (again.session_id, again.fresh, again.last_applied_step) == (first.session_id, False, 1)
    assert process_in(store, again, FIRST) is result
    assert store.take_ended() == []


def test_opening_acknowledges_what_the_router_has_seen(store):
    process_in(store, store.open(opening()), FIRST)
    again = store.open(opening(last_seen_step=StepId(1)))
    assert process_in(store, again, FIRST) == StepGap(1)


@pytest.mark.parametrize("next_opening", [opening(epoch=6), opening(takeover=True)])
def test_a_higher_epoch_or_a_takeover_starts_afresh(store, next_opening):
    first = store.open(opening())
    process_in(store, first, FIRST)
    other = store.open(next_opening)
    assert other.fresh
    assert other.session_id > first.session_id
    assert other.last_applied_step == 0
    assert store.take_ended() == [first.session_id]
    assert store.num_rows == 0


def test_a_lower_epoch_is_refused_and_disturbs_nothing(store):
    first = store.open(opening())
    with pytest.raises(OctavoError) as caught:
        store.open(opening(epoch=4, takeover=True))
    assert (caught.value.code, caught.value.reason) == (Code.FAILED_PRECONDITION, "STALE_EPOCH")
    assert isinstance(process_in(store, first, FIRST), StepResult)


def test_an_older_connection_runs_no_more_steps(store):
    """A step of a half-dead connection must not slip in behind those of the new one."""
    old = store.open(opening())
    new = store.open(opening())
    with pytest.raises(OctavoError) as caught:
        process_in(store, old, FIRST)
    assert (caught.value.code, caught.value.reason) == (Code.ABORTED, "SESSION_SUPERSEDED")
    store.disconnect(old, now_s=0)
    store.close(old)
    store.expire(now_s=1000)
    assert isinstance(process_in(store, new, FIRST), StepResult)


def test_a_session_outlives_its_connection_for_the_timeout(store):
    first = store.open(opening())
    store.disconnect(first, now_s=100)
    store.expire(now_s=129.9)
    assert store.num_sessions == 1
    assert not store.open(opening()).fresh
    store.expire(now_s=1000)  # connected again: no end
    assert store.num_sessions == 1


def test_a_session_ends_when_its_router_stays_away(store):
    first = store.open(opening())
    process_in(store, first, FIRST)
    store.disconnect(first, now_s=100)
    store.expire(now_s=130)
    assert store.take_ended() == [first.session_id]
    assert store.take_ended() == []
    assert store.open(opening()).fresh


def test_close_ends_at_once(store):
    first = store.open(opening())
    store.close(first)
    store.close(first)
    assert store.take_ended() == [first.session_id]
    with pytest.raises(OctavoError):
        process_in(store, first, FIRST)


def test_orphans_end_though_they_are_connected(store):
    a, b = store.open(opening("a")), store.open(opening("b"))
    store.end_sessions(frozenset({a.session_id, SessionId(99)}))
    assert store.take_ended() == [a.session_id]
    with pytest.raises(OctavoError):
        process_in(store, a, FIRST)
    assert isinstance(process_in(store, b, FIRST), StepResult)


def test_draining_refuses_whoever_had_no_session(store):
    """Who had one may take it up again, or anew, until the end: it may have found no other executor."""
    first = store.open(opening())
    assert store.drain() == 1
    with pytest.raises(OctavoError) as caught:
        store.open(opening("b"))
    assert (caught.value.code, caught.value.reason) == (Code.UNAVAILABLE, "DRAINING")
    assert store.open(opening()).session_id == first.session_id
    store.close(store.open(opening(takeover=True)))
    assert store.drain() == 0
    store.open(opening(epoch=6))
    store.take_again()
    assert store.open(opening("b")).fresh


def test_a_router_without_a_name_is_refused(store):
    with pytest.raises(OctavoError) as caught:
        store.open(opening(""))
    assert caught.value.violations[0].field == "open.router_id"
