"""The pool: which blocks are free, cached, used or fenced, and whose they are.

Owns the counts per block, the stack of free blocks and each tenant's cached ones. No operation slows down with the size
of the pool. Not here: sequences, leases, steps (it only counts owners and fences); which cached block goes next
(eviction).
"""

from collections.abc import Sequence

from cache_service.block import RESERVED_BLOCK, BlockId, BlockState, OwnershipError
from cache_service.eviction import Eviction, TenantBlocks, Tenants
from cache_service.prefix import PrefixIndex
from cache_service.times import BlockTimes


class BlockPool:
    """States of `num_blocks` blocks, block 0 reserved.

    A block's state follows from its counts: owners > 0 is used; else fences > 0 is fenced; else findable is cached;
    else free.
    """

    def __init__(self, num_blocks: int, index: PrefixIndex, eviction: Eviction = Eviction()) -> None:  # noqa: B008
        if num_blocks < 2:
            raise ValueError(f"num_blocks is {num_blocks}: at least 2, of which block 0 is reserved")
        self.num_blocks = num_blocks
        self.num_cached = 0
        self.num_fenced = 0
        self.num_evicted = 0  # ever
        self.num_taken = 0  # ever
        self.times = BlockTimes(num_blocks)
        self._index = index
        self._owners = [0] * num_blocks  # block id -> block tables (and copies to come) that name it
        self._fences = [0] * num_blocks  # block id -> fences around it
        self._free = [BlockId(block) for block in range(num_blocks - 1, 0, -1)]  # a stack, low ids on top
        self._tenants = Tenants(eviction)
        # Block id -> whose it is: of a used or cached block always known, of a fenced one unless it was taken over.
        self._tenant_of: list[TenantBlocks | None] = [None] * num_blocks

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - 1 - len(self._free) - self.num_cached - self.num_fenced

    @property
    def num_available(self) -> int:
        """What `take` can hand out: free blocks, and cached ones whose content is given up."""
        return len(self._free) + self.num_cached

    def state_of(self, block: BlockId) -> BlockState:
        """The state of one block."""
        if block == RESERVED_BLOCK:
            return BlockState.RESERVED
        if self._owners[block]:
            return BlockState.USED
        if self._fences[block]:
            return BlockState.FENCED
        return BlockState.FREE if self._index.node_of[block] is None else BlockState.CACHED

    def is_owned(self, block: BlockId) -> bool:
        """Whether some block table names it."""
        return self._owners[block] > 0

    def num_cached_among(self, blocks: Sequence[BlockId]) -> int:
        """How many of these (distinct, findable) are in the state cached, so that pinning them takes from `take`."""
        owners, fences = self._owners, self._fences
        return sum(not owners[block] and not fences[block] for block in blocks)

    # ------------------------------------------------------------------------------------------------ taking, pinning

    def take(self, num_blocks: int, now: float, tenant: str | None = None) -> list[BlockId]:
        """Hand out blocks with one owner each to a tenant: free ones first, then cached ones.

        Raises:
            OwnershipError: more than `num_available`; nothing changed.
        """
        if num_blocks > self.num_available:
            raise OwnershipError(f"{num_blocks} blocks of {self.num_available} available")
        if not num_blocks:
            return []
        free, owners, born_at, tenant_of = self._free, self._owners, self.times.born_at, self._tenant_of
        holder = self._tenants.hold(tenant, num_blocks)  # first: what it is about to have counts for who gives
        if len(free) < num_blocks:
            self._evict(num_blocks - len(free), now)
        taken = [free.pop() for _ in range(num_blocks)]
        for block in taken:
            owners[block] = 1
            born_at[block] = now
            tenant_of[block] = holder
        self.num_taken += num_blocks
        return taken

    def pin(self, blocks: Sequence[BlockId], now: float, tenant: str | None = None) -> None:
        """One more owner for each block, all of this tenant; a cached or fenced one becomes used.

        Raises:
            OwnershipError: a block is free or reserved; nothing changed.
        """
        owners, fences, node_of = self._owners, self._fences, self._index.node_of
        for block in blocks:
            if not (owners[block] or fences[block] or node_of[block]):
                raise OwnershipError(f"block {block} is {self.state_of(block).value} and cannot be pinned")
        for block in blocks:
            if not owners[block]:
                self._leave_idle(block, now, tenant)
            owners[block] += 1

    def _leave_idle(self, block: BlockId, now: float, tenant: str | None) -> None:
        holder = self._tenant_of[block]
        if self._fences[block]:
            self.num_fenced -= 1
            if holder is None:
                self._tenant_of[block] = self._tenants.hold(tenant, 1)
            return
        assert holder is not None, "somebody's cached block"
        holder.cached.remove(block)
        self.num_cached -= 1
        self.times.reused(block, now)

    # ------------------------------------------------------------------------------------------------ giving back

    def unpin(self, blocks: Sequence[BlockId], now: float, *, fenced: bool = False) -> None:
        """One owner less for each block, and one fence more if `fenced`. Of blocks that become cached in one call, the
        first is the first to be evicted: name the tail of a chain first.

        Raises:
            OwnershipError: a block has fewer owners than times it is named (a double free); nothing changed.
        """
        idle = self._drop_owners(blocks)
        if fenced:
            fences = self._fences
            for block in blocks:
                fences[block] += 1
        self._settle(idle, now)

    def unfence(self, blocks: Sequence[BlockId], now: float) -> None:
        """One fence less around each block; order as in `unpin`."""
        fences, owners, idle = self._fences, self._owners, []
        for block in blocks:
            fences[block] -= 1
            if not fences[block] and not owners[block]:
                idle.append(block)
        self.num_fenced -= len(idle)
        self._settle(idle, now)

    def _drop_owners(self, blocks: Sequence[BlockId]) -> list[BlockId]:
        """Returns those that have none any more, each once, whatever a table says: none must enter a list twice."""
        owners = self._owners
        for block in blocks:
            owners[block] -= 1
        idle = [block for block in dict.fromkeys(blocks) if owners[block] < 1]
        if any(map(owners.__getitem__, idle)):  # below 0
            block = next(block for block in idle if owners[block])
            for dropped in blocks:
                owners[dropped] += 1
            raise OwnershipError(f"block {block} is {self.state_of(block).value}: a double free")
        return idle

    def _settle(self, blocks: Sequence[BlockId], now: float) -> None:
        """Put blocks without owners where they belong, in this order."""
        last_used_at, fences = self.times.last_used_at, self._fences
        node_of, tenant_of, tenants = self._index.node_of, self._tenant_of, self._tenants
        num_cached = num_fenced = 0
        for block in blocks:
            last_used_at[block] = now
            if fences[block]:
                num_fenced += 1
            elif (node := node_of[block]) is None:
                self._set_free(block)
            else:
                holder = tenant_of[block]
                if holder is None:
                    holder = tenant_of[block] = tenants.hold(node.tenant(), 1)
                holder.cached.add(block, node.num_hits)
                if holder.listed_load is None:
                    tenants.offer(holder)
                num_cached += 1
        self.num_cached += num_cached
        self.num_fenced += num_fenced

    def _set_free(self, block: BlockId) -> None:
        holder, self._tenant_of[block] = self._tenant_of[block], None
        if holder is not None:
            self._tenants.drop(holder)
        self._free.append(block)

    def fence_all(self) -> list[BlockId]:
        """In a pool of which nothing was handed out: one fence around every block, which is then of unknown use.

        Returns:
            All blocks except the reserved one.
        """
        blocks, self._free = self._free, []
        for block in blocks:
            self._fences[block] = 1
        self.num_fenced = len(blocks)
        return blocks

    # ------------------------------------------------------------------------------------------------------- eviction

    def _evict(self, num_blocks: int, now: float) -> None:
        tenants, tenant_of, free = self._tenants, self._tenant_of, self._free
        evicted, forget = self.times.evicted, self._index.forget
        for _ in range(num_blocks):
            tenant = tenants.next_to_give()
            block = tenant.cached.pop()
            evicted(block, now)
            forget(block)
            tenant_of[block] = None
            tenants.drop(tenant)
            free.append(block)
        self.num_cached -= num_blocks
        self.num_evicted += num_blocks

    def tenants(self) -> list[TenantBlocks]:
        """Who has blocks. To be read, from any thread."""
        return list(self._tenants)

    def eviction_order(self) -> list[BlockId]:
        """Cached blocks of each tenant, the next to go first. For the self-check and tests."""
        return [block for tenant in self._tenants for block in tenant.cached]

    # ------------------------------------------------------------------------------------------------- self-check

    def violations(self, num_owners: dict[BlockId, int], num_fences: dict[BlockId, int]) -> list[str]:
        """What is wrong, given how many owners and fences each block should have; empty when the pool is sound."""
        found: list[str] = []
        members: dict[BlockState, set[BlockId]] = {state: set() for state in BlockState}
        for number in range(self.num_blocks):
            block = BlockId(number)
            members[self.state_of(block)].add(block)
            if self._owners[block] != num_owners.get(block, 0):
                found.append(f"block {block} counts {self._owners[block]} owners and has {num_owners.get(block, 0)}")
            if self._fences[block] != num_fences.get(block, 0):
                found.append(f"block {block} counts {self._fences[block]} fences and has {num_fences.get(block, 0)}")
        if self._owners[RESERVED_BLOCK] or self._fences[RESERVED_BLOCK] or self._index.node_of[RESERVED_BLOCK]:
            found.append("the reserved block is owned, fenced or findable")
        order = self.eviction_order()
        found.extend(_list_violations("free", self._free, members[BlockState.FREE], self.num_free))
        found.extend(_list_violations("cached", order, members[BlockState.CACHED], self.num_cached))
        found.extend(self._count_violations(members))
        found.extend(self._tenant_violations(members))
        return found

    def _tenant_violations(self, members: dict[BlockState, set[BlockId]]) -> list[str]:
        found: list[str] = []
        for tenant in self._tenants:
            num_held = sum(holder is tenant for holder in self._tenant_of)
            if num_held != tenant.num_held:
                found.append(f"tenant {tenant.name!r} counts {tenant.num_held} blocks and has {num_held}")
            found += [
                f"block {block} is cached for {tenant.name!r} and not its own"
                for block in tenant.cached
                if self._tenant_of[block] is not tenant
            ]
        held = members[BlockState.USED] | members[BlockState.CACHED]
        found += [f"block {block} is nobody's" for block in sorted(held) if self._tenant_of[block] is None]
        kept = [block for block in self._free if self._tenant_of[block] is not None]
        found += [f"block {block} is free and somebody's" for block in kept]
        return found + self._tenants.violations()

    def _count_violations(self, members: dict[BlockState, set[BlockId]]) -> list[str]:
        counts = {
            BlockState.FREE: self.num_free,
            BlockState.CACHED: self.num_cached,
            BlockState.USED: self.num_used,
            BlockState.FENCED: self.num_fenced,
            BlockState.RESERVED: 1,
        }
        found = [
            f"{counts[state]} blocks are counted {state.value} and {len(members[state])} are"
            for state in BlockState
            if counts[state] != len(members[state])
        ]
        if sum(counts.values()) != self.num_blocks:
            found.append(f"the states sum to {sum(counts.values())} of {self.num_blocks}")
        return found


def _list_violations(name: str, listed: list[BlockId], members: set[BlockId], count: int) -> list[str]:
    if len(listed) == count and len(set(listed)) == count and set(listed) == members:
        return []
    return [f"the {name} list holds {sorted(listed)}, counts {count}, and should hold {sorted(members)}"]
