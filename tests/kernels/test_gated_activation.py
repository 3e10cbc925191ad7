"""SiLU·mul and GELU·mul against fp64."""

import itertools

import pytest
import torch

from kernels.gated_activation import ACTIVATIONS, gated_activation
from kernels.reference.gated_activation import gated_activation as reference_activation

TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@pytest.mark.parametrize(
    ("dtype", "intermediate", "activation"), list(itertools.product(TOLERANCE, (1, 40, 1024, 1536), ACTIVATIONS))
)
def test_gated_activation(dtype, intermediate, activation, device):
    buffer = torch.full((3, 2 * intermediate + 3), float("nan"), dtype=dtype)
    buffer[:, : 2 * intermediate] = torch.randn(3, 2 * intermediate, generator=torch.Generator().manual_seed(0)) * 4
    gate_up = buffer.to(device)[:, : 2 * intermediate]
    out = torch.full((3, intermediate), float("nan"), dtype=dtype, device=device)
    gated_activation(out, gate_up, activation)
    expected = reference_activation(gate_up, activation)
    torch.testing.assert_close(out.double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_large_gates_saturate(activation, device):
    """exp of either sign overflows somewhere in [-1000, 1000]; no NaN may come of it."""
    gate = torch.tensor([-1000.0, -100.0, 0.0, 100.0, 1000.0], device=device)
    gate_up = torch.cat([gate, torch.ones(5, device=device)])[None]
    out = gated_activation(torch.empty(1, 5, device=device), gate_up, activation)
    torch.testing.assert_close(out[0], gate.clamp(min=0.0))


def test_an_unknown_activation_is_refused(device):
    with pytest.raises(ValueError, match="silu, gelu, gelu_tanh"):
        gated_activation(torch.empty(1, 1, device=device), torch.empty(1, 2, device=device), "relu")
