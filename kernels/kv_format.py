"""KV number formats: how K and V elements are stored in a block and become dot operands again.

`dense`: the query's dtype. `int8`, `fp8`: one byte an element and one fp32 scale per token and head (value = code *
scale), which lies in the block's own extent, so that a block copied is a block whole.
"""

# ruff: noqa: N803
import torch
import triton
import triton.language as tl

from kernels.device import DeviceProperties
from kernels.numeric import decode_e4m3, operand

DENSE = "dense"
INT8 = "int8"
FP8_BITS = "fp8_bits"  # decoded by integer arithmetic
FP8_NATIVE = "fp8_native"  # decoded by instruction

DENSE_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
QUANTIZED_MAX = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


def kv_format(kv_dtype: torch.dtype, query_dtype: torch.dtype, device: DeviceProperties) -> str:
    """The format of a cache of `kv_dtype` read by queries of `query_dtype`; TypeError where there is none."""
    if query_dtype not in DENSE_DTYPES:
        raise TypeError(f"query dtype {query_dtype} is not one of float16, bfloat16, float32")
    if kv_dtype == torch.int8:
        return INT8
    if kv_dtype == torch.float8_e4m3fn:
        return FP8_NATIVE if device.native_fp8 else FP8_BITS
    if kv_dtype != query_dtype:
        raise TypeError(
            f"KV dtype {kv_dtype} with query dtype {query_dtype}: KV must have the query's dtype, int8 or float8_e4m3fn"
        )
    return DENSE


def check_scales(cache: torch.Tensor, scale: torch.Tensor | None, name: str) -> None:
    """Quantized caches have scales [num_blocks, num_kv_heads, block_size] fp32, dense ones have none."""
    if (cache.dtype in QUANTIZED_MAX) != (scale is not None):
        raise ValueError(f"{name}: scales are required for int8 and float8_e4m3fn and refused for {cache.dtype}")
    if scale is not None and (scale.shape != cache.shape[:3] or scale.dtype != torch.float32):
        raise ValueError(
            f"{name}: scales must be float32 of shape {tuple(cache.shape[:3])}, got {scale.dtype} of "
            f"{tuple(scale.shape)}"
        )


@triton.jit
def dequantize(codes, dtype: tl.constexpr, FORMAT: tl.constexpr):
    """Stored elements -> dot operand of `dtype`, without the scale. int8 and e4m3 are exact in fp16 and bf16."""
    if FORMAT == "dense":
        return operand(codes)
    elif FORMAT == "int8":
        return codes.to(dtype)
    elif FORMAT == "fp8_bits":
        return decode_e4m3(codes).to(dtype)
    else:
        return codes.to(tl.float8e4nv, bitcast=True).to(tl.float16).to(dtype)
