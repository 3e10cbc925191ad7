"""Block copies in plain torch."""

from collections.abc import Sequence

import torch


def block_copy(arena: torch.Tensor, pairs: Sequence[tuple[int, int]]) -> None:
    """arena: [num_blocks, block_bytes]; indexing on the right reads all sources before the assignment writes."""
    if pairs:
        sources, targets = zip(*pairs, strict=True)
        arena[list(targets)] = arena[list(sources)]
