"""The rebuild of one arena's tables after its cache service died.

Nothing of an arena that was taken over is free: one fence stands around all its blocks until every client has said what
it holds, and until the steps that were in flight then have ended. So no block is handed out that anybody may still
write or read, and clients need not remember what they had released.

    records           findable, fenced
    a claim           one more owner; computed full blocks become findable as by a commit
    all have claimed  the fence waits for the steps sent until then, and falls: cached, free or used

Not here: which claims hold (claims), which clients there are and whether all have spoken (succession).
"""

from collections.abc import Mapping
from collections.abc import Sequence as Sequenced

from cache_service.block import BlockId
from cache_service.claims import Claims
from cache_service.fence import Fence, FenceBook, SessionStep
from cache_service.ledger import Record
from cache_service.operation import LeaseId, SequenceKey, SequenceSnapshot
from cache_service.pool import BlockPool
from cache_service.prefix import PrefixIndex
from cache_service.sequence import Sequence
from octavo.errors import OctavoError


class Rebuild:
    """Part of one manager, whose tables it fills.

    Attributes:
        unclaimed: blocks that are fenced until all clients have spoken, in the order in which they come free then.
        is_broken: the check at its end found a fault; nothing is handed out then.
    """

    def __init__(
        self,
        pool: BlockPool,
        index: PrefixIndex,
        fences: FenceBook,
        sequences: dict[SequenceKey, Sequence],
        block_size: int,
    ) -> None:
        self.unclaimed: list[BlockId] = []
        self.is_broken = False
        self._pool = pool
        self._index = index
        self._fences = fences
        self._sequences = sequences
        self._block_size = block_size
        self._last_fence: Fence | None = None

    @property
    def is_unfinished(self) -> bool:
        """Whether blocks are held back because of what an earlier cache service may have handed out."""
        is_fenced = self._last_fence is not None and self._last_fence.num_waiting > 0
        return bool(self.unclaimed) or is_fenced or self.is_broken

    def begin(self, records: Mapping[BlockId, Record]) -> int:
        """In a manager of which nothing was asked yet: find what records prove, and fence every block.

        Returns:
            How many blocks are findable.
        """
        order = self._index.restore(records)
        known = set(order)
        self.unclaimed = order + [block for block in self._pool.fence_all() if block not in known]
        return len(order)

    def reconcile(
        self, lease_id: LeaseId, snapshots: Sequenced[SequenceSnapshot], sent: Sequenced[SessionStep], now: float
    ) -> list[OctavoError | None]:
        """Replace the sequences of a lease by those of the snapshots, each whole or refused (ABORTED CLAIM_REFUSED).

        What it held and does not claim is released, fenced by the steps sent.
        """
        dropped = [self._sequences.pop(key) for key in list(self._sequences) if key.lease_id == lease_id]
        held = [block for sequence in dropped for block in sequence.owned_blocks()]
        foreign = {block for sequence in self._sequences.values() for block in sequence.block_ids}
        claims = Claims(self._pool, self._index, self._block_size, held, foreign, is_open=bool(self.unclaimed))
        answers: list[OctavoError | None] = []
        for snapshot in snapshots:
            try:
                sequence = claims.sequence_of(snapshot)
                self._take_back(SequenceKey(lease_id, snapshot.sequence_id), sequence, now)
                claims.own(sequence)
                answers.append(None)
            except OctavoError as error:
                answers.append(error)
        give_back(self._pool, self._fences, held, sent, now)
        return answers

    def _take_back(self, key: SequenceKey, sequence: Sequence, now: float) -> None:
        self._pool.pin(sequence.owned_blocks(), now, sequence.tenant)
        self._sequences[key] = sequence
        if not sequence.bypass_cache:
            sequence.make_findable(self._index, sequence.num_computed // self._block_size, self._block_size)

    def finish(self, sent: Sequenced[SessionStep], now: float) -> None:
        """All clients have spoken: what nobody claimed comes free or cached when the steps sent until then ended."""
        blocks, self.unclaimed = self.unclaimed, []
        outstanding = self._fences.outstanding(sent)
        if outstanding:
            self._last_fence = self._fences.raise_fence(blocks, outstanding)
        else:
            self._pool.unfence(blocks, now)


def give_back(
    pool: BlockPool, fences: FenceBook, blocks: Sequenced[BlockId], free_after: Sequenced[SessionStep], now: float
) -> None:
    """One owner less for each block, which stays fenced while a step of these may still touch it."""
    outstanding = fences.outstanding(free_after)
    pool.unpin(blocks, now, fenced=bool(outstanding))
    if outstanding:
        fences.raise_fence(blocks, outstanding)
