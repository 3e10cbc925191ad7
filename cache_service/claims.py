"""Claims: what a client says that it holds, against what the cache service knows and what records prove.

A claim is believed as a commit is, unless something known contradicts it. Here belongs what contradicts. Not here: when
claims are made (rebuild), the states of blocks (pool).
"""

from collections.abc import Iterable

from cache_service import refusal
from cache_service.block import BlockId
from cache_service.ledger import TOKEN_BYTES
from cache_service.operation import SequenceSnapshot
from cache_service.pool import BlockPool
from cache_service.prefix import PrefixIndex, PrefixNode, pack_tokens
from cache_service.sequence import Sequence


class Claims:
    """The claims of one client, made one after the other.

    Args:
        held: blocks that this client owned before.
        foreign: blocks that tables of other clients name.
        is_open: whether blocks may be claimed that the client is not known to have owned: in a rebuild.
    """

    def __init__(
        self,
        pool: BlockPool,
        index: PrefixIndex,
        block_size: int,
        held: Iterable[BlockId],
        foreign: Iterable[BlockId],
        *,
        is_open: bool,
    ) -> None:
        self._pool = pool
        self._index = index
        self._block_size = block_size
        self._held = frozenset(held)
        self._foreign = frozenset(foreign)
        self._is_open = is_open
        self._claimed_by: dict[BlockId, Sequence] = {}  # blocks that are not findable -> who claimed them

    def sequence_of(self, snapshot: SequenceSnapshot) -> Sequence:
        """The sequence that a snapshot describes, checked against all that is known; owns nothing yet.

        Raises:
            OctavoError: ABORTED CLAIM_REFUSED, with what contradicts it.
        """
        self._check_shape(snapshot)
        sequence = Sequence(
            snapshot.token_ids[:],
            list(snapshot.block_ids),
            snapshot.extras.encode(),
            snapshot.extras.tenant,
            bypass_cache=snapshot.bypass_cache,
        )
        sequence.num_computed = snapshot.num_computed_tokens
        sequence.copy_source = snapshot.copy_source
        num_full = sequence.num_computed // self._block_size
        num_proven = 0 if sequence.bypass_cache else self._count_proven(snapshot, sequence, num_full)
        for position in range(num_proven, len(sequence.block_ids)):
            self._check_unproven(snapshot, sequence, position)
        return sequence

    def own(self, sequence: Sequence) -> None:
        """Other claims of this client are checked against this one from now on."""
        for block in sequence.block_ids:
            if self._index.node_of[block] is None:
                self._claimed_by.setdefault(block, sequence)

    def _check_shape(self, snapshot: SequenceSnapshot) -> None:
        blocks, num_computed = snapshot.block_ids, snapshot.num_computed_tokens
        named = (*blocks, snapshot.copy_source) if snapshot.copy_source is not None else blocks
        if not all(0 < block < self._pool.num_blocks for block in named):
            raise refusal.claim_refused(snapshot.sequence_id, f"its blocks are 1 to {self._pool.num_blocks - 1}")
        if len(set(blocks)) != len(blocks):
            raise refusal.claim_refused(snapshot.sequence_id, "its table names a block twice")
        if num_computed > min(len(snapshot.token_ids), len(blocks) * self._block_size):
            raise refusal.claim_refused(
                snapshot.sequence_id,
                f"{num_computed} computed tokens, {len(snapshot.token_ids)} tokens, {len(blocks)} blocks",
            )
        source = snapshot.copy_source
        if source is not None and not (self._is_open or source in self._held):
            raise refusal.claim_refused(snapshot.sequence_id, f"block {source}, the source of its copy, is not its own")

    def _count_proven(self, snapshot: SequenceSnapshot, sequence: Sequence, num_full: int) -> int:
        """Leading blocks of which records say what the snapshot says; the first without a record ends them."""
        node: PrefixNode | None = None
        for position in range(num_full):
            block = sequence.block_ids[position]
            found = self._index.node_of[block]
            if found is None:
                return position
            tokens = self._tokens_at(sequence, position)
            node = self._index.child_of(node, sequence.extras, tokens)
            if found is not node:
                raise refusal.claim_refused(snapshot.sequence_id, f"block {block} holds other tokens by its record")
        return num_full

    def _check_unproven(self, snapshot: SequenceSnapshot, sequence: Sequence, position: int) -> None:
        block = sequence.block_ids[position]
        if self._index.node_of[block] is not None:
            if not self._is_node_of(sequence, position):
                raise refusal.claim_refused(snapshot.sequence_id, f"block {block} holds other tokens by its record")
            return
        other = self._claimed_by.get(block)
        if other is not None and not self._is_shared(other, sequence, position):
            raise refusal.claim_refused(snapshot.sequence_id, f"block {block} is claimed for another sequence")
        if block in self._foreign or not (self._is_open or block in self._held):
            raise refusal.claim_refused(snapshot.sequence_id, f"block {block} belongs to another client")

    def _is_node_of(self, sequence: Sequence, position: int) -> bool:
        """Whether a recorded block behind one without a record (a twin of it is recorded) holds what it should."""
        if sequence.bypass_cache or position >= sequence.num_computed // self._block_size:
            return False
        node: PrefixNode | None = None
        for before in range(position + 1):
            node = self._index.child_of(node, sequence.extras, self._tokens_at(sequence, before))
            if node is None:
                return False
        return node is self._index.node_of[sequence.block_ids[position]]

    def _is_shared(self, first: Sequence, second: Sequence, position: int) -> bool:
        """Whether both hold the same history in a block that is in neither's way: full and computed."""
        end = (position + 1) * self._block_size
        return (
            min(first.num_computed, second.num_computed) >= end
            and first.block_ids[position : position + 1] == second.block_ids[position : position + 1]
            and first.extras == second.extras
            and first.tokens[:end] == second.tokens[:end]
        )

    def _tokens_at(self, sequence: Sequence, position: int) -> bytes:
        width = self._block_size
        packed = pack_tokens(sequence.tokens[position * width : (position + 1) * width])
        assert len(packed) == width * TOKEN_BYTES, "only full blocks are looked up"
        return packed
