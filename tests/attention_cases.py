"""Paged attention of the executor's back ends against float64, for any back end: rows, arenas, the answer.

The arena is full of NaN wherever a back end has no business reading.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from executor.arena import KV_DTYPES, Arena, KvGeometry, LayerGeometry, private_arena
from executor.attention import AttentionBackend, LayerAttention
from executor.batch import AttentionBatch
from executor.kv_codes import dequantize, quantize

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


def attend(
    backend: AttentionBackend, rows: list[Row], arena: Arena, layer: LayerAttention, order: np.random.Generator
) -> Tensor:
    """Through a back end: old K and V are in the blocks, everything else there is NaN."""
    views = arena.views[0]
    free = (1 + order.permutation(arena.num_blocks - 1)).tolist()
    tables = [[free.pop() for _ in range(-(-row.length // BLOCK))] for row in rows]
    for row, table in zip(rows, tables, strict=True):
        for position in range(row.length - row.num_new):
            block, offset = table[position // BLOCK], position % BLOCK
            for view, scale, heads in ((views.k, views.k_scale, row.k), (views.v, views.v_scale, row.v)):
                if scale is None:
                    view[block, :, offset] = heads[position].float()
                else:
                    view[block, :, offset], scale[block, :, offset] = quantize(heads[position], view.dtype)
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
    return backend.prepare(batch, arena.views).attend(layer, *(part.float() for part in parts))


def as_stored(rows: list[Row], dtype: str) -> list[Row]:
    """The rows with K and V as a block of `dtype` has them: what a back end is to attend to."""

    def stored(heads: Tensor) -> Tensor:
        if dtype in ("int8", "float8_e4m3fn"):
            return dequantize(*quantize(heads, KV_DTYPES[dtype])).double()
        return heads.to(KV_DTYPES[dtype]).double()

    return [Row(stored(row.k), stored(row.v), row.query) for row in rows]


def check(
    backend: AttentionBackend,
    shapes: list[tuple[int, int]],
    heads: tuple[int, int] = (4, 2),
    dims: tuple[int, int] = (16, 16),
    arena: Arena | None = None,
    dtype: str = "float32",
    **layer: Any,
) -> None:
    """shapes: (length, num_new) of each row; layer: fields of `LayerAttention`."""
    rows = make_rows(shapes, heads, dims)
    if arena is None:
        arena = private_arena(KvGeometry(BLOCK, dtype, (LayerGeometry(heads[1], *dims),)), 2000)
    attention = LayerAttention(0, **({"scale": dims[0] ** -0.5} | layer))
    output = attend(backend, rows, arena, attention, np.random.default_rng(1))
    expected = torch.cat([reference(row, attention) for row in as_stored(rows, arena.geometry.dtype)])
    torch.testing.assert_close(output.double(), expected, rtol=1e-4, atol=1e-5)
