"""The torch back end against attention in float64, on pools full of NaN and in any layout."""

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from executor import attention_torch
from executor.arena import Arena, KvGeometry, LayerGeometry, private_arena
from executor.attention import KvViews, LayerAttention
from executor.attention_torch import TorchAttention
from executor.batch import AttentionBatch

BLOCK = 4
LENGTHS = (1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 2)


@dataclass
class Row:
    """One sequence: all of its K and V, and how many of its last tokens are new."""

    k: Tensor  # [length, num_kv_heads, head_dim] float64
    v: Tensor
    query: Tensor  # [num_new, num_heads, head_dim] float64

    @property
    def length(self) -> int:
        return len(self.k)

    @property
    def num_new(self) -> int:
        return len(self.query)


def make_rows(shapes: list[tuple[int, int]], heads: tuple[int, int], dims: tuple[int, int], seed: int = 0) -> list[Row]:
    """shapes: (length, num_new)."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    (num_heads, num_kv_heads), (k_dim, v_dim) = heads, dims
    return [
        Row(random(length, num_kv_heads, k_dim), random(length, num_kv_heads, v_dim), random(num_new, num_heads, k_dim))
        for length, num_new in shapes
    ]


def reference(row: Row, layer: LayerAttention) -> Tensor:
    """[num_new, num_heads, v_head_dim] float64, one query and one head at a time."""
    group = row.query.shape[1] // row.k.shape[1]
    output = row.query.new_zeros(*row.query.shape[:2], row.v.shape[2])
    for index in range(row.num_new):
        position = row.length - row.num_new + index
        first = 0 if layer.window is None else max(0, position - layer.window + 1)
        for head in range(row.query.shape[1]):
            keys, values = row.k[first : position + 1, head // group], row.v[first : position + 1, head // group]
            scores = keys @ row.query[index, head] * layer.scale
            if layer.softcap is not None:
                scores = layer.softcap * torch.tanh(scores / layer.softcap)
            output[index, head] = scores.softmax(0) @ values
    return output


def attend(rows: list[Row], arena: Arena, layer: LayerAttention, order: np.random.Generator) -> Tensor:
    """Through the back end: old K and V are in the blocks, everything else there is NaN."""
    views = arena.views[0]
    free = (1 + order.permutation(arena.num_blocks - 1)).tolist()
    tables = [[free.pop() for _ in range(-(-row.length // BLOCK))] for row in rows]
    for row, table in zip(rows, tables, strict=True):
        for position in range(row.length - row.num_new):
            block, offset = table[position // BLOCK], position % BLOCK
            views.k[block, :, offset], views.v[block, :, offset] = row.k[position].float(), row.v[position].float()
    new = [range(row.length - row.num_new, row.length) for row in rows]
    width = max(map(len, tables))
    batch = AttentionBatch(
        query_starts=torch.tensor([0, *np.cumsum([row.num_new for row in rows])]),
        context_lengths=torch.tensor([row.length for row in rows]),
        tables=torch.tensor([table + [0] * (width - len(table)) for table in tables], dtype=torch.int32),
        write_blocks=torch.tensor([table[p // BLOCK] for table, ps in zip(tables, new, strict=True) for p in ps]),
        write_offsets=torch.tensor([p % BLOCK for ps in new for p in ps]),
    )
    parts = (
        torch.cat([row.query for row in rows]),
        *(torch.cat([getattr(r, n)[-r.num_new :] for r in rows]) for n in "kv"),
    )
    return TorchAttention().prepare(batch, arena.views).attend(layer, *(part.float() for part in parts))


def check(shapes: list[tuple[int, int]], heads=(4, 2), dims=(16, 16), arena: Arena | None = None, **layer) -> None:
    rows = make_rows(shapes, heads, dims)
    if arena is None:
        arena = private_arena(KvGeometry(BLOCK, "float32", (LayerGeometry(heads[1], *dims),)), 2000)
    attention = LayerAttention(0, **({"scale": dims[0] ** -0.5} | layer))
    output = attend(rows, arena, attention, np.random.default_rng(1))
    expected = torch.cat([reference(row, attention) for row in rows])
    torch.testing.assert_close(output.double(), expected, rtol=1e-4, atol=1e-5)


def test_decodes_of_every_length_at_the_block_boundaries():
    """Field failure 30: lengths 1, B-1, B, B+1, 3B+2 on a poisoned pool."""
    check([(length, 1) for length in LENGTHS])


def test_prefill_of_every_length_at_the_block_boundaries():
    """Field failure 30."""
    check([(length, length) for length in LENGTHS])


def test_chunks_and_decodes_mixed():
    """Field failure 16: chunks that begin and end anywhere, beside decodes."""
    check([(1, 1), (9, 1), (9, 3), (20, 7), (5, 5), (13, 1), (30, 2), (8, 4), (300, 290), (257, 129)])


@pytest.mark.parametrize("window", [1, 2, BLOCK, BLOCK + 1, 10, 1000])
def test_sliding_windows(window):
    """Field failure 32: the same positions in prefill, decode and chunks."""
    check([(length, new) for length in (1, 4, 5, 9, 14, 40) for new in (1, 3, length) if new <= length], window=window)


def test_a_window_sees_exactly_its_positions():
    """Field failure 32: V one-hot by position; equal scores give 1/n to each position that is seen."""
    length, window = 11, 3
    (row,) = make_rows([(length, length)], (1, 1), (16, 16))
    row.query.zero_()
    row.v.copy_(torch.eye(16, dtype=torch.float64)[:length, None])
    arena = private_arena(KvGeometry(BLOCK, "float32", (LayerGeometry(1, 16, 16),)), 9)
    layer = LayerAttention(0, scale=1.0, window=window)
    output = attend([row], arena, layer, np.random.default_rng(0))[:, 0]
    for position in range(length):
        seen = output[position].nonzero().squeeze(1).tolist()
        assert seen == list(range(max(0, position - window + 1), position + 1))


@pytest.mark.parametrize("heads", [(1, 1), (4, 4), (9, 3), (28, 4), (32, 1), (36, 2)])
def test_head_groups(heads):
    """Field failure 31."""
    check([(7, 1), (14, 6), (5, 5)], heads=heads)


@pytest.mark.parametrize("dims", [(16, 16), (40, 40), (80, 80), (96, 64), (24, 16), (256, 256)])
def test_head_sizes(dims):
    """Field failure 31: any, and V's may differ from K's."""
    check([(7, 1), (14, 6), (5, 5)], dims=dims)


def test_softcap_and_scale():
    check([(7, 1), (14, 6)], softcap=1.5, scale=0.7)
    check([(40, 1), (40, 12)], softcap=0.5, window=9)


def test_pieces_longer_than_one_are_cut():
    """The cut of a long chunk changes nothing: pieces of 3 queries."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention_torch, "_MAX_PIECE_TOKENS", 3)
        check([(20, 20), (17, 10), (9, 1)])
        check([(20, 20), (17, 10), (9, 1)], window=5)


def test_any_layout_of_a_block():
    """Nobody assumes the layout: tokens outermost and dimensions apart give the same."""
    num_blocks, num_kv_heads, head_dim = 300, 2, 16

    def view() -> Tensor:
        storage = torch.full((num_blocks, head_dim, BLOCK, 3, num_kv_heads), torch.nan)
        return storage[:, :, :, 1].permute(0, 3, 2, 1)

    arena = private_arena(KvGeometry(BLOCK, "float32", (LayerGeometry(num_kv_heads, head_dim, head_dim),)), num_blocks)
    arena.views = (KvViews(view(), view()),)
    check([(7, 1), (14, 6), (5, 5)], arena=arena)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_kv_costs_its_rounding_only(dtype):
    rows = make_rows([(9, 1), (14, 6)], (4, 2), (16, 16))
    arena = private_arena(KvGeometry(BLOCK, dtype, (LayerGeometry(2, 16, 16),)), 100)
    layer = LayerAttention(0, scale=0.25)
    output = attend(rows, arena, layer, np.random.default_rng(1))
    expected = torch.cat([reference(row, layer) for row in rows])
    torch.testing.assert_close(output.double(), expected, rtol=0.03, atol=0.03)


def test_writes_touch_nothing_else():
    """Field failure 30: block 0, other blocks and the rest of the written block keep what they hold."""
    rows = make_rows([(6, 2), (1, 1)], (4, 2), (16, 16))
    arena = private_arena(KvGeometry(BLOCK, "float32", (LayerGeometry(2, 16, 16),)), 20)
    attend(rows, arena, LayerAttention(0, scale=math.sqrt(1 / 16)), np.random.default_rng(1))
    written = ~arena.views[0].k.isnan().all(dim=3)  # [num_blocks, num_kv_heads, block_size]
    assert written.sum().item() == 2 * (6 + 1)
    assert not written[0].any()
