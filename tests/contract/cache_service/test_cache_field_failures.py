"""What broke in block managers of this field, each kind once in process and once over gRPC."""

import itertools
import logging
from array import array
from collections.abc import Callable, Iterator

import pytest

from cache_service.fence import SessionStep
from cache_service.operation import Commit, SequenceId
from octavo.errors import Code, OctavoError
from tests.property.cache_service.cache_drivers import DRIVERS, HASHES, LRU, TTL_S, CacheDriver, Counts
from tests.property.cache_service.cache_router import ScriptedRouter

B = 4
Start = Callable[[int], ScriptedRouter]


@pytest.fixture(params=list(DRIVERS))
def start(request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture) -> Iterator[Start]:
    """Starts a cache service with a pool of P blocks and one executor, `e`; every test ends with a self-check."""
    caplog.set_level(logging.ERROR)
    drivers: list[CacheDriver] = []

    def begin(num_blocks: int) -> ScriptedRouter:
        driver = DRIVERS[request.param](HASHES["three-bit"], LRU)
        drivers.append(driver)
        driver.executor_epoch = driver.register("e", num_blocks, B)  # type: ignore[attr-defined]
        return ScriptedRouter(driver)

    yield begin
    for driver in drivers:
        assert driver.counts().violations == ()
        driver.close()


def prompt(num_tokens: int, first: int = 0) -> list[int]:
    return list(range(first, first + num_tokens))


def counts(router: ScriptedRouter) -> Counts:
    return router.driver.counts()


def assert_settled(router: ScriptedRouter) -> None:
    now = counts(router)
    assert (now.used, now.fenced, now.num_sequences, now.violations) == (0, 0, 0, ())
    assert now.free + now.cached + now.reserved == now.total


def session_of(router: ScriptedRouter, session_id: int = 1):
    return router.open_session("e", router.driver.executor_epoch, session_id)


@pytest.mark.parametrize("length", [1, B - 1, B, B + 1, 2 * B, 3 * B])
def test_a_wholly_cached_prompt_still_computes_its_last_token(start: Start, length: int) -> None:
    """Field failure 1: lengths around whole blocks, three times each."""
    router = start(16)
    router.compute(*prompt(length))
    for _ in range(2):
        sequence_id, allocated = router.allocate(*prompt(length))
        assert allocated.num_cached_tokens == (length - 1) // B * B <= length - 1
        router.commit(sequence_id, length)
        router.release(sequence_id)
    assert_settled(router)


def test_a_strict_prefix_of_a_cached_prompt_still_computes_its_last_token(start: Start) -> None:
    """Field failure 1: the prefix ends exactly with a cached block."""
    router = start(16)
    router.compute(*prompt(3 * B))
    _, allocated = router.allocate(*prompt(2 * B))
    assert allocated.num_cached_tokens == B


def test_blocks_of_a_burst_are_not_found_before_they_are_computed(start: Start) -> None:
    """Field failure 2: eight cold requests with one 6-block prefix; a writer that dies leaves nothing findable."""
    router = start(64)
    burst = [router.allocate(*prompt(6 * B), 100 + i) for i in range(8)]
    assert all(allocated.num_cached_tokens == 0 for _, allocated in burst)
    tables = [set(allocated.block_ids) for _, allocated in burst]
    assert len(set.union(*tables)) == sum(map(len, tables)), "two writers share a block"
    router.release(burst[0][0])
    assert router.driver.match(array("I", prompt(6 * B + 1))) == 0
    router.commit(burst[1][0], 2 * B + 1)
    assert router.driver.match(array("I", prompt(6 * B + 1))) == 2 * B


def test_a_lookup_cannot_be_overtaken_by_another_allocation(start: Start) -> None:
    """Field failure 3: a hint of 5 blocks, then another client takes everything."""
    router = start(9)
    other = ScriptedRouter(router.driver, "other")
    router.compute(*prompt(5 * B))
    assert router.driver.match(array("I", prompt(5 * B + 1))) == 5 * B
    taken, _ = other.allocate(*prompt(8 * B, 100))
    before = counts(router)
    with pytest.raises(OctavoError) as refused:
        router.allocate(*prompt(5 * B + 1))
    assert (refused.value.code, refused.value.reason) == (Code.RESOURCE_EXHAUSTED, "NO_BLOCKS")
    assert refused.value.metadata == {"needed": "6", "available": "0", "fenced": "0", "total": "8"}
    assert counts(router) == before
    other.release(taken)
    assert_settled(router)


def test_an_allocation_never_evicts_the_blocks_it_hits(start: Start) -> None:
    """Field failure 3: 8 usable blocks, 5 cached, 3 of others' history; a request of 8 that starts with the 5."""
    router = start(9)
    cached = router.compute(*prompt(5 * B))
    router.compute(*prompt(B, 100))  # younger, and yet evicted rather than the five
    _, allocated = router.allocate(*prompt(7 * B + 1))
    assert allocated.block_ids[:5] == cached
    assert allocated.num_cached_tokens == 5 * B
    assert len(set(allocated.block_ids)) == 8


def test_blocks_that_are_hit_are_not_counted_as_available_too(start: Start) -> None:
    """Field failure 3: 8 usable blocks, 5 cached, 1 held, 2 free; a request of 7 that starts with the 5, then of 8."""
    router = start(9)
    cached = router.compute(*prompt(5 * B))
    router.allocate(*prompt(B, 100))
    before = counts(router)
    assert (before.free, before.cached, before.used) == (2, 5, 1)
    with pytest.raises(OctavoError) as refused:
        router.allocate(*prompt(7 * B + 1))
    assert refused.value.metadata["available"] == "2"
    assert counts(router) == before
    _, allocated = router.allocate(*prompt(6 * B + 1))
    assert allocated.block_ids[:5] == cached
    assert counts(router).evicted_blocks == 0


EXTRAS = [
    {},
    {"salt": "a"},
    {"adapter": "a"},
    {"salt": "", "adapter": "a"},
    {"salt": "ab", "adapter": "c"},
    {"salt": "a", "adapter": "bc"},
    {"tenant": "a"},
    {"tenant": ""},
    {"revision": "1"},
    {"revision": "2"},
    {"kv_dtype": "float32"},
    {"kv_dtype": "bfloat16"},
    {"image_hashes": (b"a",)},
    {"image_hashes": (b"a", b"")},
]


def test_a_hit_needs_every_extra_equal_at_every_block(start: Start) -> None:
    """Field failure 4: all pairs of extras over one prompt of 4 blocks."""
    router = start(4 * len(EXTRAS) + 8)
    for position, extras in enumerate(EXTRAS):
        for known in EXTRAS[:position]:
            assert router.driver.match(array("I", [*prompt(4 * B), 9]), **known) == 4 * B
        for unknown in EXTRAS[position:]:
            assert router.driver.match(array("I", [*prompt(4 * B), 9]), **unknown) == 0
        router.compute(*prompt(4 * B), **extras)


def test_a_changed_token_in_an_early_block_is_a_miss_from_there_on(start: Start) -> None:
    """Field failure 4: equal later blocks after a different history are different blocks."""
    router = start(16)
    router.compute(*prompt(3 * B))
    changed = prompt(3 * B)
    changed[B] += 1
    assert router.driver.match(array("I", [*changed, 0])) == B


@pytest.mark.parametrize("evicted_first", [0, 1])
def test_twins_of_one_prompt_are_evicted_one_by_one(start: Start, evicted_first: int) -> None:
    """Field failure 5: two identical cold prompts in one step; one twin goes, the other is still found."""
    router = start(3)
    twins = [router.allocate(*prompt(B)) for _ in range(2)]
    for sequence_id, _ in twins:
        router.commit(sequence_id, B)
    router.release(twins[evicted_first][0])
    router.release(twins[1 - evicted_first][0])
    taken, allocated = router.allocate(*prompt(B, 100))
    assert allocated.block_ids == twins[evicted_first][1].block_ids
    assert router.driver.match(array("I", prompt(B + 1))) == B
    router.release(taken)
    assert_settled(router)


def test_a_chain_is_evicted_from_its_tail(start: Start) -> None:
    """Field failure 6: a 5-block chain fills the pool; take 2 blocks, ask again, 100 times: 3 hits each time."""
    router = start(6)
    for round_ in range(100):
        router.compute(*prompt(5 * B))
        taken, _ = router.allocate(*prompt(2 * B, 1000 + round_ * 2 * B))
        router.release(taken)  # never committed: its blocks are free again
        assert router.driver.match(array("I", prompt(5 * B + 1))) == 3 * B
    assert_settled(router)


@pytest.mark.parametrize("order", list(itertools.permutations([0, 1, 2])))
def test_shared_blocks_are_free_when_the_last_owner_lets_go(start: Start, order: tuple[int, ...]) -> None:
    """Field failure 7: a parent and two children end in every order."""
    router = start(12)
    parent, allocated = router.allocate(*prompt(2 * B + 1))
    router.commit(parent, 2 * B + 1)
    router.fork(parent, 101, 102)
    owners = [parent, 101, 102]
    for position in order:
        assert router.driver.match(array("I", prompt(2 * B + 1))) == 2 * B
        assert counts(router).used > 0
        router.release(owners[position])
    assert_settled(router)
    assert len(set(allocated.block_ids)) == 3


def test_a_sequence_is_released_once_however_often_it_is_said(start: Start) -> None:
    """Field failures 7 and 11: a second release is answered, and gives nothing back that another now owns."""
    router = start(6)
    first, _ = router.allocate(*prompt(5 * B))
    router.release(first)
    router.allocate(*prompt(5 * B, 100))
    before = counts(router)
    router.release(first)
    assert counts(router) == before


def test_a_fork_without_blocks_for_every_child_changes_nothing(start: Start) -> None:
    """Field failure 9: four children of a half-full last block, and one block left."""
    router = start(5)
    parent, _ = router.allocate(*prompt(2 * B + 2))
    router.commit(parent, 2 * B + 2)
    before = counts(router)
    with pytest.raises(OctavoError) as refused:
        router.fork(parent, 101, 102, 103, 104)
    assert refused.value.reason == "NO_BLOCKS"
    assert counts(router) == before
    forked = router.fork(parent, 105)
    assert len(forked.copies) == 1


def test_copies_of_dying_and_doubled_beams_read_before_they_write(start: Start) -> None:
    """Field failure 9: two of four beams die, two are doubled; no source of a copy is the target of another."""
    router = start(16)
    parent, _ = router.allocate(*prompt(B + 2))
    router.commit(parent, B + 2)
    router.fork(parent, 11, 12, 13)
    for beam, token in zip([parent, 11, 12, 13], range(50, 54), strict=True):
        router.commit(beam, B + 3, token, offset=B + 2)
    plans = [router.fork(11, 21), router.fork(12, 22)]
    sources = {source for plan in plans for source, _ in plan.copies}
    for dead in (parent, 13):
        router.release(dead)
    plans.append(router.fork(21, 31))
    targets = {target for plan in plans for _, target in plan.copies}
    assert len(targets) == 3
    assert not sources & targets
    # 21 is not filled yet: its child copies from where 21 itself is filled from.
    assert plans[2].copies[0][0] == plans[0].copies[0][0]


def test_the_source_of_a_copy_is_kept_until_the_copy_has_happened(start: Start) -> None:
    """Field failure 9: the parent dies at once, before any step has carried the copy."""
    router = start(5)
    parent, allocated = router.allocate(*prompt(B + 2))
    router.commit(parent, B + 2)
    forked = router.fork(parent, 11)
    router.release(parent)
    source = forked.copies[0][0]
    assert source == allocated.block_ids[1]
    _, other = router.allocate(*prompt(B, 100))
    assert source not in other.block_ids
    router.commit(11, B + 3, 50, offset=B + 2)
    _, other = router.allocate(*prompt(B, 200))
    assert other.block_ids == (source,)


def test_a_cancelled_sequence_is_fenced_until_its_last_step_is_acknowledged(start: Start) -> None:
    """Field failure 10: cancel while a step is in flight, and an unrelated request at once."""
    router = start(4)
    session = session_of(router)
    cancelled, _ = router.allocate(*prompt(3 * B))
    router.release(cancelled, SessionStep(session, 7))
    assert (counts(router).fenced, counts(router).free) == (3, 0)
    with pytest.raises(OctavoError) as refused:
        router.allocate(*prompt(B, 100))
    assert refused.value.metadata["fenced"] == "3"
    router.acknowledged[session] = 6
    with pytest.raises(OctavoError, match="fenced"):
        router.allocate(*prompt(B, 100))
    router.acknowledged[session] = 7
    router.allocate(*prompt(B, 100))


@pytest.mark.parametrize("first", [1, 2])
def test_a_sequence_of_two_sessions_is_fenced_until_both_are_past_it(start: Start, first: int) -> None:
    """Field failure 10: it ran in a session that broke, and in the next one; both may still write, in any order."""
    router = start(4)
    sessions = [session_of(router, 1), session_of(router, 2)]
    cancelled, _ = router.allocate(*prompt(3 * B))
    router.release(cancelled, *(SessionStep(session, 7) for session in sessions))
    router.acknowledged[sessions[first - 1]] = 7
    with pytest.raises(OctavoError, match="fenced"):
        router.allocate(*prompt(B, 100))
    router.acknowledged = dict.fromkeys(sessions, 7)
    router.allocate(*prompt(B, 100))


def test_a_fenced_block_that_was_committed_is_found_but_not_handed_out(start: Start) -> None:
    """Field failure 10: preempted in flight, asked for again at once."""
    router = start(6)
    session = session_of(router)
    sequence_id, allocated = router.allocate(*prompt(2 * B + 1))
    commit = Commit(SequenceId(sequence_id), 2 * B, 0, array("I", []))
    router.release(sequence_id, SessionStep(session, 1), commit=commit)
    assert counts(router).fenced == 3
    _, again = router.allocate(*prompt(2 * B + 1))
    assert again.num_cached_tokens == 2 * B
    assert again.block_ids[:2] == allocated.block_ids[:2]
    assert again.block_ids[2] not in allocated.block_ids
    with pytest.raises(OctavoError, match="fenced"):
        router.allocate(*prompt(2 * B, 100))


def test_fences_fall_when_the_executor_dies_instead(start: Start) -> None:
    """Field failure 10: no acknowledgement comes; the death of the process is enough."""
    router = start(4)
    session = session_of(router)
    cancelled, _ = router.allocate(*prompt(3 * B))
    router.release(cancelled, SessionStep(session, 7))
    router.driver.kill_executor("e")
    assert_settled(router)
    router.allocate(*prompt(3 * B, 100))


def test_blocks_of_an_expired_lease_wait_for_its_sessions(start: Start) -> None:
    """Field failure 10: the router dies with steps in flight that nobody can name any more."""
    router = start(6)
    session = session_of(router)
    router.allocate(*prompt(2 * B))
    router.driver.advance(TTL_S + 1)
    assert counts(router).fenced == 2
    assert router.driver.orphaned("e", router.driver.executor_epoch) == [1]
    router.driver.close_session(session)
    assert_settled(router)
    with pytest.raises(OctavoError) as refused:
        router.allocate(1)
    assert refused.value.reason == "LEASE_EXPIRED"


def test_a_lease_without_sessions_gives_its_blocks_back_at_expiry(start: Start) -> None:
    """Field failure 10: nothing can be in flight where no session was ever announced."""
    router = start(6)
    router.allocate(*prompt(2 * B))
    router.driver.advance(TTL_S - 1)
    router.driver.keep_alive(router.lease_id)
    router.driver.advance(TTL_S - 1)
    assert counts(router).used == 2
    router.driver.advance(2)
    assert_settled(router)


def test_cancel_is_right_at_every_odd_moment(start: Start) -> None:
    """Field failure 11: unknown id, twice, after the end, before the allocation, between allocation and first step."""
    router = start(6)
    router.release(77)
    router.release(77)
    _, late = router.try_allocate(*prompt(B), sequence_id=77)
    assert isinstance(late, OctavoError)
    assert (late.code, late.reason) == (Code.ABORTED, "RELEASED")
    sequence_id, _ = router.allocate(*prompt(B))
    router.release(sequence_id)
    router.release(sequence_id)
    assert_settled(router)
    for use in (
        lambda: router.commit(sequence_id, 1),
        lambda: router.extend(sequence_id, 0, 1, 1),
        lambda: router.fork(sequence_id, 500),
    ):
        with pytest.raises(OctavoError) as refused:
            use()
        assert (refused.value.code, refused.value.reason) == (Code.ABORTED, "RELEASED")
    assert_settled(router)


def test_what_can_never_fit_is_told_from_what_does_not_fit_now(start: Start) -> None:
    """Field failure 12, the manager's part: the reserved block does not count; a small one behind is served."""
    router = start(6)
    _, allocated = router.allocate(*prompt(5 * B))
    assert 0 not in allocated.block_ids
    with pytest.raises(OctavoError) as refused:
        router.allocate(*prompt(5 * B + 1))
    assert (refused.value.code, refused.value.reason) == (Code.FAILED_PRECONDITION, "NEVER_FITS")
    assert refused.value.metadata == {"needed": "6", "usable": "5", "block_size": "4"}
    router.release(1)
    router.allocate(*prompt(B, 100))


def test_slack_makes_no_allocation_fail(start: Start) -> None:
    """Slack comes after every prompt of the batch and shrinks to what is left."""
    router = start(6)
    _, first = router.allocate(*prompt(2 * B), slack=10)
    assert len(first.block_ids) == 5
    _, second = router.try_allocate(*prompt(B, 100), slack=10)
    assert isinstance(second, OctavoError)
    router.release(1)
    _, third = router.allocate(*prompt(5 * B, 100), slack=3)
    assert len(third.block_ids) == 5


def test_a_bypassing_sequence_neither_hits_nor_becomes_findable(start: Start) -> None:
    router = start(12)
    router.compute(*prompt(2 * B))
    _, allocated = router.allocate(*prompt(2 * B + 1), bypass=True)
    assert allocated.num_cached_tokens == 0
    router.compute(*prompt(2 * B, 100), bypass=True)
    assert router.driver.match(array("I", prompt(2 * B + 1, 100))) == 0
    assert counts(router).queried_tokens == 2 * B


def test_a_lost_extension_is_asked_for_again_and_taken_once(start: Start) -> None:
    router = start(8)
    sequence_id, allocated = router.allocate(*prompt(B))
    first = router.extend(sequence_id, 1, 2, 4)
    again = router.extend(sequence_id, 1, 2, 4)
    assert first == again
    assert len(first.block_ids) == 3
    assert counts(router).used == 4
    assert router.extend(sequence_id, 0, 0, 0).block_ids == allocated.block_ids + first.block_ids
    assert len(router.extend(sequence_id, 4, 5, 50).block_ids) == 3
    with pytest.raises(OctavoError) as refused:
        router.extend(sequence_id, 7, 8, 8)
    assert refused.value.reason == "NEVER_FITS"
