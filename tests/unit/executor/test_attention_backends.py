"""What every attention back end must do, on pools full of NaN and in any layout: one suite over all that run here."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from executor.arena import KvGeometry, LayerGeometry, private_arena
from executor.attention import AttentionBackend, KvViews, LayerAttention
from executor.attention_choice import DEVICES_OF, choose_attention
from executor.kv_codes import quantize
from tests.attention_cases import BLOCK, LENGTHS, as_stored, attend, check, make_rows, reference
from tests.executor_cases import ints

ON_CPU = [name for name, devices in DEVICES_OF.items() if "cpu" in devices]


@pytest.fixture(scope="module", params=ON_CPU)
def backend(request) -> AttentionBackend:
    return choose_attention(request.param, "cpu")


def test_decodes_of_every_length_at_the_block_boundaries(backend):
    """Field failure 30: lengths 1, B-1, B, B+1, 3B+2 on a poisoned pool."""
    check(backend, [(length, 1) for length in LENGTHS])


def test_prefill_of_every_length_at_the_block_boundaries(backend):
    """Field failure 30."""
    check(backend, [(length, length) for length in LENGTHS])


def test_chunks_and_decodes_mixed(backend):
    """Field failure 16: chunks that begin and end anywhere, beside decodes."""
    check(backend, [(1, 1), (9, 1), (9, 3), (20, 7), (5, 5), (13, 1), (30, 2), (8, 4), (70, 30)])


def test_a_single_long_decode(backend):
    """Where a back end divides the KV of one row among programs: here it has reason to."""
    for length in (130, 200):
        check(backend, [(length, 1)])
        check(backend, [(length, 1)], window=150)


@pytest.mark.parametrize("window", [1, 2, BLOCK, BLOCK + 1, 10, 1000])
def test_sliding_windows(backend, window):
    """Field failure 32: the same positions in prefill, decode and chunks."""
    check(
        backend,
        [(length, new) for length in (1, 4, 5, 9, 14, 40) for new in (1, 3, length) if new <= length],
        window=window,
    )


def test_a_window_sees_exactly_its_positions(backend):
    """Field failure 32: V one-hot by position; equal scores give 1/n to each position that is seen."""
    length, window = 11, 3
    (row,) = make_rows([(length, length)], (1, 1), (16, 16))
    row.query.zero_()
    row.v.copy_(torch.eye(16, dtype=torch.float64)[:length, None])
    arena = private_arena(KvGeometry(BLOCK, "float32", (LayerGeometry(1, 16, 16),)), 9)
    layer = LayerAttention(0, scale=1.0, window=window)
    output = attend(backend, [row], arena, layer, np.random.default_rng(0))[:, 0]
    for position in range(length):
        seen = output[position].nonzero().squeeze(1).tolist()
        assert seen == list(range(max(0, position - window + 1), position + 1))


@pytest.mark.parametrize("heads", [(1, 1), (4, 4), (9, 3), (28, 4), (32, 1), (36, 2)])
def test_head_groups(backend, heads):
    """Field failure 31."""
    check(backend, [(7, 1), (14, 6), (5, 5)], heads=heads)


@pytest.mark.parametrize("dims", [(16, 16), (40, 40), (80, 80), (96, 64), (24, 16), (256, 256)])
def test_head_sizes(backend, dims):
    """Field failure 31: any, and V's may differ from K's."""
    check(backend, [(7, 1), (14, 6), (5, 5)], dims=dims)


def test_softcap_and_scale(backend):
    check(backend, [(7, 1), (14, 6)], softcap=1.5, scale=0.7)
    check(backend, [(40, 1), (40, 12)], softcap=0.5, window=9)


def test_any_layout_of_a_block(backend):
    """Nobody assumes the layout: tokens outermost and dimensions apart give the same."""
    num_blocks, num_kv_heads, head_dim = 300, 2, 16

    def view() -> Tensor:
        storage = torch.full((num_blocks, head_dim, BLOCK, 3, num_kv_heads), torch.nan)
        return storage[:, :, :, 1].permute(0, 3, 2, 1)

    arena = private_arena(KvGeometry(BLOCK, "float32", (LayerGeometry(num_kv_heads, head_dim, head_dim),)), num_blocks)
    arena.views = (KvViews(view(), view()),)
    check(backend, [(7, 1), (14, 6), (5, 5)], arena=arena)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_kv_costs_its_rounding_only(backend, dtype):
    rows = make_rows([(9, 1), (14, 6)], (4, 2), (16, 16))
    arena = private_arena(KvGeometry(BLOCK, dtype, (LayerGeometry(2, 16, 16),)), 100)
    layer = LayerAttention(0, scale=0.25)
    output = attend(backend, rows, arena, layer, np.random.default_rng(1))
    expected = torch.cat([reference(row, layer) for row in rows])
    torch.testing.assert_close(output.double(), expected, rtol=0.03, atol=0.03)


def test_int8_kv_is_attended_as_it_is_stored(backend):
    """Every kind of row, window and head size, against float64 over the numbers that codes and scales say."""
    check(backend, [(length, 1) for length in LENGTHS], dtype="int8")
    check(backend, [(9, 1), (9, 3), (20, 7), (5, 5)], heads=(9, 3), dtype="int8")
    check(backend, [(14, 6), (40, 1)], dims=(24, 40), dtype="int8", window=6, softcap=1.5)


def test_int8_kv_in_any_layout_of_a_block(backend):
    num_blocks, num_kv_heads, head_dim = 60, 2, 16

    def view() -> Tensor:
        storage = torch.full((num_blocks, head_dim, BLOCK, 3, num_kv_heads), 99, dtype=torch.int8)
        return storage[:, :, :, 1].permute(0, 3, 2, 1)

    def scale() -> Tensor:
        return torch.full((BLOCK, num_blocks, 3, num_kv_heads), torch.nan)[:, :, 1].permute(1, 2, 0)

    arena = private_arena(KvGeometry(BLOCK, "int8", (LayerGeometry(num_kv_heads, head_dim, head_dim),)), num_blocks)
    arena.views = (KvViews(view(), view(), scale(), scale()),)
    check(backend, [(7, 1), (14, 6), (5, 5)], arena=arena)


def test_every_back_end_writes_the_same_codes_and_scales(backend):
    """Those of `kv_codes`, bit by bit, for heads of every size of number; nothing else of a block is touched."""
    length, dims = 16, (20, 16)
    (row,) = make_rows([(length, length)], (2, 2), dims)
    row.k *= torch.logspace(-30, 30, length, dtype=torch.float64)[:, None, None]
    row.k[3], row.v[5, 1] = 0, torch.full((16,), -2.5)
    arena = private_arena(KvGeometry(BLOCK, "int8", (LayerGeometry(2, *dims),)), 20)
    (views,), before = arena.views, arena.blocks.clone()
    attend(backend, [row], arena, LayerAttention(0, scale=0.25), np.random.default_rng(1))
    (blocks,) = (~views.k_scale.isnan()).all(dim=(1, 2)).nonzero(as_tuple=True)
    assert len(blocks) == length // BLOCK
    found = {}
    for block in blocks.tolist():
        for offset in range(BLOCK):
            found[views.v_scale[block, 0, offset].item()] = (block, offset)
    for position in range(length):
        k_codes, k_scale = quantize(row.k[position], torch.int8)
        v_codes, v_scale = quantize(row.v[position], torch.int8)
        where = found[v_scale[0].item()]
        block, offset = where
        assert torch.equal(views.k[block, :, offset], k_codes)
        assert torch.equal(views.v[block, :, offset], v_codes)
        assert torch.equal(views.k_scale[block, :, offset], k_scale)
        assert torch.equal(views.v_scale[block, :, offset], v_scale)
    others = [block for block in range(20) if block not in blocks.tolist()]
    assert torch.equal(arena.blocks[others], before[others])


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_broken_head_breaks_its_row_and_no_other(backend, bad):
    """Field failure 20: codes have no NaN, so the scale says it, and whoever reads the head sees it."""
    rows = make_rows([(9, 1), (6, 3), (14, 1)], (4, 2), (16, 16))
    rows[1].k[4, 1, 3], rows[1].v[4, 0, 2] = bad, bad  # of the second row's second new token: of its three
    arena = private_arena(KvGeometry(BLOCK, "int8", (LayerGeometry(2, 16, 16),)), 30)
    layer = LayerAttention(0, scale=0.25)
    output = attend(backend, rows, arena, layer, np.random.default_rng(1))
    assert output[[2, 3]].isnan().any(dim=-1).all(), "a head's queries after it did not notice"
    sound = as_stored([rows[0], rows[2]], "int8")
    expected = torch.cat([reference(row, layer) for row in sound])
    torch.testing.assert_close(output[[0, 4]].double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("sources", "targets", "after"),
    [
        ([2], [4], [0, 1, 2, 3, 2, 5]),
        ([2, 2, 3], [4, 5, 1], [0, 3, 2, 3, 2, 2]),
        ([1, 2, 3], [2, 3, 4], [0, 1, 1, 2, 3, 5]),
        ([1, 2, 3, 5], [2, 3, 1, 4], [0, 3, 1, 2, 5, 5]),
    ],
    ids=["one", "shared source", "chain", "cycle"],
)
def test_copies_read_every_source_before_a_target_is_written(backend, sources, targets, after):
    """Field failure 9."""
    arena = private_arena(KvGeometry(BLOCK, "float32", (LayerGeometry(2, 16, 24), LayerGeometry(1, 16, 16))), 6)
    for block in range(6):
        arena.blocks[block] = block
    backend.copy_blocks(arena.blocks, ints(*sources), ints(*targets))
    assert [arena.blocks[block].unique().tolist() for block in range(6)] == [[block] for block in after]


def test_writes_touch_nothing_else(backend):
    """Field failure 30: block 0, other blocks and the rest of the written block keep what they hold."""
    rows = make_rows([(6, 2), (1, 1)], (4, 2), (16, 16))
    arena = private_arena(KvGeometry(BLOCK, "float32", (LayerGeometry(2, 16, 16),)), 20)
    attend(backend, rows, arena, LayerAttention(0, scale=math.sqrt(1 / 16)), np.random.default_rng(1))
    written = ~arena.views[0].k.isnan().all(dim=3)  # [num_blocks, num_kv_heads, block_size]
    assert written.sum().item() == 2 * (6 + 1)
    assert not written[0].any()
