"""Philox-4x32-10, a counter-based random generator.

Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.

A pure function of key and counter: it has no state, so the same numbers come out wherever and whenever a row is
computed. 32-bit words travel in int64 tensors, whose products wrap exactly as unsigned 64-bit ones do.
"""

from torch import Tensor

_WORD = 0xFFFFFFFF
_MULTIPLIER_0, _MULTIPLIER_1 = 0xD2511F53, 0xCD9E8D57
_WEYL_0, _WEYL_1 = 0x9E3779B9, 0xBB67AE85
_NUM_ROUNDS = 10

Words4 = tuple[Tensor, Tensor, Tensor, Tensor]


def philox4x32(counter: Words4, key: tuple[Tensor, Tensor]) -> Words4:
    """Ten rounds.

    Args:
        counter: four words, low first, each int64 in [0, 2^32); shapes broadcast.
        key: two words, low first, likewise.

    Returns:
        Four random words, each int64 in [0, 2^32).
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for round_index in range(_NUM_ROUNDS):
        if round_index:
            k0, k1 = (k0 + _WEYL_0) & _WORD, (k1 + _WEYL_1) & _WORD
        product_0, product_1 = c0 * _MULTIPLIER_0, c2 * _MULTIPLIER_1
        c0, c1, c2, c3 = (
            _high(product_1) ^ c1 ^ k0,
            product_1 & _WORD,
            _high(product_0) ^ c3 ^ k1,
            product_0 & _WORD,
        )
    return c0, c1, c2, c3


def _high(product: Tensor) -> Tensor:
    return (product >> 32) & _WORD
