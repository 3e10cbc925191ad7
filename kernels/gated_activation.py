"""SiLU(gate) * up and GELU(gate) * up of a merged gate/up projection (GLU variants, Shazeer 2020).

Input rows are [gate | up]. Every element is read once and the product written once; computed in fp32, rounded once.
Grid: (num_rows, ceil(intermediate / 1024)).
"""

# ruff: noqa: N803
import torch
import triton
import triton.language as tl

from kernels.device import device_properties
from kernels.launch import Launch, cdiv
from kernels.numeric import cast_to, tanh, to_fp32
from kernels.view import matrix

BLOCK = 1024
ACTIVATIONS = ("silu", "gelu", "gelu_tanh")


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """fp32 -> fp32. gelu is the exact one (erf), gelu_tanh its approximation (Hendrycks & Gimpel 2016)."""
    if ACTIVATION == "silu":
        return x / (1.0 + tl.exp(-x))
    elif ACTIVATION == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    else:
        return 0.5 * x * (1.0 + tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))


@triton.jit
def gated_activation_kernel(out, gate_up, num_columns, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = columns < num_columns
    pointers = gate_up.ptr + row * gate_up.stride_row
    gate = to_fp32(tl.load(pointers + columns * gate_up.stride_col, mask=live, other=0.0))
    up = to_fp32(tl.load(pointers + (columns + num_columns) * gate_up.stride_col, mask=live, other=0.0))
    result = cast_to(activate(gate, ACTIVATION) * up, out.ptr.dtype.element_ty)
    tl.store(out.ptr + row * out.stride_row + columns * out.stride_col, result, mask=live)


def gated_activation_launch(out: torch.Tensor, gate_up: torch.Tensor, activation: str) -> Launch:
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation {activation!r} is not one of {', '.join(ACTIVATIONS)}")
    num_rows, width = gate_up.shape
    if width % 2 or out.shape != (num_rows, width // 2):
        raise ValueError(
            f"gate_up is [rows, 2 * intermediate], out [rows, intermediate]; got {gate_up.shape}, {out.shape}"
        )
    args = {
        "out": matrix(out),
        "gate_up": matrix(gate_up),
        "num_columns": width // 2,
        "ACTIVATION": activation,
        "BLOCK": BLOCK,
    }
    return Launch(gated_activation_kernel, (num_rows, cdiv(width // 2, BLOCK)), args, num_warps=4, num_stages=1)


def gated_activation(
    out: torch.Tensor,  # [rows, intermediate]
    gate_up: torch.Tensor,  # [rows, 2 * intermediate] fp16, bf16 or fp32, any strides
    activation: str,  # silu, gelu or gelu_tanh
) -> torch.Tensor:
    device_properties(gate_up.device)
    gated_activation_launch(out, gate_up, activation).run()
    return out
