"""What the C++ attention promises beyond the answer: a row's bits do not depend on its batch, chunk or threads."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from executor.arena import Arena, KvGeometry, LayerGeometry, private_arena
from executor.attention import AttentionBackend, LayerAttention
from executor.attention_choice import choose_attention
from executor.batch import AttentionBatch

BLOCK, HEADS, KV_HEADS, DIM = 16, 9, 3, 64
NUM_BLOCKS = 120


@pytest.fixture(scope="module")
def backend() -> AttentionBackend:
    return choose_attention("cpu", "cpu")


@pytest.fixture(params=[1, 2])
def threads(request) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def new_arena(dtype: str) -> Arena:
    return private_arena(KvGeometry(BLOCK, dtype, (LayerGeometry(KV_HEADS, DIM, DIM),)), NUM_BLOCKS)


def run(
    backend: AttentionBackend, arena: Arena, rows: list[tuple[int, int, int]], tensors: tuple[Tensor, ...], window: int
) -> list[Tensor]:
    """rows: (sequence, first position, count). tensors: by sequence and position. Returns each row's output."""
    tables = np.random.default_rng(5).permutation(NUM_BLOCKS - 1)[:114].reshape(3, -1) + 1
    at = [(sequence, position) for sequence, first, count in rows for position in range(first, first + count)]
    batch = AttentionBatch(
        query_starts=torch.tensor([0, *np.cumsum([count for *_, count in rows])]),
        context_lengths=torch.tensor([first + count for _, first, count in rows]),
        tables=torch.from_numpy(tables[[sequence for sequence, *_ in rows]].astype(np.int32)),
        write_blocks=torch.tensor([tables[sequence, position // BLOCK] for sequence, position in at]),
        write_offsets=torch.tensor([position % BLOCK for _, position in at]),
    )
    parts = [torch.stack([tensor[where] for where in at]) for tensor in tensors]
    layer = LayerAttention(0, scale=DIM**-0.5, window=window or None, softcap=None)
    output = backend.prepare(batch, arena.views).attend(layer, *parts)
    return list(output.split([count for *_, count in rows]))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("window", [0, 100])
def test_a_rows_bits_depend_neither_on_its_batch_nor_on_its_chunks(backend, threads, dtype, window):
    """Lengths on both sides of the place where a long row is divided among threads."""
    length = 600
    generator = torch.Generator().manual_seed(0)
    tensors = tuple(torch.randn((3, length, heads, DIM), generator=generator) for heads in (HEADS, KV_HEADS, KV_HEADS))
    (whole,) = run(backend, new_arena(dtype), [(1, 0, length)], tensors, window)
    arena, pieces, at = new_arena(dtype), [], 0
    for count in (1, 7, 16, 33, 300, 160, 1, 1, 81):
        beside = [(0, at // 2, min(count, 5)), (2, 0, 20)]
        pieces.append(run(backend, arena, [beside[0], (1, at, count), beside[1]], tensors, window)[1])
        at += count
    assert at == length
    assert torch.equal(torch.cat(pieces), whole)
    (alone,) = run(backend, arena, [(1, length - 1, 1)], tensors, window)
    assert torch.equal(alone, whole[-1:])
