"""RMSNorm with and without residual, against fp64."""

import itertools

import pytest
import torch

from kernels.reference import rms_norm as reference
from kernels.rms_norm import add_rms_norm, rms_norm

TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
CASES = list(itertools.product(TOLERANCE, (1, 16, 40, 576, 2048, 16384), (0.0, 1.0)))


def inputs(dtype, num_columns, device):
    """Rows inside a larger, NaN-filled buffer: (x, residual, weight)"""
    generator = torch.Generator().manual_seed(num_columns)
    buffers = [torch.full((3, num_columns + 5), float("nan"), dtype=dtype) for _ in range(2)]
    for buffer in buffers:
        buffer[:, :num_columns] = torch.randn(3, num_columns, generator=generator) * 3
    weight = torch.randn(num_columns, generator=generator).to(dtype).to(device)
    return *(buffer.to(device)[:, :num_columns] for buffer in buffers), weight


@pytest.mark.parametrize(("dtype", "num_columns", "weight_offset"), CASES)
def test_rms_norm(dtype, num_columns, weight_offset, device):
    x, _, weight = inputs(dtype, num_columns, device)
    out = rms_norm(torch.full(x.shape, float("nan"), dtype=dtype, device=device), x, weight, 1e-6, weight_offset)
    expected = reference.rms_norm(x, weight, 1e-6, weight_offset)
    torch.testing.assert_close(out.double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize(("dtype", "num_columns", "weight_offset"), CASES)
def test_add_rms_norm(dtype, num_columns, weight_offset, device):
    x, residual, weight = inputs(dtype, num_columns, device)
    expected, expected_residual = reference.add_rms_norm(residual, x, weight, 1e-6, weight_offset)
    out = torch.full(x.shape, float("nan"), dtype=dtype, device=device)
    add_rms_norm(out, residual, x, weight, 1e-6, weight_offset)
    assert torch.equal(residual, expected_residual)  # a sum of two, rounded once: exact in every dtype
    torch.testing.assert_close(out.double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_output_may_be_the_input(device):
    x, _, weight = inputs(torch.float32, 40, device)
    expected = rms_norm(torch.empty_like(x), x, weight, 1e-6)
    assert torch.equal(rms_norm(x, x, weight, 1e-6), expected)


def test_eps_carries_a_row_of_zeros(device):
    zeros = torch.zeros(1, 16, device=device)
    assert torch.equal(rms_norm(torch.ones_like(zeros), zeros, torch.ones(16, device=device), 1e-6), zeros)


def test_no_rows_is_no_launch(device):
    empty = torch.zeros(0, 16, device=device)
    assert rms_norm(empty, empty, torch.ones(16, device=device), 1e-6).shape == (0, 16)


def test_rows_too_long_for_one_program_are_refused(device):
    x = torch.zeros(1, 16385, device=device)
    with pytest.raises(ValueError, match="at most 16384"):
        rms_norm(x, x, torch.ones(16385, device=device), 1e-6)
