"""RMSNorm in plain torch."""

import torch


def rms_norm(
    x: torch.Tensor,  # [rows, columns]
    weight: torch.Tensor,  # [columns]
    eps: float,
    weight_offset: float = 0.0,
    dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """-> [rows, columns] of `dtype`"""
    x = x.to(dtype)
    return x * torch.rsqrt(x.pow(2).mean(dim=-1, keepdim=True) + eps) * (weight.to(dtype) + weight_offset)


def add_rms_norm(
    residual: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    weight_offset: float = 0.0,
    dtype: torch.dtype = torch.float64,
) -> tuple[torch.Tensor, torch.Tensor]:
    """-> (normalized [rows, columns] of `dtype`, new residual in the residual's dtype)"""
    total = (residual.to(dtype) + x.to(dtype)).to(residual.dtype)
    return rms_norm(total, weight, eps, weight_offset, dtype), total
