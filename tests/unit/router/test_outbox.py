"""What waits for the cache service: merged, in an order that is right for each sequence, and fair between kinds."""

from router.ids import SequenceId, SessionKey, StepId
from router.outbox import MAX_BATCH_TOKENS, Allocation, Commit, Extension, Fork, Outbox, Release
from router.request import CacheScope

ONE, TWO = SequenceId(1), SequenceId(2)
SESSION = SessionKey("executor", 1, 1)


def allocation(sequence_id: SequenceId) -> Allocation:
    return Allocation(sequence_id, (1, 2), CacheScope(), 0, False)


def release(sequence_id: SequenceId, commit: Commit | None = None, step: int = 0) -> Release:
    return Release(sequence_id, commit, ((SESSION, StepId(step)),) if step else ())


def take_all(outbox: Outbox) -> list[object]:
    taken: list[object] = []
    while (batch := outbox.take()) is not None:
        taken += batch
    return taken


def test_long_prompts_that_wait_together_go_in_several_messages() -> None:
    """One message of them all would be larger than gRPC takes, and the lease lost for it."""
    outbox, prompt = Outbox(), (7,) * (MAX_BATCH_TOKENS // 2)
    for number in range(1, 6):
        outbox.allocate(Allocation(SequenceId(number), prompt, CacheScope(), 0, False))
    outbox.allocate(Allocation(SequenceId(6), (7,) * (MAX_BATCH_TOKENS + 1), CacheScope(), 0, False))
    sizes = []
    while (batch := outbox.take()) is not None:
        sizes.append(len(batch))
    assert sizes == [2, 2, 1, 1]


def test_commits_of_a_sequence_become_one() -> None:
    outbox = Outbox()
    outbox.commit(Commit(ONE, 4, 2, (30, 40)))
    outbox.commit(Commit(ONE, 8, 4, (50, 60, 70, 80)))
    assert outbox.take() == [Commit(ONE, 8, 2, (30, 40, 50, 60, 70, 80))]
    assert outbox.take() is None


def test_a_release_takes_commits_and_extensions_of_its_sequence_with_it() -> None:
    outbox = Outbox()
    outbox.commit(Commit(ONE, 4, 2, (30, 40)))
    outbox.extend(Extension(ONE, 1, 2, 2))
    outbox.extend(Extension(TWO, 1, 2, 2))
    outbox.release(release(ONE, Commit(ONE, 5, 4, (50,))))
    assert take_all(outbox) == [Extension(TWO, 1, 2, 2), release(ONE, Commit(ONE, 5, 2, (30, 40, 50)))]


def test_an_allocation_that_was_not_sent_is_simply_dropped() -> None:
    outbox = Outbox()
    outbox.allocate(allocation(ONE))
    outbox.release(release(ONE))
    assert outbox.take() is None


def test_an_allocation_that_was_sent_is_released_after() -> None:
    outbox = Outbox()
    outbox.allocate(allocation(ONE))
    outbox.take()
    outbox.release(release(ONE))
    assert outbox.take() == [release(ONE)]


def test_no_kind_starves_another() -> None:
    """Prefill commits blocks every step; decodes beside it still get theirs."""
    outbox = Outbox()
    outbox.extend(Extension(TWO, 1, 2, 2))
    outbox.allocate(allocation(SequenceId(3)))
    outbox.release(release(SequenceId(4)))
    taken: list[object] = []
    for number in range(4):
        outbox.commit(Commit(ONE, number, 0, ()))
        batch = outbox.take()
        assert batch is not None
        taken += batch
    assert {type(item) for item in taken} == {Extension, Allocation, Release, Commit}


def test_acknowledgements_are_urgent_only_while_fences_wait_for_them() -> None:
    fills = 0

    def on_filled() -> None:
        nonlocal fills
        fills += 1

    outbox = Outbox(on_filled)
    outbox.acknowledge(SESSION, StepId(1))
    assert (fills, outbox.lifts_fences()) == (0, False)
    outbox.release(release(ONE, step=3))
    outbox.take()
    outbox.mark_told({SESSION: StepId(1)})
    assert not outbox.lifts_fences(), "step 3 is not acknowledged, step 1 was told"
    outbox.acknowledge(SESSION, StepId(3))
    assert outbox.lifts_fences()
    assert fills == 2
    outbox.mark_told({SESSION: StepId(3)})
    assert not outbox.lifts_fences()


def test_on_a_lost_lease_nothing_that_waited_is_sent() -> None:
    outbox = Outbox()
    outbox.allocate(allocation(ONE))
    outbox.acknowledge(SESSION, StepId(1))
    outbox.clear()
    assert outbox.take() is None
    assert not outbox.acknowledged


def test_releases_of_a_fork_go_with_it_and_take_all_that_waits_for_their_sequences() -> None:
    """Beams that die make room in the very message; their fence is waited for as any other."""
    outbox = Outbox()
    outbox.extend(Extension(TWO, 1, 2, 2))
    outbox.commit(Commit(TWO, 4, 2, (30, 40)))
    outbox.fork(
        Fork(ONE, (SequenceId(3),), Commit(ONE, 6, 6, ()), (release(TWO, Commit(TWO, 6, 4, (50, 60)), step=7),))
    )
    outbox.acknowledge(SESSION, StepId(6))
    first = (release(TWO, Commit(TWO, 6, 2, (30, 40, 50, 60)), step=7),)
    assert take_all(outbox) == [Fork(ONE, (SequenceId(3),), Commit(ONE, 6, 6, ()), first)]
    assert outbox.lifts_fences()


def test_a_fork_goes_first_and_takes_the_commit_of_its_parent_along() -> None:
    """What the parent computes behind it is not the children's; a release of a child comes after it."""
    outbox = Outbox()
    outbox.extend(Extension(TWO, 1, 2, 2))
    outbox.commit(Commit(ONE, 4, 2, (30, 40)))
    outbox.fork(Fork(ONE, (SequenceId(3), SequenceId(4)), Commit(ONE, 6, 4, ())))
    outbox.commit(Commit(ONE, 8, 6, (70, 80)))
    outbox.release(release(SequenceId(3)))
    outbox.release(release(ONE))
    taken = take_all(outbox)
    assert taken[0] == Fork(ONE, (SequenceId(3), SequenceId(4)), Commit(ONE, 6, 2, (30, 40)))
    assert set(taken[1:]) == {
        Extension(TWO, 1, 2, 2),
        release(SequenceId(3)),
        release(ONE, Commit(ONE, 8, 6, (70, 80))),
    }
