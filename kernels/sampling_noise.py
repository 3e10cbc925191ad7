"""Counter-based Gumbel noise: a pure function of (seed, vocabulary id, position, choice index), with no state.

Philox-4x32-10 (Salmon et al. 2011) with the 64-bit seed as key (low word, high word) and the counter
(vocabulary id, position, choice index, 0). The first output word r gives

    u = (float32(r >> 8) + 0.5) * 2^-24,    g = -log(-log(u))

so a request that is preempted, moved or replayed draws the same numbers. For r >> 8 = 2^24 - 1 the sum rounds to
2^24 and u to 1, whose g would be infinite and win against any logit; u is therefore held below 1, at 1 - 2^-24.
"""

import triton
import triton.language as tl

LARGEST_U = tl.constexpr(1.0 - 2.0**-24)  # the largest fp32 below 1


@triton.jit
def gumbel_noise(seed, token_ids, position, choice_index):
    """seed int64, token_ids [N] int32, position and choice_index int32 -> g [N] fp32, finite"""
    word, _, _, _ = tl.philox(seed, token_ids, position, choice_index, 0)
    uniform = ((word >> 8).to(tl.float32) + 0.5) * 5.9604644775390625e-08
    return -tl.log(-tl.log(tl.minimum(uniform, LARGEST_U)))
