"""Which cached block loses its content next: between tenants by their shares, within one by a policy.

A tenant is what the prefix keys call one (`Extras.tenant`); requests without one are one more. The block is taken from
the tenant that has most blocks for its weight, among those with cached blocks. So a flood of one tenant's prompts
evicts that tenant's own cache as soon as it has more than its share, and never another's below that.

Here belongs the choice. Not here: states and counts of blocks (pool), content (prefix).

Sources: least recently used with the tail of a chain first; LFU with dynamic aging, M. Arlitt et al., "Evaluating
Content Management Techniques for Web Proxy Caches", 2000 (docs/decisions/0080).
"""

import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Protocol

from cache_service.block import BlockId

_HEAP_SLACK = 64  # removed entries that a heap may hold besides as many as live ones


class EvictionOrder(Protocol):
    """The cached blocks of one tenant, each once. O(log blocks) at most."""

    def add(self, block: BlockId, num_hits: int) -> None:
        """It is cached from now on; its content was hit `num_hits` times."""

    def remove(self, block: BlockId) -> None:
        """It is in use again."""

    def pop(self) -> BlockId:
        """The next to go, taken out."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[BlockId]:
        """The next to go first. For the self-check and tests."""


class LeastRecentlyUsed:
    """By the time of the last use."""

    def __init__(self) -> None:
        self._blocks: OrderedDict[BlockId, None] = OrderedDict()

    def add(self, block: BlockId, num_hits: int) -> None:
        self._blocks[block] = None

    def remove(self, block: BlockId) -> None:
        del self._blocks[block]

    def pop(self) -> BlockId:
        return self._blocks.popitem(last=False)[0]

    def __len__(self) -> int:
        return len(self._blocks)

    def __iter__(self) -> Iterator[BlockId]:
        return iter(self._blocks)


class LeastReused:
    """By what is lost: the hits that a block has had, each worth its recomputation, and its age besides.

    A block's value is its hits + 1 + the value of the block that went last when it was last used. So what was hit k
    times outlives k floods of the cache by content that is never hit, and is forgotten then. A block is never worth
    more than the one before it in its chain, which is hit and used whenever it is; of equal ones the least recently
    used goes.
    """

    def __init__(self) -> None:
        self._age = 0
        self._ticks = count()
        self._entries: dict[BlockId, tuple[int, int]] = {}  # block -> (value, tick)
        self._heap: list[tuple[int, int, BlockId]] = []  # of entries, and of some that are no more

    def add(self, block: BlockId, num_hits: int) -> None:
        entry = self._entries[block] = (self._age + num_hits + 1, next(self._ticks))
        heapq.heappush(self._heap, (*entry, block))

    def remove(self, block: BlockId) -> None:
        del self._entries[block]
        if len(self._heap) > 2 * len(self._entries) + _HEAP_SLACK:
            self._heap = [(*entry, block) for block, entry in self._entries.items()]
            heapq.heapify(self._heap)

    def pop(self) -> BlockId:
        while True:
            value, tick, block = heapq.heappop(self._heap)
            if self._entries.get(block) == (value, tick):
                del self._entries[block]
                self._age = value
                return block

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[BlockId]:
        return iter(sorted(self._entries, key=self._entries.__getitem__))


POLICIES: Mapping[str, Callable[[], EvictionOrder]] = {"lru": LeastRecentlyUsed, "reuse": LeastReused}


@dataclass(frozen=True, slots=True)
class Eviction:
    """How an arena evicts.

    Args:
        make_order: a policy, for each tenant one.
        weights: of tenants by name, above 0; of all others 1.
    """

    make_order: Callable[[], EvictionOrder] = LeastRecentlyUsed
    weights: Mapping[str, float] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class TenantBlocks:
    """What one tenant has of the pool. Changed by the pool alone."""

    name: str | None
    weight: float
    cached: EvictionOrder
    num_held: int = 0  # used, fenced and cached blocks
    listed_load: float | None = None  # of its entry among those who can give; None: it is not there

    @property
    def load(self) -> float:
        """Blocks for each part of weight: who has most gives first."""
        return self.num_held / self.weight


class Tenants:
    """Tenants that have blocks, by name, and who gives next: O(log tenants).

    A heap by load. A tenant that is listed in it has one entry that is good, with at least the load that it has now: a
    load that grows gets a new entry, one that shrinks is corrected when its entry comes up.
    """

    def __init__(self, eviction: Eviction) -> None:
        self._eviction = eviction
        self._by_name: dict[str | None, TenantBlocks] = {}
        self._heap: list[tuple[float, int, TenantBlocks]] = []  # (-listed_load, tick, tenant), and bad entries
        self._ticks = count()

    def __iter__(self) -> Iterator[TenantBlocks]:
        return iter(list(self._by_name.values()))

    def hold(self, name: str | None, num_blocks: int) -> TenantBlocks:
        """A tenant gets so many blocks more."""
        tenant = self._by_name.get(name)
        if tenant is None:
            weight = 1.0 if name is None else self._eviction.weights.get(name, 1.0)
            tenant = self._by_name[name] = TenantBlocks(name, weight, self._eviction.make_order())
        tenant.num_held += num_blocks
        if tenant.listed_load is not None and tenant.load > tenant.listed_load:
            self.offer(tenant)
        return tenant

    def drop(self, tenant: TenantBlocks) -> None:
        """One of its blocks became free; a tenant without any is forgotten."""
        tenant.num_held -= 1
        if not tenant.num_held:
            tenant.listed_load = None
            del self._by_name[tenant.name]

    def offer(self, tenant: TenantBlocks) -> None:
        """It can give: it has cached blocks."""
        tenant.listed_load = tenant.load
        heapq.heappush(self._heap, (-tenant.load, next(self._ticks), tenant))
        if len(self._heap) > 2 * len(self._by_name) + _HEAP_SLACK:
            listed = (each for each in self._by_name.values() if each.listed_load is not None)
            self._heap = [(-each.listed_load, next(self._ticks), each) for each in listed]  # type: ignore[operator]
            heapq.heapify(self._heap)

    def next_to_give(self) -> TenantBlocks:
        """Whose cached block goes next. Raises IndexError where there is none."""
        if len(self._by_name) == 1:
            return next(iter(self._by_name.values()))
        heap = self._heap
        while True:
            negative_load, _, tenant = heap[0]
            if tenant.listed_load != -negative_load:
                heapq.heappop(heap)
            elif not tenant.cached:
                heapq.heappop(heap)
                tenant.listed_load = None
            elif tenant.load != tenant.listed_load:
                tenant.listed_load = tenant.load
                heapq.heapreplace(heap, (-tenant.load, next(self._ticks), tenant))
            else:
                return tenant

    def violations(self) -> list[str]:
        """What is wrong with the heap; empty when it is sound."""
        entries = {(id(tenant), -negative_load) for negative_load, _, tenant in self._heap}
        return [
            f"tenant {tenant.name!r} with {tenant.load:g} blocks for its weight is listed with {tenant.listed_load}"
            for tenant in self._by_name.values()
            if (tenant.cached and tenant.listed_load is None)
            or (tenant.listed_load is not None and tenant.listed_load < tenant.load)
            or (tenant.listed_load is not None and (id(tenant), tenant.listed_load) not in entries)
        ]
