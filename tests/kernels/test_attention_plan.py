"""Tiles and splits: bounds that a launch relies on, and the choices that docs/kernels.md explains."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernels import attention_plan as plan
from kernels.device import A100, B200, H100, MI300X

DECODE_8B = plan.AttentionShape(
    num_tokens=1,
    num_seqs=1,
    num_kv_heads=8,
    group=4,
    head_dim=128,
    v_head_dim=128,
    element_bytes=2,
    kv_bytes=2,
    max_query_len=1,
    max_kv_len=8192,
)


def first_tile_of(query_start: list[int], seq: int, block_q: int) -> int:
    return (query_start[seq] + seq * (block_q - 1)) // block_q


@given(st.lists(st.integers(0, 40), min_size=1, max_size=20), st.sampled_from([1, 2, 3, 7, 16]), st.integers(0, 5))
def test_every_query_token_has_a_tile_of_its_own(query_lens, block_q, padding):
    """Tiles of a sequence lie between its first and the next sequence's, and the grid holds them all."""
    starts = [sum(query_lens[:seq]) for seq in range(len(query_lens) + 1)]
    for seq, query_len in enumerate(query_lens):
        room = first_tile_of(starts, seq + 1, block_q) - first_tile_of(starts, seq, block_q)
        assert room >= -(-query_len // block_q)
    grid = plan.num_query_tiles(starts[-1] + padding, len(query_lens), block_q)
    assert grid >= first_tile_of(starts, len(query_lens), block_q)


def test_a_decode_batch_has_no_empty_tile():
    for block_q in (1, 4, 16):
        assert plan.num_query_tiles(num_tokens=256, num_seqs=256, block_q=block_q) == 256
    assert plan.num_query_tiles(num_tokens=33, num_seqs=1, block_q=16) == 3


shapes = st.builds(
    plan.AttentionShape,
    num_tokens=st.integers(1, 4096),
    num_seqs=st.integers(1, 256),
    num_kv_heads=st.sampled_from([1, 2, 8, 32]),
    group=st.sampled_from([1, 3, 4, 7, 18, 32, 71]),
    head_dim=st.sampled_from([16, 40, 64, 80, 96, 128, 192, 256]),
    v_head_dim=st.sampled_from([16, 64, 128, 256]),
    element_bytes=st.sampled_from([2, 4]),
    kv_bytes=st.sampled_from([1, 2, 4]),
    max_query_len=st.sampled_from([1, 5, 512]),
    max_kv_len=st.integers(1, 200_000),
)


@given(shapes, st.sampled_from([A100, H100, B200, MI300X]))
def test_any_plan_is_launchable(shape, device):
    tile = plan.choose_tile(shape, device)
    assert tile.block_m >= max(tile.block_q * shape.group, 16)
    for size in (tile.block_m, tile.block_n):
        assert size & (size - 1) == 0
    splits = plan.choose_num_splits(shape, tile, device)
    assert 1 <= splits <= plan.MAX_SPLITS
    assert splits & (splits - 1) == 0
    assert splits == 1 or shape.max_kv_len / splits >= tile.block_n


@given(shapes, st.sampled_from([A100, H100, B200, MI300X]), st.integers(1, 200_000))
def test_a_plan_is_a_function_of_shapes_and_bounds(shape, device, other_kv_len):
    """Tiles do not move with the context: only the number of splits may, and only through the bound."""
    longer = dataclasses.replace(shape, max_kv_len=other_kv_len)
    assert plan.choose_tile(longer, device) == plan.choose_tile(shape, device)


def test_decode_is_split_when_the_batch_is_small_and_not_when_it_fills_the_device():
    def splits(num_seqs: int, kv_len: int) -> int:
        shape = dataclasses.replace(DECODE_8B, num_tokens=num_seqs, num_seqs=num_seqs, max_kv_len=kv_len)
        return plan.choose_num_splits(shape, plan.choose_tile(shape, H100), H100)

    assert splits(256, 8192) == 1
    assert splits(17, 8192) == 1  # 136 programs on 132 multiprocessors
    assert splits(1, 8192) == 32  # 256 programs in 264 places
    assert splits(4, 8192) == 8
    assert splits(1, 100) == 1  # nothing to share


def test_a_split_costs_at_most_an_eighth_of_what_it_reads():
    for group in (1, 4, 16):
        shape = dataclasses.replace(DECODE_8B, group=group)
        tokens = plan.min_split_tokens(shape, block_q=1)
        partial = 2 * 4 * 129 * group
        assert partial <= tokens * 256 * 2 / 8 < partial + 256 * 2 / 8


@pytest.mark.parametrize("device", [A100, H100, B200, MI300X], ids=lambda device: device.name)
def test_decode_tiles_leave_room_for_two_programs(device):
    tile = plan.choose_tile(DECODE_8B, device)
    tiles_in_flight = (tile.num_stages - 1) // 2
    needed = 16 * 128 * 2 + tiles_in_flight * tile.block_n * 256 * 2
    assert 2 * needed <= device.shared_memory_bytes


@pytest.mark.parametrize(("device", "num_warps"), [(A100, 8), (H100, 4), (B200, 4), (MI300X, 4)])
def test_a_tile_of_64_rows_has_the_warps_that_hold_it(device, num_warps):
    """Of 128 dimensions: four warps spilled on sm_80, eight on gfx942, where a thread of four has 512 registers."""
    prefill = dataclasses.replace(DECODE_8B, num_tokens=2048, num_seqs=4, max_query_len=512, kv_bytes=1)
    tile = plan.choose_tile(prefill, device)
    assert (tile.block_m, tile.num_warps) == (64, num_warps)
