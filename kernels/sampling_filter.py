"""top-k and top-p without a sort: either filter keeps a threshold key and the first few ids that tie with it.

Values are compared as 32-bit keys that order as the floats do. The threshold is found digit by digit, four bits a
pass over the row (radix select; Alabi et al. 2012, section 3): the largest key such that the weight of everything
at or above it reaches a target. The weight is 1 for top-k and the unnormalized probability for top-p. Sums are fp32
within a tile and fp64 over tiles, so that they depend on neither the batch nor the launch.
"""

# ruff: noqa: N803
import triton
import triton.language as tl

from kernels.numeric import to_fp32


@triton.jit
def load_scaled(logits_row, stride, token_ids, vocab_size, temperature):
    """-> logit / temperature, [BLOCK] fp32; -inf outside the vocabulary and for NaN, and never -0.0"""
    logits = to_fp32(tl.load(logits_row + token_ids * stride, mask=token_ids < vocab_size, other=float("-inf")))
    scaled = tl.div_rn(logits, tl.zeros_like(logits) + temperature)
    scaled = tl.where(scaled == 0.0, 0.0, scaled)
    return tl.where(scaled != scaled, float("-inf"), scaled)


@triton.jit
def key_of(scaled):
    """fp32 -> uint32 of the same order"""
    bits = scaled.to(tl.uint32, bitcast=True)
    return tl.where((bits >> 31) != 0, bits ^ 0xFFFFFFFF, bits | 0x80000000)


@triton.jit
def value_of(key):
    """Inverse of `key_of`."""
    bits = tl.where((key >> 31) != 0, key ^ 0x80000000, key ^ 0xFFFFFFFF)
    return bits.to(tl.uint32).to(tl.float32, bitcast=True)


@triton.jit
def relative_probability(scaled, largest):
    """p / max p, fp32; 1 for the largest even where it is infinite"""
    return tl.where(scaled == largest, 1.0, tl.exp(scaled - largest))


@triton.jit
def find_threshold(
    logits_row, stride, vocab_size, temperature, largest, target, MASS: tl.constexpr, BLOCK: tl.constexpr
):
    """-> largest uint32 key with weight(keys >= key) >= target; `target` fp64, positive and within the total"""
    digits = tl.arange(0, 16)
    threshold = tl.zeros([16], dtype=tl.uint32)
    for step in range(8):
        shift = tl.full([16], 28, dtype=tl.uint32) - 4 * step
        candidates = threshold | (digits.to(tl.uint32) << shift.to(tl.uint32))
        weight = tl.zeros([16], dtype=tl.float64)
        for start in tl.range(0, vocab_size, BLOCK, num_stages=3):  # the next tiles are on their way meanwhile
            token_ids = start + tl.arange(0, BLOCK)
            scaled = load_scaled(logits_row, stride, token_ids, vocab_size, temperature)
            if MASS:
                each = relative_probability(scaled, largest)
            else:
                each = tl.where(token_ids < vocab_size, 1.0, 0.0)
            reached = key_of(scaled)[:, None] >= candidates[None, :]
            weight += tl.sum(tl.where(reached, each[:, None], 0.0), axis=0).to(tl.float64)
        digit = tl.sum(((weight >= target) & (digits > 0)).to(tl.int32), axis=0)
        threshold = threshold | (digit.to(tl.uint32) << shift.to(tl.uint32))
    return tl.max(threshold.to(tl.int64), axis=0).to(tl.uint32)


@triton.jit
def weigh_above(logits_row, stride, vocab_size, temperature, largest, threshold, BLOCK: tl.constexpr):
    """-> (number of keys > threshold as int32, their probability mass as fp64, relative to the largest)"""
    count = 0
    mass = tl.sum(tl.zeros([16], dtype=tl.float64), axis=0)
    for start in range(0, vocab_size, BLOCK):
        token_ids = start + tl.arange(0, BLOCK)
        scaled = load_scaled(logits_row, stride, token_ids, vocab_size, temperature)
        above = key_of(scaled) > threshold
        count += tl.sum(above.to(tl.int32), axis=0)
        mass += tl.sum(tl.where(above, relative_probability(scaled, largest), 0.0), axis=0).to(tl.float64)
    return count, mass


@triton.jit
def select_top(
    logits_row, stride, vocab_size, temperature, largest, top_k, top_p, BLOCK: tl.constexpr, SEARCH_BLOCK: tl.constexpr
):
    """top-k, then top-p over its renormalized survivors -> (threshold key, number of ties with it that stay)

    Kept are the keys above the threshold and, of those equal to it, the given number with the lowest ids.
    """
    threshold = tl.sum(tl.zeros([16], dtype=tl.uint32), axis=0).to(tl.uint32)  # below every key: no filter
    limited = (top_k > 0) & (top_k < vocab_size)
    if limited:
        threshold = find_threshold(
            logits_row, stride, vocab_size, temperature, largest, top_k.to(tl.float64), False, SEARCH_BLOCK
        )
    count, mass = weigh_above(logits_row, stride, vocab_size, temperature, largest, threshold, BLOCK)
    tie = tl.where(limited, relative_probability(value_of(threshold), largest), 0.0).to(tl.float64)
    num_ties = tl.where(limited, top_k - count, vocab_size)
    if top_p < 1.0:
        target = tl.maximum(top_p.to(tl.float64) * (mass + num_ties * tie), 1e-30)
        if mass >= target:
            threshold = find_threshold(logits_row, stride, vocab_size, temperature, largest, target, True, SEARCH_BLOCK)
            count, mass = weigh_above(logits_row, stride, vocab_size, temperature, largest, threshold, BLOCK)
            tie = relative_probability(value_of(threshold), largest).to(tl.float64)
            num_ties = vocab_size
        needed = tl.ceil((target - mass) / tl.maximum(tie, 1e-300))  # the tie that crosses belongs
        num_ties = tl.minimum(tl.maximum(tl.minimum(needed, 2147483647.0).to(tl.int32), 1), num_ties)
    return threshold, num_ties
