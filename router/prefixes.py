"""What the router believes to be cached in a pool of KV blocks: prefixes of the prompts that it sent there. Pure.

A belief, not an account: blocks are evicted and other routers fill the pool too. It only steers; the cache service says
what is really cached, and a request that was steered wrongly makes the belief true. Not here: the choice (placement).
"""

from collections.abc import Hashable, Sequence
from typing import NewType

# Of a chain of blocks: two are equal where all tokens up to there are, but for one chance in 2^61.
PrefixKey = NewType("PrefixKey", int)

# The work for a prompt is bounded: 1024 blocks of 16 tokens take a millisecond, and a quarter more for each engine.
MAX_KEYED_TOKENS = 16_384
MAX_KEPT_BLOCKS = 131_072  # about 10 MB


def prefix_keys(root: Hashable, prompt_ids: Sequence[int], block_size: int) -> list[PrefixKey]:
    """A key for each full block of the prompt that a later one can find, the first block's first.

    Args:
        root: what else must be equal: tenant and salt.
        prompt_ids: [num_prompt_tokens]; the last one is always computed, so it is in no block here.
    """
    key, keys = hash((root, block_size)), []
    ids = tuple(prompt_ids[: min(MAX_KEYED_TOKENS, len(prompt_ids) - 1)])
    for start in range(0, len(ids) - block_size + 1, block_size):
        key = hash((key, ids[start : start + block_size]))
        keys.append(PrefixKey(key))
    return keys


class PrefixIndex:
    """The keys of one pool, at most as many as it has blocks; those used longest ago go first.

    Args:
        max_blocks: of the pool, without the reserved one.
    """

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = min(max_blocks, MAX_KEPT_BLOCKS)
        self._keys: dict[PrefixKey, None] = {}  # the one used longest ago first

    def __len__(self) -> int:
        return len(self._keys)

    def num_matching(self, keys: Sequence[PrefixKey]) -> int:
        """How many leading blocks are believed to be cached."""
        for place, key in enumerate(keys):
            if key not in self._keys:
                return place
        return len(keys)

    def add(self, keys: Sequence[PrefixKey]) -> None:
        """A prompt goes to this pool: its blocks will be there. The tail of a chain goes before its head."""
        for key in reversed(keys):
            self._keys.pop(key, None)
            self._keys[key] = None
        while len(self._keys) > self._max_blocks:
            del self._keys[next(iter(self._keys))]
