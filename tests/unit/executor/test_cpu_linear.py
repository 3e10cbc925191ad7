"""Packed linear layers of the C++ kernels against float64, in every format, with each kind of integer product."""

import ctypes
import subprocess

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.cpu import compiler
from kernels.cpu.library import FORMATS, Linear, declare, load_library

SCALED = 64  # inputs that share a scale


@pytest.fixture(scope="module", params=["native", "emulated bytes by bytes"])
def library(request, tmp_path_factory) -> ctypes.CDLL:
    """The layout and the arithmetic of VNNI, its instruction written out: few processors have it, all can check it."""
    if request.param == "native":
        return load_library()
    path = tmp_path_factory.mktemp("library") / "emulated.so"
    sources = map(str, compiler.SOURCES.glob("*.cpp"))
    flags = [*compiler.FLAGS, "-O1", "-DOCTAVO_EMULATE_VNNI"]
    subprocess.run([compiler.find_compiler(), *flags, *sources, "-o", str(path)], check=True, capture_output=True)
    return declare(ctypes.CDLL(str(path)))


def run(library: ctypes.CDLL, x: Tensor, weight: Tensor, bias: Tensor | None, weights_format: str) -> Tensor:
    """[num_tokens, num_outputs] float32"""
    panel = library.octavo_panel()
    inputs, outputs = (-(-size // panel) * panel for size in reversed(weight.shape))
    linear = library.octavo_linear_pack(
        weight.data_ptr(),
        bias.data_ptr() if bias is not None else None,
        *weight.shape,
        FORMATS.index(weights_format),
        0,
    )
    padded, out = torch.zeros(len(x), inputs), torch.full((len(x), outputs), torch.nan)
    padded[:, : x.shape[1]] = x
    assert library.octavo_linear(linear, padded.data_ptr(), len(x), out.data_ptr(), 1) == 0
    library.octavo_linear_free(linear)
    return out[:, : len(weight)]


def rounded(x: Tensor, group: int) -> Tensor:
    """To int8 with one scale per row and group of columns, in float64."""
    parts = x.double().split(group, dim=1)
    scales = [part.abs().amax(dim=1, keepdim=True) / 127 for part in parts]
    return torch.cat([(part / scale).round() * scale for part, scale in zip(parts, scales, strict=True)], dim=1)


@pytest.mark.parametrize("sizes", [(1, 1), (40, 24), (100, 130), (33, 1537)])
@pytest.mark.parametrize("num_tokens", [1, 13, 60])
@pytest.mark.parametrize("weights_format", FORMATS)
def test_products(library, sizes, num_tokens, weights_format):
    generator = torch.Generator().manual_seed(1)
    weight, bias = torch.randn(sizes, generator=generator), torch.randn(sizes[0], generator=generator)
    x = torch.randn((num_tokens, sizes[1]), generator=generator)
    out = run(library, x, weight, bias, weights_format)
    if weights_format == "int8":
        expected = rounded(x, SCALED) @ rounded(weight, sizes[1]).T + bias
        # A number half-way between two codes may take either: allow for a few of them.
        torch.testing.assert_close(out.double(), expected, rtol=2e-3, atol=2e-2 * sizes[1] ** 0.5)
        error = (out.double() - expected).abs().mean()
        assert error < 1e-3 * sizes[1] ** 0.5
    else:
        stored = weight.to(getattr(torch, weights_format)).double()
        torch.testing.assert_close(out.double(), x.double() @ stored.T + bias, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("weights_format", FORMATS)
def test_a_tokens_bits_do_not_depend_on_the_others(library, weights_format):
    generator = torch.Generator().manual_seed(2)
    weight, x = torch.randn((50, 200), generator=generator), torch.randn((61, 200), generator=generator)
    whole = run(library, x, weight, None, weights_format)
    for first, last in ((0, 1), (3, 10), (48, 61), (17, 60)):
        assert torch.equal(run(library, x[first:last].contiguous(), weight, None, weights_format), whole[first:last])


def test_largest_codes_do_not_overflow(library):
    """Every product at its largest: bytes by bytes would saturate in 16 bits, were they added up there."""
    x, weight = torch.full((3, 4096), 1.0), torch.full((20, 4096), 1.0)
    x[1] = -1
    out = run(library, x, weight, None, "int8")
    np.testing.assert_allclose(out.numpy(), np.array([[4096.0], [-4096.0], [4096.0]]) * np.ones((1, 20)), rtol=1e-6)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_row_that_is_not_finite_gives_no_numbers(library, bad):
    """What is not finite must be seen, and only in its own row."""
    x, weight = torch.ones(2, 96), torch.ones(20, 96)
    x[1, 70] = bad
    out = run(library, x, weight, None, "int8")
    assert out[0].isfinite().all()
    assert not out[1].isfinite().any()


def test_zeros_stay_zeros(library):
    out = run(library, torch.zeros(2, 70), torch.randn(18, 70), torch.ones(18), "int8")
    assert torch.equal(out, torch.ones(2, 18))


def blocks(kind: str, outputs: int, inputs: int) -> Tensor:
    """Weights as the blocks of a file of this kind give them."""
    generator = torch.Generator().manual_seed(4)

    def half(low: float, high: float) -> Tensor:
        drawn = torch.rand((outputs, inputs // 32, 1), generator=generator) * (high - low) + low
        return drawn.half().float()

    most = 256 if kind == "Q8_0" else 16
    codes = torch.randint(most // 256, most, (outputs, inputs // 32, 32), generator=generator).float()
    codes[..., 3], codes[..., 7] = (1, 255) if kind == "Q8_0" else (0, 15)
    codes[0, 0] = codes[0, 0].clamp(3, 9) if kind == "Q4_1" else codes[0, 0]  # not the whole range
    scale, least = half(0.001, 0.02), half(-0.2, 0.1)
    scale[::2] *= 1 if kind == "Q4_1" else -1
    weights = codes * scale + least if kind == "Q4_1" else (codes - most // 2) * scale
    weights[-1, -1] = weights[-1, -1, 3]  # all alike
    return weights.view(outputs, inputs)


BLOCK_BITS = {"Q4_0": 4, "Q4_1": 4, "Q8_0": 8}


@pytest.mark.parametrize("kind", BLOCK_BITS)
@pytest.mark.parametrize("num_tokens", [1, 13, 60])
def test_weights_that_are_blocks_are_stored_as_such_and_give_the_same_bits(library, kind, num_tokens):
    """One weight beside the grid, far from all others, makes dense weights of the same numbers."""
    weight, bias = blocks(kind, 70, 320), torch.randn(70, generator=torch.Generator().manual_seed(5))
    x = torch.randn((num_tokens, 320), generator=torch.Generator().manual_seed(6))
    assert block_bits(library, weight) == BLOCK_BITS[kind]
    dense = torch.cat([weight, torch.randn(1, 320)])
    assert block_bits(library, dense) == 0
    dense_bias = torch.cat([bias, torch.zeros(1)])
    assert torch.equal(run(library, x, weight, bias, "float32"), run(library, x, dense, dense_bias, "float32")[:, :70])


@pytest.mark.parametrize("kind", BLOCK_BITS)
@pytest.mark.parametrize("sizes", [(1, 32), (70, 320), (33, 1536)])
def test_int8_takes_the_codes_of_blocks_as_they_are(library, kind, sizes):
    weight, x = blocks(kind, *sizes), torch.randn((61, sizes[1]), generator=torch.Generator().manual_seed(6))
    whole = run(library, x, weight, None, "int8")
    expected = rounded(x, 32) @ weight.double().T
    torch.testing.assert_close(whole.double(), expected, rtol=2e-3, atol=2e-3)  # as above: codes half-way
    assert (whole.double() - expected).abs().mean() < 1e-4
    for first, last in ((0, 1), (3, 10), (48, 61), (17, 60)):
        assert torch.equal(run(library, x[first:last].contiguous(), weight, None, "int8"), whole[first:last])


@pytest.mark.parametrize("sign", [1, -1])
def test_the_largest_codes_of_blocks_do_not_overflow(library, sign):
    """Sums of a block in 16 bits come to 30480 at most."""
    weight = torch.zeros(20, 64)
    weight[:, 0:64:2], x = 15, torch.full((2, 64), float(sign))
    weight[10:, :] = 15
    weight[10:, 0:64:32] = 0
    assert block_bits(library, weight) == 4
    torch.testing.assert_close(run(library, x, weight, None, "int8"), x @ weight.T, rtol=1e-6, atol=1e-3)


def block_bits(library: ctypes.CDLL, weight: Tensor) -> int:
    linear = library.octavo_linear_pack(weight.data_ptr(), None, *weight.shape, FORMATS.index("float32"), 0)
    bits = Linear.from_address(linear).block_bits
    library.octavo_linear_free(linear)
    return bits
