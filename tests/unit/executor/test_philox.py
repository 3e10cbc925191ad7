"""The generator against its published vectors."""

import pytest
import torch

from executor.philox import philox4x32

# kat_vectors of Random123 1.14, "philox4x32 10": counter, key, output.
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text: str) -> tuple[torch.Tensor, ...]:
    return tuple(torch.tensor([int(word, 16)]) for word in text.split())


@pytest.mark.parametrize(("counter", "key", "output"), KNOWN_ANSWERS)
def test_known_answers(counter, key, output):
    assert philox4x32(words(counter), words(key)) == words(output)


def test_broadcasts_over_counters():
    ids = torch.arange(5)
    zero = torch.zeros(1, dtype=torch.int64)
    together = philox4x32((ids, zero, zero, zero), (zero + 7, zero + 9))[0]
    alone = [philox4x32((ids[i : i + 1], zero, zero, zero), (zero + 7, zero + 9))[0].item() for i in range(5)]
    assert together.tolist() == alone
    assert len(set(alone)) == 5
