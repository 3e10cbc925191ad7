"""Rotary position embedding on a tile of heads (Su et al. 2021, section 3.4), shared by the KV write kernels.

The first rotary_dim dimensions of a head are pairs (a, b), each turned by an angle of its own:
    (a, b) -> (a cos - b sin, b cos + a sin)
`half`: a and b lie rotary_dim / 2 apart (Llama, "rotate_half"); `interleaved`: side by side (GPT-J).
Dimensions past rotary_dim are passed through.
"""

# ruff: noqa: N803
import triton
import triton.language as tl

from kernels.numeric import to_fp32


@triton.jit
def pair_dims(pairs, rotary_dim, INTERLEAVED: tl.constexpr):
    """pairs [P] -> (dimension of a, dimension of b)"""
    if INTERLEAVED:
        return 2 * pairs, 2 * pairs + 1
    else:
        return pairs, pairs + rotary_dim // 2


@triton.jit
def load_angles(cos, sin, position, pairs, live):
    """-> (cos [P], sin [P]) fp32 of one position's row"""
    offset = position * cos.stride_row + pairs * cos.stride_col
    cos_row = to_fp32(tl.load(cos.ptr + offset, mask=live, other=0.0))
    offset = position * sin.stride_row + pairs * sin.stride_col
    return cos_row, to_fp32(tl.load(sin.ptr + offset, mask=live, other=0.0))


@triton.jit
def rotate(a, b, cos_row, sin_row):
    """a, b [H, P] fp32, angles [P] -> rotated (a, b)"""
    return a * cos_row[None, :] - b * sin_row[None, :], b * cos_row[None, :] + a * sin_row[None, :]
