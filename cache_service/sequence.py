"""A sequence: the tokens the manager knows of, the blocks it owns, how far they are computed and findable.

Here belongs the arithmetic of one sequence. Not here: pools, other sequences, leases.

    tokens   |<------- num_computed ------->|<- known, no KV yet ->|
    blocks   [ full ][ full ][ full ][ part ][ slack ]
             |<- num_findable * B ->|
"""

from array import array

from cache_service.block import BlockId
from cache_service.ledger import TOKEN_BYTES
from cache_service.operation import Commit
from cache_service.prefix import PrefixIndex, PrefixNode, pack_tokens
from octavo.errors import FieldViolation, OctavoError, invalid_argument


class Sequence:
    """One block table and what is known of its content. Owned and changed by the manager alone."""

    __slots__ = (
        "block_ids",
        "bypass_cache",
        "copy_source",
        "extras",
        "num_computed",
        "num_findable",
        "tenant",
        "tip",
        "tokens",
    )

    def __init__(
        self,
        tokens: "array[int]",
        block_ids: list[BlockId],
        extras: bytes,
        tenant: str | None,
        *,
        bypass_cache: bool,
    ) -> None:
        self.tokens = tokens  # [num_known] uint32
        self.block_ids = block_ids  # position // block_size -> block
        self.extras = extras  # encoded
        self.tenant = tenant  # that of the extras
        self.bypass_cache = bypass_cache
        self.num_computed = 0  # tokens with KV
        self.num_findable = 0  # leading blocks in the prefix index
        self.tip: PrefixNode | None = None  # node of the last findable block
        # The block that a copy to this sequence reads, until a commit proves that the copy happened.
        self.copy_source: BlockId | None = None

    def owned_blocks(self) -> list[BlockId]:
        """Every block this sequence is an owner of, the tail of its chain first."""
        blocks = self.block_ids[::-1]
        if self.copy_source is not None:
            blocks.append(self.copy_source)
        return blocks

    def check_commit(self, commit: Commit, block_size: int) -> None:
        """Raise INVALID_ARGUMENT, naming the field, if the commit cannot apply to this sequence."""
        num_known = len(self.tokens)
        offset, num_new = commit.token_offset, len(commit.token_ids)
        if num_new and offset > num_known:
            raise _bad("token_offset", f"is {offset}, but only {num_known} tokens are known: the range must join them")
        overlap = max(0, min(num_known - offset, num_new))
        if overlap and self.tokens[offset : offset + overlap] != commit.token_ids[:overlap]:
            raise _mismatch(self.tokens, commit, overlap)
        known_after = max(num_known, offset + num_new if num_new else 0)
        if commit.num_computed_tokens > known_after:
            raise _bad(
                "num_computed_tokens", f"is {commit.num_computed_tokens}, more than the {known_after} tokens known"
            )
        capacity = len(self.block_ids) * block_size
        if commit.num_computed_tokens > capacity:
            raise _bad(
                "num_computed_tokens", f"is {commit.num_computed_tokens}, more than its blocks hold ({capacity})"
            )

    def apply_commit(self, commit: Commit) -> None:
        """Learn the new tokens and the computed length; the commit was checked. A repeated one changes nothing."""
        num_overlap = len(self.tokens) - commit.token_offset
        if commit.token_ids and num_overlap < len(commit.token_ids):
            self.tokens.extend(commit.token_ids[num_overlap:])
        self.num_computed = max(self.num_computed, commit.num_computed_tokens)

    def make_findable(self, index: PrefixIndex, num_full: int, block_size: int) -> None:
        """Put its leading blocks, which are full and computed, into the index; those that are in stay as they are."""
        first = self.num_findable
        packed = pack_tokens(self.tokens[first * block_size : num_full * block_size])
        width = block_size * TOKEN_BYTES
        tip = self.tip
        for position in range(first, num_full):
            start = (position - first) * width
            block = self.block_ids[position]
            tip = index.node_of[block] or index.attach(block, tip, self.extras, packed[start : start + width])
        self.tip, self.num_findable = tip, num_full

    def violations(self, block_size: int) -> list[str]:
        """What is wrong with this sequence alone; empty when it is sound."""
        found: list[str] = []
        if len(set(self.block_ids)) != len(self.block_ids):
            found.append(f"its table {self.block_ids} names a block twice")
        if not self.num_findable * block_size <= self.num_computed <= len(self.tokens):
            found.append(
                f"{self.num_findable} findable blocks, {self.num_computed} computed of {len(self.tokens)} tokens"
            )
        if self.num_computed > len(self.block_ids) * block_size:
            found.append(f"{self.num_computed} computed tokens in {len(self.block_ids)} blocks")
        if self.bypass_cache and self.num_findable:
            found.append("it is findable although it bypasses the cache")
        if not self.bypass_cache and self.num_findable != self.num_computed // block_size:
            found.append(f"{self.num_computed} computed tokens, but {self.num_findable} findable blocks")
        return found + self._chain_violations(block_size)

    def _chain_violations(self, block_size: int) -> list[str]:
        """Walk from the last findable block to the root: content and order must be those of the table."""
        node = self.tip
        for position in range(self.num_findable - 1, -1, -1):
            tokens = self.tokens[position * block_size : (position + 1) * block_size]
            if node is None or self.block_ids[position] not in node.blocks or node.tokens != pack_tokens(tokens):
                return [f"findable block {position} does not hang where its content belongs"]
            node = node.parent
        is_root = node is not None and node.parent is None and node.tokens == self.extras
        if self.num_findable and not is_root:
            return ["its chain does not end in the root of its extras"]
        return [] if self.num_findable or self.tip is None else ["a tip without findable blocks"]


def _bad(field: str, description: str) -> OctavoError:
    return invalid_argument(FieldViolation(field, description))


def _mismatch(tokens: "array[int]", commit: Commit, overlap: int) -> OctavoError:
    at = next(i for i in range(overlap) if tokens[commit.token_offset + i] != commit.token_ids[i])
    position = commit.token_offset + at
    return _bad(
        "token_ids",
        f"token {position} is {commit.token_ids[at]}, but {tokens[position]} was given before; "
        "a repeated range must be equal",
    )
