"""Copy whole blocks of the arena, many (source, target) pairs at once: copy-on-write of forked sequences.

A block is one contiguous extent of bytes over all layers, K, V and scales, so a copy needs no layout.

Guarantee: all sources are read before any target is overwritten, whatever the pairs (chains 1->2->3, swaps). Programs
of one launch run in any order, so this is arranged on the host, where the pairs come from: a target that is also a
source of another pair is copied through scratch memory instead. In a plan of a block manager targets are fresh
blocks, no target is a source, and all pairs go in one launch without scratch:

    launch 1   arena -> arena     pairs whose target nobody reads
    launch 2   arena -> scratch   the other pairs, if any
    launch 3   scratch -> arena   the same

Launches of a stream are ordered; 1 and 2 write nothing that anyone still reads. Grid: (num_pairs, ceil(block words /
WORDS)); each word is read once and written once.
"""

# ruff: noqa: N803
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from kernels.device import device_properties
from kernels.launch import Launch, cdiv, run_all
from kernels.view import Matrix

WORDS = 2048  # 8-byte words that a program copies


@triton.jit
def block_copy_kernel(target, source, target_ids, source_ids, num_words, WORDS: tl.constexpr):
    """target, source: Matrix [num_blocks, num_words] int64; ids: [num_pairs] int64"""
    pair = tl.program_id(0)
    target_id = tl.load(target_ids + pair)  # int64: a block id times a block's extent passes 2^31
    source_id = tl.load(source_ids + pair)
    words = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    live = words < num_words
    values = tl.load(source.ptr + source_id * source.stride_row + words, mask=live)
    tl.store(target.ptr + target_id * target.stride_row + words, values, mask=live)


def split_conflicts(pairs: Sequence[tuple[int, int]]) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """(source, target) pairs -> (pairs safe to copy at once, pairs whose target is a source of some pair)

    A pair onto itself is dropped. ValueError for two pairs with one target.
    """
    moves = [(source, target) for source, target in pairs if source != target]
    targets = [target for _, target in pairs]
    if len(set(targets)) != len(targets):
        raise ValueError(f"two copies into one block: targets {targets}")
    sources = {source for source, _ in pairs}
    safe = [pair for pair in moves if pair[1] not in sources]
    conflicting = [pair for pair in moves if pair[1] in sources]
    return safe, conflicting


def block_copy_launches(arena: torch.Tensor, pairs: Sequence[tuple[int, int]]) -> list[Launch]:
    if arena.ndim != 2 or arena.dtype != torch.uint8 or arena.stride(1) != 1:
        raise ValueError("arena must be [num_blocks, block_bytes] uint8 with contiguous blocks")
    if arena.shape[1] % 8 or arena.stride(0) % 8:
        raise ValueError(f"blocks of {arena.shape[1]} bytes, {arena.stride(0)} apart: both must be multiples of 8")
    if any(not 0 < block < arena.shape[0] for pair in pairs for block in pair):
        raise ValueError(f"block ids must lie in [1, {arena.shape[0]}); block 0 is reserved: {list(pairs)}")
    safe, conflicting = split_conflicts(pairs)
    words = arena.view(torch.int64)
    launches = []
    if safe:
        launches.append(_launch(words, words, safe))
    if conflicting:
        scratch = torch.empty(len(conflicting), words.shape[1], dtype=torch.int64, device=arena.device)
        rows = range(len(conflicting))
        launches.append(
            _launch(scratch, words, [(source, row) for row, (source, _) in zip(rows, conflicting, strict=True)])
        )
        launches.append(
            _launch(words, scratch, [(row, target) for row, (_, target) in zip(rows, conflicting, strict=True)])
        )
    return launches


def _launch(target: torch.Tensor, source: torch.Tensor, pairs: list[tuple[int, int]]) -> Launch:
    ids = torch.tensor(pairs, dtype=torch.int64).t().contiguous().to(target.device, non_blocking=True)
    num_words = target.shape[1]
    args = {
        "target": Matrix(target, target.stride(0), 1),
        "source": Matrix(source, source.stride(0), 1),
        "target_ids": ids[1],
        "source_ids": ids[0],
        "num_words": num_words,
        "WORDS": WORDS,
    }
    return Launch(block_copy_kernel, (len(pairs), cdiv(num_words, WORDS)), args, num_warps=4, num_stages=1)


def block_copy(arena: torch.Tensor, pairs: Sequence[tuple[int, int]]) -> None:
    """Copy block `source` over block `target` for each (source, target), as if all were read first.

    arena: [num_blocks, block_bytes] uint8, blocks contiguous, extent and stride multiples of 8. Raises ValueError for
    ids out of range, the reserved block 0, and two copies into one block; then nothing is copied.
    """
    device_properties(arena.device)
    run_all(block_copy_launches(arena, pairs))
