"""Number formats, exhaustively where there are few numbers."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from kernels.numeric import cast_to, decode_e4m3, encode_e4m3, round_half_even, tanh, to_fp32


@triton.jit
def decode_kernel(out, codes, N: tl.constexpr):  # noqa: N803
    lane = tl.arange(0, N)
    tl.store(out + lane, decode_e4m3(tl.load(codes + lane)).to(tl.float32))


@triton.jit
def encode_kernel(out, values, N: tl.constexpr):  # noqa: N803
    lane = tl.arange(0, N)
    tl.store(out + lane, encode_e4m3(tl.load(values + lane)))


@triton.jit
def round_kernel(out, values, N: tl.constexpr):  # noqa: N803
    lane = tl.arange(0, N)
    tl.store(out + lane, round_half_even(tl.load(values + lane)))


@triton.jit
def cast_kernel(out, values, N: tl.constexpr):  # noqa: N803
    lane = tl.arange(0, N)
    tl.store(out + lane, cast_to(tl.load(values + lane), out.dtype.element_ty))


@triton.jit
def tanh_kernel(out, values, N: tl.constexpr):  # noqa: N803
    lane = tl.arange(0, N)
    tl.store(out + lane, tanh(tl.load(values + lane)))


def edge_floats() -> torch.Tensor:
    """4096 fp32 around every e4m3 value, midpoint and edge, and random bit patterns that are finite"""
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    values = codes[codes.isfinite()]
    middles = (values[1:] + values[:-1]) / 2
    special = torch.tensor([0.0, -0.0, 2.0**-10, 2.0**-11, 448.0, 449.0, 464.0, 465.0, 1e6, -1e6, float("nan")])
    exact = torch.cat([values, middles, special])
    near = torch.cat([exact, torch.nextafter(exact, exact + 1), torch.nextafter(exact, exact - 1)])
    bits = torch.from_numpy(
        np.random.default_rng(0).integers(0, 2**32, 4096 - len(near), dtype=np.uint32).view(np.int32)
    )
    noise = bits.view(torch.float32)
    return torch.cat([near, torch.where(noise.isfinite(), noise, 1.0)])


def test_every_e4m3_code_decodes_as_torch_says(device):
    codes = torch.arange(256, dtype=torch.uint8, device=device)
    out = torch.empty(256, device=device)
    decode_kernel[(1,)](out, codes, N=256)
    torch.testing.assert_close(out, codes.view(torch.float8_e4m3fn).float(), rtol=0, atol=0, equal_nan=True)


def test_e4m3_encoding_rounds_as_torch_does_and_saturates(device):
    values = edge_floats().to(device)
    out = torch.empty(4096, dtype=torch.uint8, device=device)
    encode_kernel[(1,)](out, values, N=4096)
    expected = values.clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
    nan = values.isnan()
    assert torch.equal(out[~nan], expected.view(torch.uint8)[~nan])
    assert out.view(torch.float8_e4m3fn).float()[nan].isnan().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_casts_round_to_nearest_even(dtype, device):
    """33: the interpreter's own conversion to bf16 truncates."""
    values = edge_floats().to(device)
    bits = torch.arange(0x3F800000, 0x3F800000 + 2048 * 0x1001, 0x1001, dtype=torch.int32)  # between bf16 neighbours
    values[:2048] = bits.view(torch.float32).to(device)
    values[2048:2051] = torch.tensor([3.3895e38, float("inf"), float("-inf")])
    out = torch.empty(4096, dtype=dtype, device=device)
    cast_kernel[(1,)](out, values, N=4096)
    torch.testing.assert_close(out, values.to(dtype), rtol=0, atol=0, equal_nan=True)


@triton.jit
def upcast_kernel(out, values, N: tl.constexpr):  # noqa: N803
    lane = tl.arange(0, N)
    tl.store(out + lane, to_fp32(tl.load(values + lane)))


def test_every_bf16_upcasts_exactly(device):
    """33: all 65536 patterns, subnormals, infinities and NaN included."""
    values = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16).to(device)
    out = torch.empty(65536, device=device)
    upcast_kernel[(1,)](out, values, N=65536)
    torch.testing.assert_close(out, values.float(), rtol=0, atol=0, equal_nan=True)


def test_round_half_even(device):
    values = torch.arange(-256, 256, device=device) / 2
    out = torch.empty(512, device=device)
    round_kernel[(1,)](out, values, N=512)
    assert torch.equal(out, values.round())


def test_tanh(device):
    values = torch.cat([torch.linspace(-20, 20, 1000), torch.tensor([0.0, 1e-6, 1000.0, -1000.0])])
    values = torch.nn.functional.pad(values, (0, 1024 - 1004)).to(device)
    out = torch.empty(1024, device=device)
    tanh_kernel[(1,)](out, values, N=1024)
    torch.testing.assert_close(out, torch.tanh(values.double()).float(), rtol=0, atol=2e-7)
