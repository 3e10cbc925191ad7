"""The token ids that int8's factors are measured on.

Random ids, the same for every start: which channels of a model are large is a matter of its weights more than of what
it reads, and no tokenizer is needed. What this costs in quality is measured (`benchmarks/int8_quality.py`).
"""

import torch
from torch import Tensor

_NUM_SEQUENCES, _NUM_TOKENS = 4, 128


def calibration_sequences(vocabulary_size: int) -> list[Tensor]:
    """[num_tokens] int64 each"""
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(vocabulary_size, (_NUM_TOKENS,), generator=generator) for _ in range(_NUM_SEQUENCES)]
