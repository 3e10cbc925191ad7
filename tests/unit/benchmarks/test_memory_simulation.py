"""The simulation behind docs/memory.md: what its policies take, and that every slot is counted once."""

import pytest

from benchmarks.buddy import BuddyAllocator
from benchmarks.memory_beams import PagedBeams, read_searches
from benchmarks.memory_policies import Contiguous, Paged, Policy, Request
from benchmarks.memory_simulation import SHAREGPT, IterationTime, simulate, trace

NUM_SLOTS = 15_728


def test_chunks_split_and_join_again():
    buddies = BuddyAllocator(96)
    chunks = [buddies.allocate(30), buddies.allocate(17), buddies.allocate(32)]
    assert sorted(chunk for chunk in chunks if chunk) == [(0, 32), (32, 32), (64, 32)]
    assert buddies.allocate(1) is None
    for chunk in chunks:
        assert chunk is not None
        buddies.free(*chunk)
    assert buddies.num_free == 96
    assert buddies.allocate(64) == (0, 64)


@pytest.mark.parametrize(("reserve", "num_admitted"), [("max", 7), ("pow2", 15), ("oracle", 30)])
def test_what_a_reservation_takes(reserve: str, num_admitted: int):
    """A request of 200 + 300 tokens reserves 2048, 200 + 512 (a chunk of 1024) and 500 (a chunk of 512)."""
    policy = Contiguous(NUM_SLOTS, reserve)
    admitted = 0
    while policy.admit(Request(0.0, 200, 300)):
        admitted += 1
    assert admitted == num_admitted


def test_answers_share_the_full_blocks_of_their_prompt():
    policy, request = Paged(1024, 16), Request(0.0, 40, 100, num_answers=4)
    assert policy.admit(request)
    request.num_generated = 1
    assert policy.grow(request)
    # Two full blocks shared, and a third for each answer: 6 blocks where 12 are named.
    assert policy.manager.stats().used_blocks == 6
    assert policy.saved_by_sharing() == 0.5
    assert policy.shares([request]).token_states == (32 + 4 * 9) / 1024
    policy.release(request)
    assert policy.manager.stats().used_blocks == 0
    assert policy.manager.self_check() == []


def test_beams_share_what_they_have_in_common():
    """Three beams of a prompt of 6, blocks of 4: the first two go on from beam 0, and later all from beam 2."""
    policy = PagedBeams(1024, 4, read_searches(["001 012 012 222 012"]))
    request = Request(0.0, 6, 100, num_answers=3)
    assert policy.admit(request)
    used, saved = [], []
    for request.num_generated in range(1, 7):
        assert policy.grow(request)
        used.append(policy.manager.stats().used_blocks)
        saved.append(policy.saved_by_sharing())
    # Tokens 7 and 8 fill each beam's own second block; 9 begins a third. At 11 all go on from beam 2: they share two
    # blocks, and the third is partly filled, so each has a copy.
    assert used == [4, 4, 7, 7, 5, 5]
    assert saved[:5] == pytest.approx([1 - 4 / 6, 1 - 4 / 6, 1 - 7 / 9, 1 - 7 / 9, 1 - 5 / 9])
    policy.release(request)
    assert policy.manager.stats().used_blocks == 0
    assert policy.manager.self_check() == []


@pytest.mark.parametrize("policy", [Contiguous(NUM_SLOTS, "pow2"), Paged(NUM_SLOTS, 16)], ids=["pow2", "paged"])
def test_every_slot_is_counted_once(policy: Policy):
    result = simulate(trace(SHAREGPT, 60.0, seed=3), policy, IterationTime())
    shares = result.shares
    assert shares.token_states + shares.reservation + shares.internal + shares.external == pytest.approx(1.0)
    assert min(shares.token_states, shares.reservation, shares.internal, shares.external) >= 0
    assert result.finished > 20
