"""Every call of BlockManagerService over real gRPC: its statuses with their details, its order, its repetitions."""

import logging
from array import array
from collections.abc import Iterator
from typing import Any

import pytest

from cache_service.fence import SessionKey, SessionStep
from cache_service.operation import LeaseHeader
from octavo.errors import Code, OctavoError
from octavo.v1 import cache_pb2
from tests.property.cache_service.cache_drivers import (
    ARENA,
    FINGERPRINT,
    GrpcDriver,
    allocation,
    allocation_message,
    geometry_message,
    header_message,
    kv_bytes_of,
)
from tests.property.cache_service.cache_router import ScriptedRouter

B = 4


@pytest.fixture
def driver(caplog: pytest.LogCaptureFixture) -> Iterator[GrpcDriver]:
    caplog.set_level(logging.ERROR)
    driver = GrpcDriver()
    yield driver
    driver.close()


def registration(executor_id: str, pid: int, **changes: Any) -> cache_pb2.RegisterExecutorRequest:
    fields = {
        "executor_id": executor_id,
        "pid": pid,
        "arena_id": ARENA,
        "model_fingerprint": FINGERPRINT,
        "geometry": geometry_message(B),
        "kv_bytes": kv_bytes_of(8, B),
    }
    return cache_pb2.RegisterExecutorRequest(**fields | changes)


def refusal_of(driver: GrpcDriver, method: str, request: Any) -> OctavoError:
    with pytest.raises(OctavoError) as refused:
        driver.call(method, request)
    return refused.value


def told(error: OctavoError) -> tuple[Code, str]:
    return error.code, error.reason


def test_a_registration_describes_the_arena(driver: GrpcDriver) -> None:
    epoch = driver.register("e", 8, B)
    assert epoch == driver.clock.unix_ms
    arena = driver.call("GetArena", cache_pb2.GetArenaRequest(arena_id=ARENA)).arena
    assert (arena.num_blocks, arena.model_fingerprint, arena.geometry.block_size) == (8, FINGERPRINT, B)
    assert arena.layout.layers[0].k.token_stride == 16
    assert not arena.layout.layers[0].HasField("k_scale")
    unknown = refusal_of(driver, "GetArena", cache_pb2.GetArenaRequest(arena_id="cuda:9"))
    assert told(unknown) == (Code.NOT_FOUND, "UNKNOWN_ARENA")


def test_an_executor_id_belongs_to_one_living_process(driver: GrpcDriver) -> None:
    first = driver.register("e", 8, B)
    alive = refusal_of(driver, "RegisterExecutor", registration("e", pid=2))
    assert told(alive) == (Code.FAILED_PRECONDITION, "EXECUTOR_ALIVE")
    assert alive.metadata == {"executor_id": "e", "epoch": str(first)}
    again = driver.call("RegisterExecutor", registration("e", pid=1, executor_epoch=first))
    assert again.executor_epoch == first
    lost_reply = driver.call("RegisterExecutor", registration("e", pid=1))
    assert lost_reply.executor_epoch == first, "the same process asks again for what it was not told"
    driver.clock.unix_ms -= 1000  # a clock that went back grants no old epoch
    driver.kill_executor("e")
    assert driver.register("e", 8, B) == first + 1
    stale = refusal_of(driver, "RegisterExecutor", registration("e", pid=1, executor_epoch=first))
    assert told(stale) == (Code.FAILED_PRECONDITION, "STALE_EPOCH")


def test_an_arena_in_use_is_not_given_another_shape(driver: GrpcDriver) -> None:
    driver.register("e", 8, B)
    others = geometry_message(B * 2), geometry_message(B, "int8")
    for changes in ({"model_fingerprint": "model-2"}, *({"geometry": other} for other in others)):
        mismatch = refusal_of(driver, "RegisterExecutor", registration("f", pid=1, **changes))
        assert told(mismatch) == (Code.FAILED_PRECONDITION, "GEOMETRY_MISMATCH")
    router = ScriptedRouter(driver)
    sequence_id, _ = router.allocate(1, 2, 3)
    driver.kill_executor("e")
    held = refusal_of(driver, "RegisterExecutor", registration("f", pid=1, model_fingerprint="model-2"))
    assert held.reason == "GEOMETRY_MISMATCH"
    router.release(sequence_id)
    driver.call("RegisterExecutor", registration("f", pid=1, model_fingerprint="model-2"))
    assert driver.call("GetArena", cache_pb2.GetArenaRequest(arena_id=ARENA)).arena.model_fingerprint == "model-2"


def test_a_successor_joins_the_arena_with_its_cached_blocks(driver: GrpcDriver) -> None:
    driver.register("e", 8, B)
    ScriptedRouter(driver).compute(*range(2 * B))
    driver.kill_executor("e")
    driver.register("e", 8, B)
    assert driver.match(array("I", range(2 * B + 1))) == 2 * B


def test_bad_registrations_name_their_fields(driver: GrpcDriver) -> None:
    driver.register("e", 8, B)
    nameless = refusal_of(driver, "RegisterExecutor", registration("", pid=1))
    assert told(nameless) == (Code.INVALID_ARGUMENT, "INVALID_FIELD")
    assert [violation.field for violation in nameless.violations] == ["executor_id"]


def test_sessions_are_announced_for_a_live_lease_of_a_live_executor(driver: GrpcDriver) -> None:
    epoch = driver.register("e", 8, B)
    router = ScriptedRouter(driver)
    session = router.open_session("e", epoch)
    router.open_session("e", epoch)  # again
    other = ScriptedRouter(driver, "other")
    cases = [
        (session._replace(executor_epoch=epoch - 1), "router", router.epoch, "STALE_EPOCH"),
        (session._replace(executor_id="nobody"), "router", router.epoch, "STALE_EPOCH"),
        (session._replace(session_id=2), "router", router.epoch - 1, "LEASE_EXPIRED"),
        (session._replace(session_id=2), "stranger", 1, "LEASE_EXPIRED"),
        (session, "other", other.epoch, "SESSION_TAKEN"),
    ]
    for key, client_id, client_epoch, reason in cases:
        with pytest.raises(OctavoError) as refused:
            driver.open_session(key, client_id, client_epoch)
        assert refused.value.reason == reason
    driver.close_session(session)
    driver.close_session(session)
    with pytest.raises(OctavoError) as refused:
        router.open_session("e", epoch)
    assert told(refused.value) == (Code.FAILED_PRECONDITION, "SESSION_CLOSED")
    with pytest.raises(OctavoError) as refused:
        driver.orphaned("e", epoch - 1)
    assert refused.value.reason == "STALE_EPOCH"


def test_a_lease_speaks_of_its_own_sessions_only(driver: GrpcDriver) -> None:
    epoch = driver.register("e", 8, B)
    router, other = ScriptedRouter(driver), ScriptedRouter(driver, "other")
    others = other.open_session("e", epoch)
    never = SessionKey("e", epoch, 99)
    for session in (others, never):
        sequence_id, _ = router.allocate(1)
        with pytest.raises(OctavoError) as refused:
            router.release(sequence_id, SessionStep(session, 1))
        assert told(refused.value) == (Code.FAILED_PRECONDITION, "UNKNOWN_SESSION")
        with pytest.raises(OctavoError):
            driver.keep_alive(router.lease_id, [SessionStep(session, 1)])
        router.release(sequence_id)
    driver.close_session(others)
    sequence_id, _ = router.allocate(1)
    router.release(sequence_id, SessionStep(others, 1))  # over: nothing to wait for
    assert driver.counts().fenced == 0


def test_a_client_has_one_lease_and_its_epochs_only_rise(driver: GrpcDriver) -> None:
    driver.register("e", 8, B)
    router = ScriptedRouter(driver)
    router.allocate(1)
    assert driver.open_lease("router", router.epoch) == (router.lease_id, router.epoch)
    request = cache_pb2.OpenLeaseRequest(client_id="router", client_epoch=router.epoch)
    assert driver.call("OpenLease", request).last_sequence_number == 1
    lease_id, epoch = driver.open_lease("router")
    assert epoch > router.epoch
    assert driver.counts().num_sequences == 0, "a higher epoch ends the older lease"
    for client_epoch in (router.epoch, epoch - 1):
        request = cache_pb2.OpenLeaseRequest(client_id="router", client_epoch=client_epoch)
        assert told(refusal_of(driver, "OpenLease", request)) == (Code.FAILED_PRECONDITION, "STALE_EPOCH")
    driver.close_lease(lease_id)
    for method in (driver.keep_alive, driver.close_lease):
        with pytest.raises(OctavoError) as refused:
            method(lease_id)
        assert told(refused.value) == (Code.FAILED_PRECONDITION, "LEASE_EXPIRED")


def test_bad_leases_name_their_fields(driver: GrpcDriver) -> None:
    for field, request in [
        ("client_id", cache_pb2.OpenLeaseRequest()),
        ("client_epoch", cache_pb2.OpenLeaseRequest(client_id="a", client_epoch=2**63)),
        ("ttl", cache_pb2.OpenLeaseRequest(client_id="a", ttl={"seconds": 0})),
        ("ttl", cache_pb2.OpenLeaseRequest(client_id="a", ttl={"seconds": -5})),
    ]:
        error = refusal_of(driver, "OpenLease", request)
        assert error.code is Code.INVALID_ARGUMENT
        assert [violation.field for violation in error.violations] == [field]
    granted = driver.call("OpenLease", cache_pb2.OpenLeaseRequest(client_id="a", ttl={"seconds": 10**6}))
    assert granted.ttl.seconds == 600
    assert driver.call("OpenLease", cache_pb2.OpenLeaseRequest(client_id="b")).ttl.seconds == 30


def test_a_lease_closed_in_order_leaves_only_what_is_in_flight_fenced(driver: GrpcDriver) -> None:
    epoch = driver.register("e", 8, B)
    router = ScriptedRouter(driver)
    session = router.open_session("e", epoch)
    router.allocate(1, 2, 3)
    router.acknowledged[session] = 4
    router.allocate(1)
    driver.close_lease(router.lease_id, [SessionStep(session, 5)])
    assert driver.counts().fenced == 2
    assert driver.orphaned("e", epoch) == [session.session_id]
    driver.close_session(session)
    assert driver.counts().fenced == 0


def test_messages_of_a_lease_apply_in_order_and_once(driver: GrpcDriver) -> None:
    driver.register("e", 8, B)
    router = ScriptedRouter(driver)
    first = cache_pb2.AllocateSequencesRequest(
        header=header_message(LeaseHeader(router.lease_id, 1)),
        arena_id=ARENA,
        allocations=[allocation_message(allocation(1, array("I", [1, 2])))],
    )
    answer = driver.call("AllocateSequences", first)
    assert driver.call("AllocateSequences", first) == answer
    assert driver.counts().num_sequences == 1
    changed = cache_pb2.AllocateSequencesRequest()
    changed.CopyFrom(first)
    changed.allocations[0].token_ids.append(3)
    gaps: list[tuple[str, Any]] = [
        ("AllocateSequences", changed),
        ("CommitBlocks", cache_pb2.CommitBlocksRequest(header=first.header)),
        ("ExtendSequences", cache_pb2.ExtendSequencesRequest(header=header_message(LeaseHeader(router.lease_id, 3)))),
        ("ForkSequences", cache_pb2.ForkSequencesRequest(header=header_message(LeaseHeader(router.lease_id, 0)))),
    ]
    for method, request in gaps:
        gap = refusal_of(driver, method, request)
        assert told(gap) == (Code.ABORTED, "SEQUENCE_GAP")
        assert gap.metadata["expected"] == "2"
    lost = cache_pb2.ReleaseSequencesRequest(header=header_message(LeaseHeader(999, 1)))
    assert told(refusal_of(driver, "ReleaseSequences", lost)) == (Code.FAILED_PRECONDITION, "LEASE_EXPIRED")


def test_a_message_refused_as_a_whole_uses_up_no_number(driver: GrpcDriver) -> None:
    driver.register("e", 8, B)
    router = ScriptedRouter(driver)
    header = header_message(LeaseHeader(router.lease_id, 1))
    nowhere = cache_pb2.AllocateSequencesRequest(header=header, arena_id="cpu:7")
    assert told(refusal_of(driver, "AllocateSequences", nowhere)) == (Code.NOT_FOUND, "UNKNOWN_ARENA")
    router.allocate(1)
    assert router.number == 1


def test_items_of_one_message_are_refused_one_by_one(driver: GrpcDriver) -> None:
    driver.register("e", 4, B)
    router = ScriptedRouter(driver)
    prompts = [[1] * 4, [], [2] * 12, [3] * 4, [4] * 16]
    items = [allocation(i + 1, array("I", ids)) for i, ids in enumerate(prompts)]
    items.append(allocation(1, array("I", [9])))
    answers = driver.allocate(router.header(), items)
    reasons = [answer.reason if isinstance(answer, OctavoError) else "OK" for answer in answers]
    assert reasons == ["OK", "INVALID_FIELD", "NO_BLOCKS", "OK", "NEVER_FITS", "SEQUENCE_EXISTS"]
    assert isinstance(answers[1], OctavoError)
    assert answers[1].violations[0].field == "allocations[1].token_ids"


def test_a_commit_is_repeatable_and_must_not_contradict(driver: GrpcDriver) -> None:
    driver.register("e", 8, B)
    router = ScriptedRouter(driver)
    sequence_id, _ = router.allocate(1, 2, 3, slack=1)
    router.commit(sequence_id, 5, 3, 4, 5, 6, offset=2)
    before = driver.counts()
    router.commit(sequence_id, 5, 3, 4, 5, 6, offset=2)
    router.commit(sequence_id, 2)
    assert driver.counts() == before
    for field, arguments, offset in [
        ("token_ids", (5, 3, 9), 2),
        ("token_offset", (5, 7), 7),
        ("num_computed_tokens", (7,), 0),
        ("num_computed_tokens", (9, 7, 8, 9), 6),
    ]:
        with pytest.raises(OctavoError) as refused:
            router.commit(sequence_id, *arguments, offset=offset)
        assert refused.value.code is Code.INVALID_ARGUMENT
        assert refused.value.violations[0].field == f"commits[0].{field}"
    assert driver.counts() == before
    with pytest.raises(OctavoError) as refused:
        router.commit(404, 1)
    assert told(refused.value) == (Code.NOT_FOUND, "UNKNOWN_SEQUENCE")


def test_bad_extensions_and_forks_name_their_fields(driver: GrpcDriver) -> None:
    driver.register("e", 8, B)
    router = ScriptedRouter(driver)
    sequence_id, _ = router.allocate(1)
    for field, numbers in (("have_blocks", (2, 2, 2)), ("want_blocks", (1, 3, 2))):
        with pytest.raises(OctavoError) as refused:
            router.extend(sequence_id, *numbers)
        assert refused.value.violations[0].field == f"extensions[0].{field}"
    for children, reason in (((), "INVALID_FIELD"), ((5, 5), "INVALID_FIELD"), ((sequence_id,), "SEQUENCE_EXISTS")):
        with pytest.raises(OctavoError) as refused:
            router.fork(sequence_id, *children)
        assert refused.value.reason == reason


def test_releases_of_a_message_that_forks_come_before_its_forks(driver: GrpcDriver) -> None:
    """The children have the blocks of what is released; what is wrong with a release is said, and stops no fork."""
    driver.register("e", 4, B)
    router = ScriptedRouter(driver)
    parent, _ = router.allocate(*range(B + 1))
    router.commit(parent, B + 1)
    other, _ = router.allocate(100)
    with pytest.raises(OctavoError) as refused:
        router.fork(parent, 11)
    assert refused.value.reason == "NO_BLOCKS"
    request = cache_pb2.ForkSequencesRequest(header=header_message(router.header()))
    request.forks.add(parent_sequence_id=parent, child_sequence_ids=[12])
    request.releases.add(sequence_id=other)
    bad = request.releases.add(sequence_id=parent)
    bad.commit.sequence_id, bad.commit.num_computed_tokens = parent, 400
    response = driver.call("ForkSequences", request)
    assert not response.forks[0].status.code
    assert [bool(status.code) for status in response.release_statuses] == [False, True]
    assert driver.call("ForkSequences", request) == response


def test_a_release_refuses_the_commit_of_another_sequence(driver: GrpcDriver) -> None:
    driver.register("e", 8, B)
    router = ScriptedRouter(driver)
    router.allocate(1)
    request = cache_pb2.ReleaseSequencesRequest(header=header_message(router.header()))
    request.releases.add(sequence_id=1).commit.sequence_id = 2
    error = refusal_of(driver, "ReleaseSequences", request)
    assert error.violations[0].field == "releases[0].commit.sequence_id"
    assert driver.counts().num_sequences == 1


def test_a_fork_commits_its_parent_first(driver: GrpcDriver) -> None:
    """Children get what the commit says is computed; the commit holds also where the fork finds no block."""
    driver.register("e", 4, B)
    router = ScriptedRouter(driver)
    parent, allocated = router.allocate(*range(B + 2))
    request = cache_pb2.ForkSequencesRequest(header=header_message(router.header()))
    fork = request.forks.add(parent_sequence_id=parent, child_sequence_ids=[11, 12])
    fork.commit.sequence_id, fork.commit.num_computed_tokens = parent, B + 2
    [refused] = driver.call("ForkSequences", request).forks
    assert refused.status.code == Code.RESOURCE_EXHAUSTED.value
    assert driver.match(array("I", range(B + 2))) == B, "the parent's full block is findable"
    request.header.CopyFrom(header_message(router.header()))
    del fork.child_sequence_ids[1:]
    [forked] = driver.call("ForkSequences", request).forks
    table = list(forked.child_tables[0].block_ids)
    assert table[0] == allocated.block_ids[0]
    assert (list(forked.copy_sources), list(forked.copy_targets)) == ([allocated.block_ids[1]], table[1:])
    assert not driver.counts().violations


def test_a_fork_refuses_the_commit_of_another_sequence(driver: GrpcDriver) -> None:
    driver.register("e", 8, B)
    router = ScriptedRouter(driver)
    router.allocate(1)
    request = cache_pb2.ForkSequencesRequest(header=header_message(router.header()))
    request.forks.add(parent_sequence_id=1, child_sequence_ids=[11]).commit.sequence_id = 2
    error = refusal_of(driver, "ForkSequences", request)
    assert error.violations[0].field == "forks[0].commit.sequence_id"
    assert driver.counts().num_sequences == 1


def test_a_match_is_a_hint_that_changes_nothing(driver: GrpcDriver) -> None:
    driver.register("e", 8, B)
    ScriptedRouter(driver).compute(*range(2 * B))
    before = driver.counts()
    assert driver.match(array("I", range(2 * B))) == B
    assert driver.counts() == before
    empty = refusal_of(driver, "MatchPrefix", cache_pb2.MatchPrefixRequest(arena_id=ARENA))
    assert empty.violations[0].field == "token_ids"
    nowhere = cache_pb2.MatchPrefixRequest(arena_id="cpu:7", token_ids=[1])
    assert told(refusal_of(driver, "MatchPrefix", nowhere)) == (Code.NOT_FOUND, "UNKNOWN_ARENA")


def test_stats_count_every_block_once(driver: GrpcDriver) -> None:
    assert not driver.call("GetStats", cache_pb2.GetStatsRequest()).arenas
    driver.register("e", 8, B)
    router = ScriptedRouter(driver)
    router.compute(*range(2 * B + 1))
    router.allocate(*range(2 * B + 1))
    response = driver.call("GetStats", cache_pb2.GetStatsRequest(self_check=True))
    [arena] = response.arenas
    assert (response.num_leases, response.num_executors) == (1, 1)
    assert (arena.free_blocks, arena.cached_blocks, arena.used_blocks, arena.reserved_blocks) == (4, 0, 3, 1)
    assert (arena.queried_tokens, arena.hit_tokens, arena.total_blocks) == (18, 8, 8)
    assert not arena.violations
    nowhere = cache_pb2.GetStatsRequest(arena_id="cpu:7")
    assert told(refusal_of(driver, "GetStats", nowhere)) == (Code.NOT_FOUND, "UNKNOWN_ARENA")
