"""Block copies: as if all sources were read before any target is written."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.block_copy import block_copy, block_copy_launches, split_conflicts
from kernels.reference.block_copy import block_copy as reference_copy


def arena_of(num_blocks: int, block_bytes: int, device: str = "cpu") -> torch.Tensor:
    """Random blocks with 8 bytes of padding between two."""
    generator = torch.Generator().manual_seed(num_blocks)
    arena = torch.randint(256, (num_blocks, block_bytes + 8), dtype=torch.uint8, generator=generator)
    return arena.to(device)[:, :block_bytes]


@pytest.mark.parametrize("block_bytes", [8, 128, 2048 * 8, 2049 * 8, 5000 * 8])
def test_every_byte_of_a_block_is_copied_and_none_beside_it(block_bytes, device):
    arena = arena_of(9, block_bytes, device)
    whole = arena.as_strided((9, arena.stride(0)), (arena.stride(0), 1))
    expected = whole.clone()
    expected[3, :block_bytes] = expected[7, :block_bytes]
    expected[8, :block_bytes] = expected[7, :block_bytes]
    block_copy(arena, [(7, 3), (7, 8)])
    assert torch.equal(whole, expected)


pairs = st.lists(st.tuples(st.integers(1, 5), st.integers(1, 5)), unique_by=lambda pair: pair[1], max_size=5)


@given(pairs)
@settings(max_examples=60, deadline=None)
def test_any_pairs_chains_and_swaps_included(pairs):
    arena = arena_of(6, 64)
    expected = arena.clone()
    reference_copy(expected, pairs)
    block_copy(arena, pairs)
    assert torch.equal(arena, expected)


@given(pairs)
def test_no_launch_writes_what_it_or_a_later_one_reads(pairs):
    safe, conflicting = split_conflicts(pairs)
    sources = {source for source, _ in pairs}
    assert not sources & {target for _, target in safe}
    assert sorted(safe + conflicting) == sorted(pair for pair in pairs if pair[0] != pair[1])


def test_a_plan_of_fresh_targets_is_one_launch():
    launches = block_copy_launches(arena_of(9, 64), [(1, 5), (1, 6), (2, 7), (3, 8)])
    assert [launch.grid for launch in launches] == [(4, 1)]


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        ([(1, 2), (3, 2)], "two copies into one block"),
        ([(1, 2), (2, 2)], "two copies into one block"),
        ([(0, 2)], "block 0 is reserved"),
        ([(1, 0)], "block 0 is reserved"),
        ([(1, 6)], r"must lie in \[1, 6\)"),
        ([(-1, 2)], r"must lie in \[1, 6\)"),
    ],
)
def test_impossible_pairs_change_nothing(pairs, message):
    arena = arena_of(6, 64)
    before = arena.clone()
    with pytest.raises(ValueError, match=message):
        block_copy(arena, pairs)
    assert torch.equal(arena, before)


def test_blocks_that_are_no_whole_words_are_refused():
    with pytest.raises(ValueError, match="multiples of 8"):
        block_copy(torch.zeros(4, 12, dtype=torch.uint8), [(1, 2)])
