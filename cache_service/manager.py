"""The block manager of one arena: every rule about who owns which block.

Pure and synchronous: one mutator, no clock (time is an argument), no IO, no randomness. Every operation either does
all it says or raises and changes nothing. Here belongs what happens to sequences and their blocks. Not here: leases
and their order of messages (service), processes and memory (registry, arena).
"""

from array import array
from collections import Counter
from collections.abc import Sequence as Sequenced

from cache_service import refusal
from cache_service.block import BlockId
from cache_service.events import BlockEvents
from cache_service.eviction import Eviction, TenantBlocks
from cache_service.fence import FenceBook, SessionKey, SessionStep
from cache_service.ledger import Ledger
from cache_service.operation import (
    Allocated,
    Allocation,
    Commit,
    Committed,
    Extended,
    Extension,
    Fork,
    Forked,
    LeaseId,
    Release,
    Released,
    SequenceId,
    SequenceKey,
)
from cache_service.pool import BlockPool
from cache_service.prefix import Extras, HashFunction, PrefixIndex, PrefixNode, blake2b_key, pack_tokens
from cache_service.rebuild import Rebuild, give_back
from cache_service.sequence import Sequence
from cache_service.stats import ManagerStats
from cache_service.times import BlockTimes
from octavo.errors import FieldViolation, OctavoError, invalid_argument


class BlockManager:
    """Sequences over a pool of `num_blocks` blocks of `block_size` tokens; block 0 is reserved.

    Args:
        hash_function: of the prefix keys; answers are right with any function, fast with a good one.
        ledger: where it is recorded which blocks hold what; None: nowhere.
        eviction: which cached block goes when none is free.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        hash_function: HashFunction = blake2b_key,
        ledger: Ledger | None = None,
        eviction: Eviction = Eviction(),  # noqa: B008 - frozen
    ) -> None:
        if block_size < 1:
            raise ValueError(f"block_size is {block_size}: at least 1 token")
        self.block_size = block_size
        self._index = PrefixIndex(num_blocks, block_size, hash_function, ledger)
        self._pool = BlockPool(num_blocks, self._index, eviction)
        self._fences = FenceBook()
        self._sequences: dict[SequenceKey, Sequence] = {}
        self._queried_tokens = 0
        self._hit_tokens = 0
        self._copied_blocks = 0
        self.rebuild = Rebuild(self._pool, self._index, self._fences, self._sequences, block_size)

    @property
    def num_blocks(self) -> int:
        return self._pool.num_blocks

    @property
    def num_sequences(self) -> int:
        return len(self._sequences)

    @property
    def block_times(self) -> BlockTimes:
        return self._pool.times

    @property
    def events(self) -> BlockEvents:
        """What becomes findable and what is no longer."""
        return self._index.events

    def findable(self) -> list[PrefixNode]:
        """What can be hit, each block behind the one before it in its chain. O(blocks)."""
        return self._index.findable()

    def tenants(self) -> list[TenantBlocks]:
        """Who has blocks. To be read, from any thread."""
        return self._pool.tenants()

    # ------------------------------------------------------------------------------------------------ allocate, extend

    def match_prefix(self, token_ids: "array[int]", extras: Extras) -> int:
        """How many leading tokens are findable now. Read only: pins nothing, and counts as no use."""
        return len(self._match(token_ids, extras.encode())) * self.block_size

    def allocate(
        self, lease_id: LeaseId, allocations: Sequenced[Allocation], now: float
    ) -> list[Allocated | OctavoError]:
        """Look up, pin and hand out, for each sequence whole or not at all; then slack, as far as blocks are left.

        Slack comes last, so that it makes no allocation of the batch fail; it may evict cached blocks.
        """
        answers: list[Allocated | OctavoError] = []
        for allocation in allocations:
            try:
                answers.append(self._allocate_one(SequenceKey(lease_id, allocation.sequence_id), allocation, now))
            except OctavoError as error:
                answers.append(error)
        for position, allocation in enumerate(allocations):
            answer = answers[position]
            if allocation.slack_blocks and isinstance(answer, Allocated):
                answers[position] = self._add_slack(lease_id, allocation, answer, now)
        return answers

    def _allocate_one(self, key: SequenceKey, allocation: Allocation, now: float) -> Allocated:
        self._check_allocation(key, allocation)
        extras = allocation.extras.encode()
        chain = [] if allocation.bypass_cache else self._match(allocation.token_ids, extras)
        hits = [self._choose_twin(node) for node in chain]
        num_new = self._blocks_of(len(allocation.token_ids)) - len(hits)
        num_available = self._pool.num_available - self._pool.num_cached_among(hits)
        if num_new > num_available:
            raise self._no_blocks(num_new, num_available)
        tenant = allocation.extras.tenant
        self._pool.pin(hits, now, tenant)
        block_ids = hits + self._pool.take(num_new, now, tenant)
        self._sequences[key] = sequence = Sequence(
            allocation.token_ids[:], block_ids, extras, tenant, bypass_cache=allocation.bypass_cache
        )
        sequence.num_findable = len(hits)
        sequence.num_computed = len(hits) * self.block_size
        sequence.tip = chain[-1] if chain else None
        self._count_lookup(allocation, chain)
        return Allocated(tuple(block_ids), sequence.num_computed)

    def _check_allocation(self, key: SequenceKey, allocation: Allocation) -> None:
        if not allocation.token_ids:
            raise invalid_argument(FieldViolation("token_ids", "is empty; at least one token"))
        if key in self._sequences:
            raise refusal.sequence_exists(key.sequence_id)
        self._check_fits(self._blocks_of(len(allocation.token_ids)))

    def _match(self, token_ids: "array[int]", extras: bytes) -> list[PrefixNode]:
        """Nodes to hit: whole blocks, and never the last token, which is always computed."""
        max_blocks = (len(token_ids) - 1) // self.block_size if token_ids else 0
        packed = pack_tokens(token_ids[: max_blocks * self.block_size])
        return self._index.match(extras, packed, max_blocks)

    def _choose_twin(self, node: PrefixNode) -> BlockId:
        """A block in use rather than one that could still be evicted; else the newest."""
        blocks = node.blocks
        if len(blocks) > 1:
            for block in blocks:
                if self._pool.is_owned(block):
                    return block
        return blocks[-1]

    def _count_lookup(self, allocation: Allocation, chain: list[PrefixNode]) -> None:
        for node in chain:
            node.num_hits += 1
        if not allocation.bypass_cache:
            self._queried_tokens += len(allocation.token_ids)
            self._hit_tokens += len(chain) * self.block_size

    def _add_slack(self, lease_id: LeaseId, allocation: Allocation, answer: Allocated, now: float) -> Allocated:
        num_slack = min(allocation.slack_blocks, self._pool.num_available)
        slack = self._pool.take(num_slack, now, allocation.extras.tenant)
        self._sequences[SequenceKey(lease_id, allocation.sequence_id)].block_ids.extend(slack)
        return Allocated((*answer.block_ids, *slack), answer.num_cached_tokens)

    def extend(self, lease_id: LeaseId, extensions: Sequenced[Extension], now: float) -> list[Extended | OctavoError]:
        """Grow tables to absolute lengths: what is needed for all of the batch first, then what is wanted besides.

        A repeated extension is answered again and takes nothing.
        """
        answers: list[Extended | OctavoError] = []
        for extension in extensions:
            try:
                sequence = self._find(lease_id, extension.sequence_id)
                self._check_extension(sequence, extension)
                self._grow(sequence, extension.need_blocks, now)
                answers.append(Extended(tuple(sequence.block_ids[extension.have_blocks :])))
            except OctavoError as error:
                answers.append(error)
        for position, extension in enumerate(extensions):
            if not isinstance(answers[position], OctavoError):
                sequence = self._find(lease_id, extension.sequence_id)
                num_wanted = extension.want_blocks - len(sequence.block_ids)
                if num_wanted > 0 and self._pool.num_available:
                    num_wanted = min(num_wanted, self._pool.num_available)
                    sequence.block_ids += self._pool.take(num_wanted, now, sequence.tenant)
                    answers[position] = Extended(tuple(sequence.block_ids[extension.have_blocks :]))
        return answers

    def _check_extension(self, sequence: Sequence, extension: Extension) -> None:
        if extension.have_blocks > len(sequence.block_ids):
            raise invalid_argument(
                FieldViolation("have_blocks", f"is {extension.have_blocks}, the sequence has {len(sequence.block_ids)}")
            )
        if extension.want_blocks < extension.need_blocks:
            raise invalid_argument(
                FieldViolation(
                    "want_blocks", f"is {extension.want_blocks}: at least need_blocks, {extension.need_blocks}"
                )
            )
        self._check_fits(extension.need_blocks)

    def _grow(self, sequence: Sequence, num_blocks: int, now: float) -> None:
        num_new = num_blocks - len(sequence.block_ids)
        if num_new <= 0:
            return
        if num_new > self._pool.num_available:
            raise self._no_blocks(num_new, self._pool.num_available)
        sequence.block_ids += self._pool.take(num_new, now, sequence.tenant)

    # --------------------------------------------------------------------------------------------------- commit, fork

    def commit(self, lease_id: LeaseId, commit: Commit, now: float) -> Committed:
        """Record tokens and how many of them have KV; every full computed block becomes findable.

        Raises:
            OctavoError: NOT_FOUND, or INVALID_ARGUMENT when a range does not join what is known, differs from it, or
                says more is computed than is known or than the blocks hold.
        """
        sequence = self._find(lease_id, commit.sequence_id)
        sequence.check_commit(commit, self.block_size)
        return self._apply_commit(sequence, commit, now)

    def _apply_commit(self, sequence: Sequence, commit: Commit, now: float) -> Committed:
        num_computed_before = sequence.num_computed
        sequence.apply_commit(commit)
        num_full = sequence.num_computed // self.block_size
        if num_full > sequence.num_findable and not sequence.bypass_cache:
            sequence.make_findable(self._index, num_full, self.block_size)
        if sequence.copy_source is not None and sequence.num_computed > num_computed_before:
            # A step of this sequence was acknowledged, and its copy ran before that step.
            self._pool.unpin([sequence.copy_source], now)
            sequence.copy_source = None
        return Committed(sequence.num_findable)

    def fork(self, lease_id: LeaseId, fork: Fork, now: float) -> Forked:
        """Give children the parent's computed tokens: full blocks are shared, a partly filled one is copied per child.

        The parent's commit comes first, and holds even where there are no blocks for the children.
        A child gets blocks for the computed tokens and nothing more; slack and what the parent has not computed stay
        with the parent. Until a child's first commit the source of its copy is kept from being handed out.

        Raises:
            OctavoError: NOT_FOUND, ALREADY_EXISTS, what the commit raises, INVALID_ARGUMENT, or RESOURCE_EXHAUSTED when
                not every child fits.
        """
        parent = self._find(lease_id, fork.parent_sequence_id)
        self._check_children(lease_id, fork)
        if fork.commit is not None:
            parent.check_commit(fork.commit, self.block_size)
            self._apply_commit(parent, fork.commit, now)
        num_full, num_partial = divmod(parent.num_computed, self.block_size)
        num_children = len(fork.child_sequence_ids)
        num_copies = num_children if num_partial else 0
        if num_copies > self._pool.num_available:
            raise self._no_blocks(num_copies, self._pool.num_available)
        shared = parent.block_ids[:num_full]
        self._pool.pin(shared * num_children, now, parent.tenant)
        copies: list[tuple[BlockId, BlockId]] = []
        if num_partial:
            # A parent that is itself still to be filled by a copy has nothing to copy from but its own source.
            source = parent.block_ids[num_full] if parent.copy_source is None else parent.copy_source
            self._pool.pin([source] * num_children, now, parent.tenant)
            copies = [(source, target) for target in self._pool.take(num_copies, now, parent.tenant)]
        tables = [[*shared, *(target for _, target in copies[i : i + 1])] for i in range(num_children)]
        for i, child_id in enumerate(fork.child_sequence_ids):
            source_of_child = copies[i][0] if copies else None
            self._sequences[SequenceKey(lease_id, child_id)] = _child_of(parent, tables[i], source_of_child)
        self._copied_blocks += num_copies
        return Forked(tuple(map(tuple, tables)), tuple(copies))

    def _check_children(self, lease_id: LeaseId, fork: Fork) -> None:
        children = fork.child_sequence_ids
        if not children or len(set(children)) != len(children):
            raise invalid_argument(FieldViolation("child_sequence_ids", "at least one id, each of them once"))
        for child_id in children:
            if SequenceKey(lease_id, child_id) in self._sequences:
                raise refusal.sequence_exists(child_id)

    # ---------------------------------------------------------------------------------------- release, steps, sessions

    def release(self, lease_id: LeaseId, release: Release, now: float) -> Released:
        """Let go of a sequence, after its last commit; its blocks stay fenced while a step may still touch them.

        Raises:
            OctavoError: NOT_FOUND, or what its commit raises; nothing is released then.
        """
        sequence = self._find(lease_id, release.sequence_id)
        if release.commit is not None:
            sequence.check_commit(release.commit, self.block_size)
            self._apply_commit(sequence, release.commit, now)
        give_back(self._pool, self._fences, sequence.owned_blocks(), release.free_after, now)
        del self._sequences[SequenceKey(lease_id, release.sequence_id)]
        return Released(was_held=True)

    def open_session(self, session: SessionKey) -> None:
        """Steps of this session may touch blocks from now on. Idempotent."""
        self._fences.open_session(session)

    def acknowledge(self, step: SessionStep, now: float) -> None:
        """Every step of the session up to this one has ended."""
        for fence in self._fences.acknowledge(*step):
            self._pool.unfence(fence.blocks, now)

    def close_session(self, session: SessionKey, now: float) -> None:
        """No step of this session runs any more: it was closed, or its executor is dead. Idempotent."""
        for fence in self._fences.close_session(session):
            self._pool.unfence(fence.blocks, now)

    # ------------------------------------------------------------------------------------------------- stats, checks

    def stats(self) -> ManagerStats:
        """Counts, O(1)."""
        pool = self._pool
        return ManagerStats(
            total_blocks=pool.num_blocks,
            free_blocks=pool.num_free,
            cached_blocks=pool.num_cached,
            used_blocks=pool.num_used,
            fenced_blocks=pool.num_fenced,
            reserved_blocks=1,
            num_sequences=len(self._sequences),
            queried_tokens=self._queried_tokens,
            hit_tokens=self._hit_tokens,
            evicted_blocks=pool.num_evicted,
            allocated_blocks=pool.num_taken,
            copied_blocks=self._copied_blocks,
        )

    def self_check(self) -> list[str]:
        """Walk every structure and prove the invariants; what is wrong in words, empty when healthy. O(blocks)."""
        num_owners: Counter[BlockId] = Counter()
        num_fences: Counter[BlockId] = Counter()
        violations: list[str] = []
        for key, sequence in self._sequences.items():
            num_owners.update(sequence.owned_blocks())
            violations.extend(f"sequence {tuple(key)}: {text}" for text in sequence.violations(self.block_size))
        for fence in self._fences.standing():
            num_fences.update(fence.blocks)
        num_fences.update(self.rebuild.unclaimed)
        violations.extend(self._pool.violations(num_owners, num_fences))
        violations.extend(self._index.violations())
        violations.extend(self._fences.violations())
        return violations

    # ------------------------------------------------------------------------------------------------------- helpers

    def _find(self, lease_id: LeaseId, sequence_id: SequenceId) -> Sequence:
        sequence = self._sequences.get(SequenceKey(lease_id, sequence_id))
        if sequence is None:
            raise refusal.unknown_sequence(sequence_id)
        return sequence

    def _blocks_of(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _check_fits(self, num_needed: int) -> None:
        num_usable = self._pool.num_blocks - 1
        if num_needed > num_usable:
            raise refusal.never_fits(num_needed, num_usable, self.block_size)

    def _no_blocks(self, num_needed: int, num_available: int) -> OctavoError:
        return refusal.no_blocks(num_needed, num_available, self._pool.num_fenced, self._pool.num_blocks - 1)


def _child_of(parent: Sequence, block_ids: list[BlockId], copy_source: BlockId | None) -> Sequence:
    computed = parent.tokens[: parent.num_computed]
    child = Sequence(computed, block_ids, parent.extras, parent.tenant, bypass_cache=parent.bypass_cache)
    child.num_computed = parent.num_computed
    child.num_findable = parent.num_findable
    child.tip = parent.tip
    child.copy_source = copy_source
    return child
