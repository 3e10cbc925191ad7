"""Sampling: temperature, top-k, top-p, min-p and a Gumbel draw, one program per row, in one launch.

    z = logit / temperature
    top-k: exactly k, ties to the lower id
    top-p: over the renormalized survivors; the token that crosses belongs
    min-p: p >= min_p * max p
    token = argmax over what is kept of z + g(seed, id, position, choice), ties to the lowest id

(Gumbel-max: Maddison et al. 2014; that argmax is a draw from the renormalized softmax.) Temperature 0 is greedy: the
largest logit, lowest id on ties. Filters and noise: `sampling_filter`, `sampling_noise`.

Grid: (num_rows,). A greedy row reads its logits once, an unfiltered one twice, top-k or top-p adds nine or ten passes
each, which hit L2: no scratch, no sort, the same result at every batch size.
"""

# ruff: noqa: N803
import torch
import triton
import triton.language as tl

from kernels.device import device_properties
from kernels.launch import Launch, next_power_of_2
from kernels.sampling_filter import key_of, load_scaled, relative_probability, select_top
from kernels.sampling_noise import gumbel_noise
from kernels.view import matrix

MAX_BLOCK = 4096  # logits in a tile
MAX_SEARCH_BLOCK = 1024  # in a tile of the threshold search, which compares each with 16 candidates


@triton.jit
def largest_of(logits_row, stride, vocab_size, temperature, BLOCK: tl.constexpr):
    """-> (largest scaled logit, its lowest id); id -1 where every logit is -inf or NaN"""
    best = tl.max(tl.full([16], float("-inf"), dtype=tl.float32), axis=0)
    best_id = -1
    for start in range(0, vocab_size, BLOCK):
        token_ids = start + tl.arange(0, BLOCK)
        scaled = load_scaled(logits_row, stride, token_ids, vocab_size, temperature)
        tile_best, tile_arg = tl.max(scaled, axis=0, return_indices=True, return_indices_tie_break_left=True)
        best_id = tl.where(tile_best > best, start + tile_arg, best_id)
        best = tl.maximum(best, tile_best)
    return best, best_id


@triton.jit
def draw(
    logits_row, stride, vocab_size, temperature, largest, threshold, num_ties, min_p, seed, position, choice_index,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """-> id with the largest scaled logit + noise among what the filters keep"""
    best = tl.max(tl.full([16], float("-inf"), dtype=tl.float32), axis=0)
    best_id = -1
    ties_before = 0
    for start in range(0, vocab_size, BLOCK):
        token_ids = start + tl.arange(0, BLOCK)
        scaled = load_scaled(logits_row, stride, token_ids, vocab_size, temperature)
        key = key_of(scaled)
        tied = (key == threshold).to(tl.int32)
        rank = ties_before + tl.cumsum(tied, axis=0) - tied
        ties_before += tl.sum(tied, axis=0)
        kept = (key > threshold) | ((tied > 0) & (rank < num_ties))
        kept = kept & (relative_probability(scaled, largest) >= min_p)
        score = tl.where(kept, scaled + gumbel_noise(seed, token_ids, position, choice_index), float("-inf"))
        tile_best, tile_arg = tl.max(score, axis=0, return_indices=True, return_indices_tie_break_left=True)
        best_id = tl.where(tile_best > best, start + tile_arg, best_id)
        best = tl.maximum(best, tile_best)
    return best_id


@triton.jit
def sample_kernel(
    out,  # [num_rows] int64
    logits,  # Matrix [num_rows, vocab_size]
    temperatures,  # [num_rows] fp32
    top_ks,  # [num_rows] int32
    top_ps,  # [num_rows] fp32
    min_ps,  # [num_rows] fp32
    seeds,  # [num_rows] int64
    positions,  # [num_rows] int32
    choice_indices,  # [num_rows] int32
    vocab_size,
    BLOCK: tl.constexpr,
    SEARCH_BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits_row = logits.ptr + row * logits.stride_row
    stride = logits.stride_col
    temperature = tl.load(temperatures + row)
    if temperature == 0.0:
        _greedy, token_id = largest_of(logits_row, stride, vocab_size, 1.0, BLOCK)
        tl.store(out + row, token_id.to(tl.int64))
    else:
        largest, _largest_id = largest_of(logits_row, stride, vocab_size, temperature, BLOCK)
        top_k = tl.load(top_ks + row)
        top_p = tl.load(top_ps + row)
        threshold = tl.sum(tl.zeros([16], dtype=tl.uint32), axis=0).to(tl.uint32)
        num_ties = vocab_size
        if ((top_k > 0) & (top_k < vocab_size)) | (top_p < 1.0):
            threshold, num_ties = select_top(
                logits_row, stride, vocab_size, temperature, largest, top_k, top_p, BLOCK, SEARCH_BLOCK
            )
        token_id = draw(
            logits_row, stride, vocab_size, temperature, largest, threshold, num_ties, tl.load(min_ps + row),
            tl.load(seeds + row), tl.load(positions + row), tl.load(choice_indices + row), BLOCK,
        )  # fmt: skip
        tl.store(out + row, token_id.to(tl.int64))


PARAMETER_DTYPES = {
    "temperatures": torch.float32,
    "top_ks": torch.int32,
    "top_ps": torch.float32,
    "min_ps": torch.float32,
    "seeds": torch.int64,
    "positions": torch.int32,
    "choice_indices": torch.int32,
}


def sample_launch(out: torch.Tensor, logits: torch.Tensor, **parameters: torch.Tensor) -> Launch:
    num_rows, vocab_size = logits.shape
    if set(parameters) != set(PARAMETER_DTYPES):
        raise TypeError(f"sampling parameters are {', '.join(PARAMETER_DTYPES)}; got {', '.join(parameters)}")
    for name, dtype in {"out": torch.int64, **PARAMETER_DTYPES}.items():
        tensor = out if name == "out" else parameters[name]
        if tensor.shape != (num_rows,) or tensor.dtype != dtype:
            raise ValueError(f"{name} must be {dtype} of shape ({num_rows},), got {tensor.dtype} {tuple(tensor.shape)}")
    args = {"out": out, "logits": matrix(logits), **parameters, "vocab_size": vocab_size}
    block = max(min(next_power_of_2(vocab_size), MAX_BLOCK), 16)
    args |= {"BLOCK": block, "SEARCH_BLOCK": min(block, MAX_SEARCH_BLOCK)}
    return Launch(sample_kernel, (num_rows,), args, num_warps=8, num_stages=1)


def sample(out: torch.Tensor, logits: torch.Tensor, **parameters: torch.Tensor) -> torch.Tensor:
    """One token id per row of `logits` [num_rows, vocab_size] fp16, bf16 or fp32, into `out` [num_rows] int64.

    Parameters, each [num_rows], 1-D and contiguous:
        temperatures fp32 (0: greedy), top_ks int32 (<= 0 or >= vocab_size: off), top_ps fp32 (>= 1: off),
        min_ps fp32 (0: off), seeds int64, positions int32, choice_indices int32.
    A NaN logit counts as -inf; a row with no other gives -1.
    """
    device_properties(logits.device)
    sample_launch(out, logits, **parameters).run()
    return out
