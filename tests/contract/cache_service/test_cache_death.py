"""The cache service dies and another takes its place: what is known, what is not handed out, what is dropped."""

import logging
from array import array
from collections.abc import Iterator
from typing import Any

import pytest

from cache_service.block import BlockId
from cache_service.fence import SessionStep
from cache_service.journal import JOURNAL_BYTES, ExecutorEntry, Journal, JournalEntry, LeaseEntry
from cache_service.ledger import BufferLedger, Record, ledger_bytes, record_bytes
from cache_service.operation import SequenceId, SequenceSnapshot
from octavo.errors import Code, OctavoError
from tests.property.cache_service.cache_drivers import (
    ARENA,
    DRIVERS,
    HASHES,
    LRU,
    TTL_S,
    CacheDriver,
    FakeMemory,
    tokens,
)
from tests.property.cache_service.cache_router import ScriptedRouter

B = 4
NUM_BLOCKS = 9  # 8 usable


@pytest.fixture(params=list(DRIVERS))
def driver(request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture) -> Iterator[CacheDriver]:
    caplog.set_level(logging.CRITICAL)
    made = DRIVERS[request.param](HASHES["constant"], LRU)
    yield made
    made.close()


@pytest.fixture
def epoch(driver: CacheDriver) -> int:
    return driver.register("e", NUM_BLOCKS, B)


def snapshot(sequence_id: int, blocks: Any, token_ids: Any, num_computed: int, **more: Any) -> SequenceSnapshot:
    blocks = tuple(map(BlockId, blocks))
    return SequenceSnapshot(SequenceId(sequence_id), ARENA, array("I", token_ids), num_computed, blocks, **more)


def reconcile(router: ScriptedRouter, *snapshots: SequenceSnapshot, sent: tuple[SessionStep, ...] = ()) -> list[Any]:
    return router.driver.reconcile(router.header(), snapshots, sent)


def reason_of(call: Any, *arguments: Any, **options: Any) -> str:
    with pytest.raises(OctavoError) as refused:
        call(*arguments, **options)
    return refused.value.reason


def test_what_was_cached_is_hit_after_the_death_and_evicted_from_its_tail(driver: CacheDriver, epoch: int) -> None:
    router = ScriptedRouter(driver)
    old, new = router.compute(*range(12)), router.compute(*range(20, 32))
    driver.die()
    assert reconcile(router) == []
    assert driver.match(tokens(*range(13))) == 12
    assert driver.match(tokens(*range(20, 33))) == 12
    counts = driver.counts()
    assert (counts.cached, counts.free, counts.violations) == (6, 2, ())
    router.num_sequences = 100
    _, allocated = router.allocate(*range(50, 66))
    assert {old[2], old[1]} <= set(allocated.block_ids), "the chain that was used longest ago, its tail first"
    assert driver.match(tokens(*range(13))) == 4
    assert driver.match(tokens(*range(20, 33))) == 12
    assert set(allocated.block_ids).isdisjoint(new)


def test_a_lease_is_known_and_says_what_it_holds_before_anything_else(driver: CacheDriver, epoch: int) -> None:
    router = ScriptedRouter(driver)
    sequence_id, allocated = router.allocate(1, 2, 3, 4, 5, slack=1)
    router.commit(sequence_id, 5)
    driver.die()
    for call in (router.allocate, router.extend, router.commit):
        numbers = (7, 1, 1, 1) if call == router.extend else (7, 7)
        assert reason_of(call, *numbers) == "RECONCILE"
    assert reason_of(driver.keep_alive, router.lease_id) == "RECONCILE"
    assert driver.match(tokens(1, 2, 3, 4, 5)) == 4, "the ledger's word"
    assert reconcile(router, snapshot(sequence_id, allocated.block_ids, (1, 2, 3, 4, 5, 6), 5)) == [None]
    assert router.extend(sequence_id, 3, 4, 4).block_ids
    router.commit(sequence_id, 8, 7, 8, offset=6)
    assert driver.match(tokens(*range(1, 10))) == 8
    assert driver.counts().violations == ()


def test_what_a_step_in_flight_may_touch_is_not_handed_out(driver: CacheDriver, epoch: int) -> None:
    """Field failure 10: the fence of a release outlives the process that raised it, and its client need not name it."""
    router = ScriptedRouter(driver)
    session = router.open_session("e", epoch)
    sequence_id, _ = router.allocate(*range(16))
    router.release(sequence_id, SessionStep(session, 7))
    driver.die()
    reconcile(router, sent=(SessionStep(session, 7),))
    assert reason_of(router.allocate, 1, 2, 3) == "REBUILDING"
    router.number -= 1  # a message that is refused as a whole uses up no number
    driver.keep_alive(router.lease_id, [SessionStep(session, 6)])
    assert reason_of(router.allocate, 1, 2, 3) == "REBUILDING"
    router.number -= 1
    assert driver.counts().fenced == NUM_BLOCKS - 1
    driver.keep_alive(router.lease_id, [SessionStep(session, 7)])
    assert driver.counts().free == NUM_BLOCKS - 1
    router.allocate(1, 2, 3)


@pytest.mark.parametrize("end", ["close", "death"])
def test_a_session_that_its_client_does_not_name_is_waited_for(driver: CacheDriver, epoch: int, end: str) -> None:
    router = ScriptedRouter(driver)
    session = router.open_session("e", epoch)
    driver.die()
    reconcile(router)
    assert driver.counts().fenced == NUM_BLOCKS - 1
    if end == "close":
        driver.close_session(session)
    else:
        driver.kill_executor("e")
    assert driver.counts().free == NUM_BLOCKS - 1


def test_all_clients_are_waited_for_until_their_time_is_over(driver: CacheDriver, epoch: int) -> None:
    """The silent one's session may still write: its executor says when not."""
    first, second = ScriptedRouter(driver, "first"), ScriptedRouter(driver, "second")
    session = second.open_session("e", epoch)
    _, held = first.allocate(*range(5))
    driver.die()
    assert reconcile(first, snapshot(1, held.block_ids, range(5), 0)) == [None]
    assert reason_of(first.allocate, 1) == "REBUILDING"
    first.number -= 1
    driver.advance(TTL_S * 0.9)
    driver.keep_alive(first.lease_id)
    driver.advance(TTL_S * 0.2)
    assert driver.orphaned("e", epoch) == [session.session_id]
    assert reason_of(first.allocate, 1) == "REBUILDING"
    first.number -= 1
    driver.close_session(session)
    first.num_sequences = 5
    first.allocate(1)
    assert reason_of(driver.keep_alive, second.lease_id) == "LEASE_EXPIRED"


def test_a_copy_source_is_kept_for_a_child_whose_first_step_is_on_its_way(driver: CacheDriver, epoch: int) -> None:
    """Field failure 9: the parent is gone already."""
    router = ScriptedRouter(driver)
    parent, allocated = router.allocate(1, 2, 3, 4, 5, 6)
    router.commit(parent, 6)
    forked = router.fork(parent, 10)
    router.release(parent)
    driver.die()
    [(source, _)] = forked.copies
    assert source == allocated.block_ids[1]
    child = snapshot(10, forked.child_block_ids[0], range(1, 7), 6, copy_source=source)
    assert reconcile(router, child) == [None]
    assert driver.counts().used == 3
    router.commit(10, 7, 7, offset=6)
    assert driver.counts().used == 2
    assert driver.counts().violations == ()


def test_claims_that_something_known_contradicts_are_refused_alone(driver: CacheDriver, epoch: int) -> None:
    mine, other = ScriptedRouter(driver, "mine"), ScriptedRouter(driver, "other")
    a, cached = mine.allocate(1, 2, 3, 4, 5)
    mine.commit(a, 5)
    _, foreign = other.allocate(9)
    driver.die()
    assert reconcile(other, snapshot(1, foreign.block_ids, (9,), 0)) == [None]
    free = next(iter(set(range(1, NUM_BLOCKS)) - {*cached.block_ids, *foreign.block_ids}))
    answers = reconcile(
        mine,
        snapshot(1, cached.block_ids, (1, 2, 3, 4, 5), 5),
        snapshot(2, cached.block_ids[:1], (1, 2, 3, 9), 4),  # other tokens than its record
        snapshot(3, cached.block_ids[:1], (1, 2), 2),  # a findable block that is not full
        snapshot(4, foreign.block_ids, (9,), 1),
        snapshot(5, cached.block_ids[1:], (5,), 1),  # another sequence's tail
        snapshot(6, (free, free), range(8), 8),
        snapshot(7, (NUM_BLOCKS,), (1,), 1),
        snapshot(8, (free,), (1,), 2),
        snapshot(9, (free,), (1, 2, 3), 3),
    )
    assert [answer.reason if answer else "" for answer in answers] == ["", *["CLAIM_REFUSED"] * 7, ""]
    assert all(answer.code is Code.ABORTED for answer in answers if answer)
    counts = driver.counts()
    assert (counts.num_sequences, counts.violations) == (3, ())
    mine.release(1)
    assert driver.match(tokens(1, 2, 3, 4, 5)) == 4


def test_the_last_word_of_a_client_counts(driver: CacheDriver, epoch: int) -> None:
    """The reply was lost: it says it again, later, when the rebuild is over; and what it dropped comes free."""
    router = ScriptedRouter(driver)
    _, a = router.allocate(1, 2, 3)
    _, b = router.allocate(4, 5, 6)
    driver.die()
    both = snapshot(1, a.block_ids, (1, 2, 3), 3), snapshot(2, b.block_ids, (4, 5, 6), 1)
    assert reconcile(router, *both) == [None, None]
    assert reconcile(router, both[0]) == [None]
    counts = driver.counts()
    assert (counts.num_sequences, counts.used, counts.free, counts.violations) == (1, 1, NUM_BLOCKS - 2, ())
    # Outside of a rebuild nobody gets by it what it did not have.
    [answer] = reconcile(router, both[1])
    assert answer.reason == "CLAIM_REFUSED"
    late = router.header()
    router.number += 5
    assert reconcile(router) == []
    with pytest.raises(OctavoError) as refused:
        driver.reconcile(late, [], ())
    assert refused.value.reason == "SEQUENCE_GAP"


def test_epochs_and_sessions_go_on_where_they_were(driver: CacheDriver, epoch: int) -> None:
    router = ScriptedRouter(driver)
    closed, session = router.open_session("e", epoch, 1), router.open_session("e", epoch, 2)
    driver.close_session(closed)
    driver.clock.unix_ms -= 10_000_000  # a clock that went back meanwhile
    driver.die()
    assert reason_of(driver.open_session, closed, "router", router.epoch) == "SESSION_CLOSED"
    driver.open_session(session, "router", router.epoch)
    lease_id, client_epoch = driver.open_lease("router")
    assert lease_id > router.lease_id
    assert client_epoch > router.epoch
    driver.kill_executor("e")
    assert driver.register("e", NUM_BLOCKS, B) > epoch
    assert reason_of(driver.open_session, session, "router", client_epoch) == "STALE_EPOCH"


def test_an_executor_that_died_meanwhile_holds_nothing_up(driver: CacheDriver, epoch: int) -> None:
    router = ScriptedRouter(driver)
    session = router.open_session("e", epoch)

    def kill(memory: FakeMemory) -> None:
        driver.kill_executor("e")

    driver.die(kill)
    reconcile(router, sent=(SessionStep(session, 3),))
    assert driver.counts().free == NUM_BLOCKS - 1


def test_a_torn_record_proves_nothing_and_takes_what_stands_on_it_along(driver: CacheDriver, epoch: int) -> None:
    router = ScriptedRouter(driver)
    blocks = router.compute(*range(16))

    def tear(memory: FakeMemory) -> None:
        memory.ledger_buffer[blocks[1] * record_bytes(B) + 40] ^= 1

    driver.die(tear)
    reconcile(router)
    assert driver.match(tokens(*range(17))) == 4
    counts = driver.counts()
    assert (counts.cached, counts.free, counts.violations) == (1, 7, ())
    driver.die()
    assert driver.match(tokens(*range(17))) == 4, "what was dropped does not come back"


def test_what_was_evicted_before_the_death_is_not_findable_after_it(driver: CacheDriver, epoch: int) -> None:
    router = ScriptedRouter(driver)
    router.compute(*range(16))
    sequence_id, allocated = router.allocate(*range(20, 48))
    driver.die()
    assert driver.match(tokens(*range(17))) == 4
    assert reconcile(router, snapshot(sequence_id, allocated.block_ids, range(20, 48), 0)) == [None]
    assert driver.counts().violations == ()


def test_two_sequences_share_blocks_that_are_not_findable(driver: CacheDriver, epoch: int) -> None:
    """Answers to one prompt that bypasses the cache: full blocks are shared without a record of them."""
    router = ScriptedRouter(driver)
    parent, allocated = router.allocate(*range(8), bypass=True)
    router.commit(parent, 8)
    router.fork(parent, 10, 11)
    driver.die()
    shared = [snapshot(i, allocated.block_ids, range(8), 8, bypass_cache=True) for i in (parent, 10, 11)]
    assert reconcile(router, *shared) == [None] * 3
    assert driver.counts().used == 2
    for sequence_id in (parent, 10, 11):
        router.release(sequence_id)
    assert driver.counts().free == NUM_BLOCKS - 1


# ------------------------------------------------------------------------------------------------- ledger and journal


def test_a_record_that_is_cut_at_any_byte_proves_nothing() -> None:
    """Every state that a death in the middle of writing can leave, from an old record to a new one."""
    block, size = BlockId(2), record_bytes(B)
    before, after = bytearray(ledger_bytes(4, B)), bytearray(ledger_bytes(4, B))
    old, new = Record(1, 0, bytes(16), b"x" * 30), Record(3, 2, b"y" * 16, b"")
    for buffer, record in ((before, old), (after, new)):
        BufferLedger(buffer, 4, B).write(block, record)
        assert BufferLedger(buffer, 4, B).read_all() == {block: record}
    start = block * size
    for cut in range(17, 16 + 18 + 16):  # the digest of the old, and a body that is neither
        mixed = bytearray(before)
        mixed[start + 16 : start + cut] = after[start + 16 : start + cut]
        assert BufferLedger(mixed, 4, B).read(block) in (None, old), cut
    ledger = BufferLedger(before, 4, B)
    ledger.strike(block)
    assert ledger.read_all() == {}


def test_a_record_of_another_block_proves_nothing() -> None:
    buffer = bytearray(ledger_bytes(4, B))
    BufferLedger(buffer, 4, B).write(BlockId(1), Record(1, 0, bytes(16), b""))
    size = record_bytes(B)
    buffer[2 * size : 3 * size] = buffer[size : 2 * size]
    assert set(BufferLedger(buffer, 4, B).read_all()) == {1}


def test_the_journal_keeps_the_last_whole_entry() -> None:
    buffer = bytearray(JOURNAL_BYTES)
    assert Journal(buffer).read() is None
    executor = ExecutorEntry("e", 5, "cpu", 7, 8, ((1, 2),), ((3, 5),))
    entries = [JournalEntry((executor,), (LeaseEntry(2, "r", 9, 1.5),), 9, 2, number) for number in (1, 2, 3)]
    for entry in entries:
        assert Journal(buffer).write(entry)
        assert Journal(buffer).read() == entry
    places = [place for place in (0, JOURNAL_BYTES // 2) if b'"number":3' in bytes(buffer[place : place + 2000])]
    buffer[places[0] + 40] ^= 1
    assert Journal(buffer).read() == entries[1]
    many = JournalEntry((executor,) * 10_000, (), 0, 0, 4)
    assert not Journal(buffer).write(many)
    assert Journal(buffer).read() is None, "an entry of before is not the truth any more"
