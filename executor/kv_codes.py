"""Heads of K and V as codes of one byte with a scale each: how the number formats `int8` and `float8_e4m3fn` work.

    scale = max |x| over a head's dimensions / largest code;  code = round(x / scale), ties to even;  x ~ code * scale

Every back end writes these codes and these scales. A head with a NaN or an infinity gets a NaN scale: what was broken
stays visible wherever it is read, and is seen nowhere else. Here is the definition, in plain torch.
"""

import torch
from torch import Tensor

LARGEST_CODE = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


def quantize(heads: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """heads: [..., head_dim]. Returns codes [..., head_dim] of `dtype`, and scales [...] float32."""
    heads, limit = heads.float(), LARGEST_CODE[dtype]
    largest = heads.abs().amax(dim=-1)  # NaN where one is
    scale = torch.where(largest.isfinite(), largest / limit, torch.nan)
    inverse = torch.where(scale > 0, limit / largest, 0.0)  # a head of zeros: codes 0, scale 0
    scaled = (heads * inverse[..., None]).nan_to_num(0.0).clamp(-limit, limit)
    return (scaled.round() if dtype == torch.int8 else scaled).to(dtype), scale


def dequantize(codes: Tensor, scale: Tensor) -> Tensor:
    """codes: [..., head_dim], scale: [...]. Returns [..., head_dim] float32."""
    return codes.float() * scale[..., None]
