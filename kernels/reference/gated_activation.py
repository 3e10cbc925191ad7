"""Gated activations in plain torch."""

import torch
import torch.nn.functional as F


def gated_activation(
    gate_up: torch.Tensor,  # [rows, 2 * intermediate]
    activation: str,  # silu, gelu or gelu_tanh
    dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """-> [rows, intermediate] of `dtype`"""
    gate, up = gate_up.to(dtype).chunk(2, dim=-1)
    if activation == "silu":
        return F.silu(gate) * up
    return F.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none") * up
