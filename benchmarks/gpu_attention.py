"""Paged attention on a GPU beside other implementations, and beside what the machine can do.

Decode is told in GB/s of keys and values read (each once), against the copy bandwidth of the same run; prefill in
TFLOP/s (a causal chunk: half of the square), against the rate of a matrix product. Beside it, on the same numbers:
`sdpa`, torch's attention over keys and values that lie contiguously, without a table (for decodes that flatters it);
`flex`, FlexAttention likewise, compiled; `flashinfer`, over the same blocks, where it can be imported.

    python -m benchmarks.gpu_attention --json benchmarks/results/gpu_attention.json
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.gpu_timing import machine, median_seconds, parse_arguments, write_results
from kernels.paged_attention import paged_attention

BLOCK = 16


@dataclass(frozen=True)
class Shape:
    """A batch of equal rows of one layer."""

    rows: int
    context: int
    new: int = 1  # tokens that each row computes, the last of its context
    heads: tuple[int, int] = (32, 8)
    head_dim: int = 128
    dtype: torch.dtype = torch.bfloat16

    @property
    def name(self) -> str:
        kind = "decode" if self.new == 1 else "prefill"
        return f"{kind} {self.rows} x {self.context}, heads {self.heads[0]}/{self.heads[1]} of {self.head_dim}"

    @property
    def kv_bytes(self) -> int:
        """Keys and values, each once."""
        return 2 * self.rows * self.context * self.heads[1] * self.head_dim * self.dtype.itemsize

    @property
    def operations(self) -> float:
        """Of both products; positions that a token does not see are not counted."""
        seen = self.new * (self.context - self.new) + self.new * (self.new + 1) / 2
        return 4.0 * self.rows * seen * self.heads[0] * self.head_dim


SHAPES = (
    *(Shape(rows, context) for rows, context in ((1, 8192), (1, 65536), (8, 4096), (32, 4096), (256, 2048))),
    Shape(64, 4096, heads=(8, 8)),
    Shape(64, 4096, heads=(64, 8)),
    Shape(256, 2048, head_dim=64),
    *(Shape(rows, length, length) for rows, length in ((1, 2048), (1, 8192), (8, 2048))),
    Shape(4, 8192, 512),
)


@dataclass(frozen=True)
class Data:
    """One layer's numbers, in blocks in random order and, the same ones, in a row."""

    query: Tensor  # [rows * new, heads, head_dim]
    blocks: Tensor  # [num_blocks, 2, kv_heads, BLOCK, head_dim], K and V
    tables: Tensor  # [rows, blocks of a row] int32
    query_start: Tensor  # [rows + 1] int32
    kv_lens: Tensor  # [rows] int32


def make_data(shape: Shape, device: str) -> Data:
    """Random numbers. Block 0 is nobody's."""
    per_row = -(-shape.context // BLOCK)
    num_blocks = shape.rows * per_row + 1
    blocks = torch.randn(num_blocks, 2, shape.heads[1], BLOCK, shape.head_dim, dtype=shape.dtype, device=device)
    tables = (torch.randperm(num_blocks - 1, device=device) + 1).view(shape.rows, per_row).int()
    query = torch.randn(shape.rows * shape.new, shape.heads[0], shape.head_dim, dtype=shape.dtype, device=device)
    starts = torch.arange(shape.rows + 1, dtype=torch.int32, device=device) * shape.new
    return Data(query, blocks, tables, starts, torch.full_like(starts[1:], shape.context))


def gathered(shape: Shape, data: Data) -> tuple[Tensor, Tensor, Tensor]:
    """Query, K and V of each row: [rows, heads, tokens, head_dim]."""
    in_order = data.blocks[data.tables.long()].permute(2, 0, 3, 1, 4, 5).flatten(3, 4)  # [2, rows, heads, tokens, dim]
    keys, values = (part[:, :, : shape.context].contiguous() for part in in_order)
    query = data.query.view(shape.rows, shape.new, *data.query.shape[1:]).transpose(1, 2).contiguous()
    return query, keys, values


def octavo(shape: Shape, data: Data, out: Tensor) -> Callable[[], object]:
    """The kernels of this project."""
    return partial(
        paged_attention,
        out,
        query=data.query,
        k_cache=data.blocks[:, 0],
        v_cache=data.blocks[:, 1],
        block_tables=data.tables,
        query_start=data.query_start,
        kv_lens=data.kv_lens,
        softmax_scale=shape.head_dim**-0.5,
        max_query_len=shape.new,
        max_kv_len=shape.context,
    )


def _sdpa(shape: Shape, data: Data) -> Callable[[], object]:
    query, keys, values = gathered(shape, data)
    if shape.new not in (1, shape.context):
        raise ValueError("it has no mask for a chunk at the end of a context but one of its size")
    return lambda: scaled_dot_product_attention(query, keys, values, is_causal=shape.new > 1, enable_gqa=True)


def _flex(shape: Shape, data: Data) -> Callable[[], object]:
    module = importlib.import_module("torch.nn.attention.flex_attention")
    query, keys, values = gathered(shape, data)
    before = shape.context - shape.new
    mask = None
    if shape.new > 1:
        mask = module.create_block_mask(
            lambda batch, head, q, kv: q + before >= kv, None, None, shape.new, shape.context, device=query.device.type
        )
    attend = torch.compile(module.flex_attention, dynamic=False)
    return lambda: attend(query, keys, values, block_mask=mask, enable_gqa=True)


def _flashinfer(shape: Shape, data: Data) -> Callable[[], object]:
    flashinfer = importlib.import_module("flashinfer")
    workspace = torch.empty(256 << 20, dtype=torch.uint8, device=data.query.device)
    indices = data.tables.flatten()
    indptr = torch.arange(shape.rows + 1, dtype=torch.int32) * data.tables.shape[1]
    last = torch.full((shape.rows,), (shape.context - 1) % BLOCK + 1, dtype=torch.int32)
    if shape.new == 1:
        decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "HND", use_tensor_cores=True)
        decode.plan(indptr, indices, last, *shape.heads, shape.head_dim, BLOCK, q_data_type=shape.dtype)
        return lambda: decode.run(data.query, data.blocks)
    prefill = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "HND")
    starts = data.query_start.cpu()
    prefill.plan(
        starts, indptr, indices, last, *shape.heads, shape.head_dim, BLOCK, causal=True, q_data_type=shape.dtype
    )
    return lambda: prefill.run(data.query, data.blocks)


OTHERS: dict[str, Callable[[Shape, Data], Callable[[], object]]] = {
    "sdpa": _sdpa,
    "flex": _flex,
    "flashinfer": _flashinfer,
}


def difference(shape: Shape, data: Data, found: Tensor) -> float:
    """Norm of the error of the first and the last row over the norm of the answer, which is computed in float64."""
    query, keys, values = (each[[0, -1]].double() for each in gathered(shape, data))
    positions = torch.arange(shape.context, device=query.device)
    visible = positions <= positions[-shape.new :, None]
    right = scaled_dot_product_attention(query, keys, values, attn_mask=visible, enable_gqa=True)
    mine = found.view(shape.rows, shape.new, *found.shape[1:])[[0, -1]].transpose(1, 2).double()
    return float((mine - right).norm() / right.norm())


# FlexAttention is compiled for each shape, which takes longer than all the rest.
FLEX_SHAPES = (Shape(32, 4096), Shape(256, 2048), Shape(1, 8192, 8192))


def measure(shape: Shape, device: str) -> dict[str, Any]:
    """Seconds by implementation, the error, and what the shape must read and compute."""
    data = make_data(shape, device)
    out = torch.full_like(data.query, torch.nan)
    work = octavo(shape, data, out)
    work()
    error = difference(shape, data, out)
    seconds: dict[str, float | str] = {"octavo": median_seconds(work)}
    for name in OTHERS:
        if name == "flex" and shape not in FLEX_SHAPES:
            seconds[name] = "not tried on this shape"
            continue
        try:
            seconds[name] = median_seconds(OTHERS[name](shape, data))
        except Exception as why:  # whatever it is, it is that implementation's and is told
            seconds[name] = f"{type(why).__name__}: {why}"[:200]
    return {
        "shape": shape.name,
        "kv_bytes": shape.kv_bytes,
        "operations": shape.operations,
        "error": error,
        "seconds": seconds,
    }


def line_of(row: dict[str, Any], limits: dict[str, Any]) -> str:
    """One line of the table: each implementation's rate, and octavo's as a share of the limit."""
    decode = row["shape"].startswith("decode")
    amount, unit, limit = (
        (row["kv_bytes"] / 1e9, "GB/s", limits["copy_gb_s"])
        if decode
        else (row["operations"] / 1e12, "TFLOP/s", limits["matrix_tflop_s"])
    )
    rates = {
        name: f"{amount / seconds:8.1f}" if isinstance(seconds, float) else f"{'-':>8}"
        for name, seconds in row["seconds"].items()
    }
    share = amount / row["seconds"]["octavo"] / limit
    return (
        f"{row['shape']:50s} {' '.join(rates.values())} {unit:8s} {share:6.1%} of the limit, error {row['error']:.1e}"
    )


def main(argv: list[str] | None = None) -> int:
    arguments = parse_arguments(__doc__ or "", argv)
    limits = machine(arguments.device)
    print(f"{limits['device']}: copy {limits['copy_gb_s']:.0f} GB/s, bf16 {limits['matrix_tflop_s']:.0f} TFLOP/s")
    print(f"{'':50s} {' '.join(f'{name:>8s}' for name in ('octavo', *OTHERS))}")
    rows = []
    for shape in SHAPES:
        rows.append(measure(shape, arguments.device))
        print(line_of(rows[-1], limits), flush=True)
    if arguments.json:
        write_results(arguments.json, {"machine": limits, "attention": rows})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
