"""Number formats inside kernels: what a dot takes, how a result is rounded, how fp8 is spelled in bits.

Belongs here: conversions that must give the same answer on every target and in Triton's interpreter.
Must not: anything that knows of tokens, heads or blocks.

The interpreter keeps bfloat16 as raw uint16 words: arithmetic on them is arithmetic on bit patterns, and its
conversion from fp32 truncates. So no kernel of this package computes in bf16 there: `operand` upcasts whatever is
loaded, and `cast_to` rounds to nearest even by hand. Compiled for a device, both reduce to nothing or to one
conversion. fp8 (e4m3fn) is carried as uint8 and decoded by integer arithmetic where the target has no instruction
for it, because the interpreter decodes its NaN to 480 and sm_80 refuses the type.
"""

import triton
import triton.language as tl
from triton import knobs

INTERPRETED: bool = bool(knobs.runtime.interpret)  # fixed when `kernels` is imported, as Triton fixes it at @jit
_TRITON_COMPILES = isinstance(tl.standard.sum, triton.runtime.JITFunction)  # fixed when `triton` was imported
if INTERPRETED == _TRITON_COMPILES:
    raise RuntimeError(
        "TRITON_INTERPRET was changed after Triton was imported, so that Triton's own functions and these kernels do "
        "not fit together; set it before Python starts, or before anything imports Triton (transformers does)"
    )
_INTERPRETED = tl.constexpr(INTERPRETED)

LOG2E = tl.constexpr(1.4426950408889634)
FP8_MAX = tl.constexpr(448.0)  # largest finite e4m3fn
INT8_MAX = tl.constexpr(127.0)


@triton.jit
def to_fp32(x):
    """What was loaded, as fp32, exactly."""
    if _INTERPRETED and x.dtype == tl.bfloat16:
        return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)


@triton.jit
def operand(x):
    """A loaded tile as `tl.dot` takes it: unchanged on a device, fp32 in the interpreter."""
    if _INTERPRETED:
        return to_fp32(x)
    else:
        return x


@triton.jit
def cast_to(x, dtype: tl.constexpr):
    """fp32 -> `dtype`, to nearest even. Only finite-to-finite, infinities and NaN keep their meaning."""
    if _INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.float32).to(tl.uint32, bitcast=True)
        rounded = bits + 0x7FFF + ((bits >> 16) & 1)
        bits = tl.where(x != x, bits | 0x00400000, rounded)
        return (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(dtype)


@triton.jit
def round_half_even(x):
    """fp32 -> nearest integer as fp32, ties to even; |x| < 2^22. (Adding 1.5 * 2^23 leaves no fraction bits.)"""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def tanh(x):
    """tanh in fp32 from one exp, saturating without overflow: 1 - 2 / (exp(2x) + 1)."""
    return 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0)


@triton.jit
def decode_e4m3(code):
    """uint8 e4m3fn -> fp16, exact, NaN kept.

    Shifted into an fp16 the 7 low bits are the value times 2^-8 (the exponent biases differ by 8), subnormals
    included; one exact multiplication puts it right.
    """
    wide = code.to(tl.uint16)
    magnitude = tl.where((wide & 0x7F) == 0x7F, 0x7E00, (wide & 0x7F) << 7)
    bits = ((wide & 0x80) << 8) | magnitude
    return bits.to(tl.uint16).to(tl.float16, bitcast=True) * 256.0


@triton.jit
def encode_e4m3(x):
    """fp32 -> uint8 e4m3fn, to nearest even, saturating at 448, NaN kept.

    Normal results: drop 20 mantissa bits with rounding and rebias the exponent by 127 - 7. Results below 2^-6:
    adding 2^14 leaves exactly the multiples of 2^-9 that e4m3 subnormals are, rounded by the addition itself; a
    carry out of them is the smallest normal, as it must be.
    """
    bits = x.to(tl.uint32, bitcast=True)
    sign = (bits >> 24) & 0x80
    magnitude = tl.minimum(tl.abs(x), 448.0)
    magnitude_bits = magnitude.to(tl.uint32, bitcast=True)
    normal = ((magnitude_bits + 0x7FFFF + ((magnitude_bits >> 20) & 1)) >> 20) - (120 << 3)
    subnormal = (magnitude + 16384.0).to(tl.uint32, bitcast=True) - 0x46800000
    code = tl.where(magnitude < 0.015625, subnormal, normal)
    code = tl.where(x != x, 0x7F, code)
    return (sign | code).to(tl.uint8)
