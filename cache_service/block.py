"""Names of blocks and of the states they are in.

Here belongs what every other module says about one block. Not here: lists of blocks, tokens, owners.
"""

from enum import Enum
from typing import NewType

BlockId = NewType("BlockId", int)

# Padding rows of a batch write here and nobody reads it; it is never handed out.
RESERVED_BLOCK = BlockId(0)


class BlockState(Enum):
    """Every block is in exactly one of these; see docs/cache.md for the moves between them."""

    FREE = "free"  # no content that anyone could want
    CACHED = "cached"  # nobody's, but findable: handed out only when no free block is left
    USED = "used"  # in at least one block table
    FENCED = "fenced"  # in no table, but a step in flight may still write or read it
    RESERVED = "reserved"


class OwnershipError(Exception):
    """A block was given back more often than it was taken, or taken while it is free. A bug, never a client's doing."""
