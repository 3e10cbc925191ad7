"""RMSNorm, alone and with the residual addition before it (Zhang & Sennrich 2019, equation 4).

    rms_norm:      out = x / sqrt(mean(x^2) + eps) * (weight + weight_offset)
    add_rms_norm:  residual += x;  out = rms_norm(residual)

A row stays in registers between the sum of squares and the product: every element is read once and written once.
Computed in fp32 and rounded once; the residual is rounded to its dtype first and the norm is taken of what was
stored, as modeling code does in two steps. Grid: (num_rows,).
"""

# ruff: noqa: N803
import torch
import triton
import triton.language as tl

from kernels.device import device_properties
from kernels.launch import Launch, next_power_of_2
from kernels.numeric import cast_to, to_fp32
from kernels.view import matrix

MAX_COLUMNS = 16384  # that one program keeps in registers


@triton.jit
def normalize(x, weight, columns, num_columns, eps, weight_offset, live):
    """x [BLOCK] fp32, zero outside -> normalized and weighted, fp32"""
    mean_square = tl.sum(x * x, axis=0) / num_columns
    scale = to_fp32(tl.load(weight + columns, mask=live, other=0.0)) + weight_offset
    return x * tl.rsqrt(mean_square + eps) * scale


@triton.jit
def rms_norm_kernel(out, x, weight, eps, weight_offset, num_columns, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    live = columns < num_columns
    values = to_fp32(tl.load(x.ptr + row * x.stride_row + columns * x.stride_col, mask=live, other=0.0))
    result = cast_to(
        normalize(values, weight, columns, num_columns, eps, weight_offset, live), out.ptr.dtype.element_ty
    )
    tl.store(out.ptr + row * out.stride_row + columns * out.stride_col, result, mask=live)


@triton.jit
def add_rms_norm_kernel(out, residual, x, weight, eps, weight_offset, num_columns, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    live = columns < num_columns
    residual_row = residual.ptr + row * residual.stride_row + columns * residual.stride_col
    total = to_fp32(tl.load(x.ptr + row * x.stride_row + columns * x.stride_col, mask=live, other=0.0))
    total += to_fp32(tl.load(residual_row, mask=live, other=0.0))
    stored = cast_to(total, residual.ptr.dtype.element_ty)
    tl.store(residual_row, stored, mask=live)
    total = to_fp32(stored)
    result = cast_to(normalize(total, weight, columns, num_columns, eps, weight_offset, live), out.ptr.dtype.element_ty)
    tl.store(out.ptr + row * out.stride_row + columns * out.stride_col, result, mask=live)


def _check(x: torch.Tensor, weight: torch.Tensor, *same_shape: torch.Tensor) -> None:
    if x.ndim != 2 or weight.shape != (x.shape[1],) or any(other.shape != x.shape for other in same_shape):
        raise ValueError("x, residual and out must be [rows, columns] alike and weight [columns]")
    if x.shape[1] > MAX_COLUMNS:
        raise ValueError(f"{x.shape[1]} columns; at most {MAX_COLUMNS} fit into one program")
    if weight.stride(0) != 1:
        raise ValueError("weight must be contiguous")


def _num_warps(block: int) -> int:
    return min(max(block // 512, 1), 16)


def rms_norm_launch(
    out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float, weight_offset: float = 0.0
) -> Launch:
    _check(x, weight, out)
    block = next_power_of_2(x.shape[1])
    args = {
        "out": matrix(out),
        "x": matrix(x),
        "weight": weight,
        "eps": eps,
        "weight_offset": weight_offset,
        "num_columns": x.shape[1],
        "BLOCK": block,
    }
    return Launch(rms_norm_kernel, (x.shape[0],), args, _num_warps(block), num_stages=1)


def add_rms_norm_launch(
    out: torch.Tensor,
    residual: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    weight_offset: float = 0.0,
) -> Launch:
    _check(x, weight, out, residual)
    block = next_power_of_2(x.shape[1])
    args = {
        "out": matrix(out),
        "residual": matrix(residual),
        "x": matrix(x),
        "weight": weight,
        "eps": eps,
        "weight_offset": weight_offset,
        "num_columns": x.shape[1],
        "BLOCK": block,
    }
    return Launch(add_rms_norm_kernel, (x.shape[0],), args, _num_warps(block), num_stages=1)


def rms_norm(
    out: torch.Tensor,  # [rows, columns], may be x
    x: torch.Tensor,  # [rows, columns] fp16, bf16 or fp32, any strides
    weight: torch.Tensor,  # [columns]
    eps: float,
    weight_offset: float = 0.0,  # 1.0 for Gemma's (1 + weight)
) -> torch.Tensor:
    device_properties(x.device)
    rms_norm_launch(out, x, weight, eps, weight_offset).run()
    return out


def add_rms_norm(
    out: torch.Tensor,  # [rows, columns], may be x
    residual: torch.Tensor,  # [rows, columns], updated in place
    x: torch.Tensor,  # [rows, columns]
    weight: torch.Tensor,  # [columns]
    eps: float,
    weight_offset: float = 0.0,
) -> torch.Tensor:
    device_properties(x.device)
    add_rms_norm_launch(out, residual, x, weight, eps, weight_offset).run()
    return out
