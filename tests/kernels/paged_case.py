"""Random paged-attention calls over poisoned pools, and the fp64 answer to them.

Whatever a kernel has no business reading is NaN: blocks nobody owns, positions past a sequence's end, blocks before
every window, table entries past the last block (they name a poisoned block). The output starts as NaN too.
"""

import random
from dataclasses import dataclass, field
from typing import Any

import torch

from kernels.paged_attention import paged_attention
from kernels.reference.paged_attention import paged_attention as reference_attention
from kernels.reference.rotary_kv_write import quantize

TOLERANCE = {torch.float32: 3e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
ORDERS = ("ascending", "descending", "shuffled", "shared")


@dataclass(frozen=True)
class Case:
    """One batch: (query_len, kv_len) of each sequence, and everything else a call is made of."""

    lengths: list[tuple[int, int]]
    dtype: torch.dtype = torch.float32
    kv_dtype: torch.dtype | None = None  # None: dtype
    heads: tuple[int, int] = (4, 2)
    head_dim: int = 16
    v_head_dim: int | None = None  # None: head_dim
    block_size: int = 16
    order: str = "shuffled"
    features: dict[str, Any] = field(default_factory=dict)  # sliding_window, softcap, alibi
    num_splits: int | None = 1
    padding_tokens: int = 0  # past the last sequence's
    seed: int = 0


def boundary_lengths(block_size: int) -> list[int]:
    """Around the edges of a block."""
    return [1, block_size - 1, block_size, block_size + 1, 3 * block_size + 2]


def batch_of(kind: str, block_size: int) -> list[tuple[int, int]]:
    """-> (query_len, kv_len) of each sequence. The interpreter takes some 10 ms a tile: few tokens, all edges."""
    if kind == "decode":
        return [(1, length) for length in boundary_lengths(block_size)] + [(1, 0)]
    if kind == "prefill":  # prompts around the edge of an 8-token block
        return [(7, 7), (1, 1), (9, 9), (8, 8)]
    if kind == "mixed":
        return [(1, block_size + 1), (7, block_size), (0, 0), (3, 2 * block_size + 2), (1, 0)]
    raise ValueError(kind)


def block_tables(case: Case) -> tuple[torch.Tensor, int, int]:
    """-> ([num_seqs, max_blocks] int32, number of blocks, id of a block that nobody owns)"""
    counts = [-(-kv_len // case.block_size) for _, kv_len in case.lengths]
    num_blocks = sum(counts) + 3
    ids = list(range(2, num_blocks))
    if case.order == "descending":
        ids.reverse()
    elif case.order == "shuffled":
        random.Random(case.seed).shuffle(ids)
    tables = torch.ones(len(counts), max([*counts, 1]) + 1, dtype=torch.int32)  # block 1 is poison
    for seq, count in enumerate(counts):
        for index in range(count):
            tables[seq, index] = ids.pop(0)
    if case.order == "shared":
        _share_full_blocks(case, tables)
    return tables, num_blocks, 1


def _share_full_blocks(case: Case, tables: torch.Tensor) -> None:
    """Every sequence takes the leading full blocks of the longest."""
    longest = max(range(len(case.lengths)), key=lambda seq: case.lengths[seq][1])
    for seq, (_, kv_len) in enumerate(case.lengths):
        full = kv_len // case.block_size
        tables[seq, :full] = tables[longest, :full]


def fill_cache(case: Case, tables: torch.Tensor, num_blocks: int, dim: int, generator: torch.Generator):
    """-> (cache [num_blocks, num_kv_heads, block_size, dim], scale or None); NaN wherever nobody may read"""
    shape = (num_blocks, case.heads[1], case.block_size, dim)
    values = torch.randn(shape, generator=generator)
    live = torch.zeros(num_blocks, case.block_size, dtype=torch.bool)
    window = case.features.get("sliding_window", 0)
    for seq, (query_len, kv_len) in enumerate(case.lengths):
        low = max(kv_len - query_len - window + 1, 0) if window else 0
        position = torch.arange(low, kv_len)
        live[tables[seq].long()[position // case.block_size], position % case.block_size] = True
    dead = ~live[:, None, :].expand(shape[:3])
    kv_dtype = case.kv_dtype or case.dtype
    # not contiguous, as in a block-major arena: K and V of two layers between one block and the next
    arena = torch.zeros(num_blocks, 3, *shape[1:], dtype=torch.float32).to(kv_dtype)
    cache = arena[:, 1]
    if kv_dtype == case.dtype:
        cache.copy_(values.masked_fill(dead[..., None], float("nan")))
        return cache, None
    codes, scale = quantize(values, kv_dtype)
    poison = torch.tensor(float("nan")).to(kv_dtype) if kv_dtype.is_floating_point else torch.tensor(127).to(kv_dtype)
    cache.view(torch.uint8)[:] = torch.where(
        dead[..., None], poison.view(torch.uint8), codes.contiguous().view(torch.uint8)
    )
    return cache, scale.masked_fill(dead, float("nan"))


def build(case: Case, device: str = "cpu") -> dict[str, Any]:
    """Arguments of the reference; `run` adds what only the kernel wants."""
    generator = torch.Generator().manual_seed(case.seed)
    tables, num_blocks, _ = block_tables(case)
    v_head_dim = case.v_head_dim or case.head_dim
    k_cache, k_scale = fill_cache(case, tables, num_blocks, case.head_dim, generator)
    v_cache, v_scale = fill_cache(case, tables, num_blocks, v_head_dim, generator)
    query_start = torch.tensor([0, *(query_len for query_len, _ in case.lengths)]).cumsum(0).int()
    window = case.features.get("sliding_window", 0)
    for seq, (query_len, kv_len) in enumerate(case.lengths):  # blocks before every window were given away
        low = max(kv_len - query_len - window + 1, 0) if window else 0
        tables[seq, : low // case.block_size] = 1
    num_tokens = int(query_start[-1]) + case.padding_tokens
    arguments = {
        "query": torch.randn(num_tokens, case.heads[0], case.head_dim, generator=generator).to(case.dtype),
        "k_cache": k_cache,
        "v_cache": v_cache,
        "block_tables": tables,
        "query_start": query_start,
        "kv_lens": torch.tensor([kv_len for _, kv_len in case.lengths], dtype=torch.int32),
        "softmax_scale": case.head_dim**-0.5,
        "k_scale": k_scale,
        "v_scale": v_scale,
        "sliding_window": window,
        "softcap": case.features.get("softcap", 0.0),
        "alibi_slopes": torch.logspace(-2, 0, case.heads[0]) if case.features.get("alibi") else None,
    }
    return {name: value.to(device) if torch.is_tensor(value) else value for name, value in arguments.items()}


def run(case: Case, arguments: dict[str, Any]) -> torch.Tensor:
    """-> the kernel's output, NaN where it wrote nothing"""
    query = arguments["query"]
    out = torch.full((*query.shape[:2], arguments["v_cache"].shape[3]), float("nan"), dtype=query.dtype).to(
        query.device
    )
    return paged_attention(
        out,
        **arguments,
        max_query_len=max(query_len for query_len, _ in case.lengths),
        max_kv_len=max(max(kv_len for _, kv_len in case.lengths), 1),
        num_splits=case.num_splits,
    )


def check(case: Case, device: str = "cpu") -> None:
    """The kernel equals the reference on every token of a sequence and touches no other."""
    arguments = build(case, device)
    out = run(case, arguments)
    expected = reference_attention(**arguments)
    num_live = int(arguments["query_start"][-1])
    assert out[num_live:].isnan().all(), "tokens of no sequence were written"
    assert not out[:num_live].isnan().any(), "poison reached a live row"
    tolerance = TOLERANCE[case.dtype]
    torch.testing.assert_close(out[:num_live].double(), expected[:num_live], atol=tolerance, rtol=tolerance)
