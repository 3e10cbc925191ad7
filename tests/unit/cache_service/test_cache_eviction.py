"""Which cached block goes: between tenants, and within one by each policy."""

import random
from array import array
from collections.abc import Sequence

import pytest

from cache_service.block import BlockId
from cache_service.eviction import POLICIES, Eviction, LeastRecentlyUsed, LeastReused, TenantBlocks
from cache_service.manager import BlockManager
from cache_service.operation import Allocated, Allocation, Commit, LeaseId, Release, SequenceId
from cache_service.prefix import Extras, tenant_of

B = 4
LEASE = LeaseId(1)


class Cache:
    """A manager whose requests compute their prompt and end at once."""

    def __init__(self, num_blocks: int, policy: str = "lru", **weights: float) -> None:
        self.manager = BlockManager(num_blocks + 1, B, eviction=Eviction(POLICIES[policy], weights))
        self._next_id = 1

    def start(self, prompt: Sequence[int], tenant: str | None = None) -> tuple[SequenceId, int]:
        """A sequence that stays; its id and cached tokens."""
        sequence_id, self._next_id = SequenceId(self._next_id), self._next_id + 1
        allocation = Allocation(sequence_id, array("I", prompt), Extras(tenant=tenant))
        (answer,) = self.manager.allocate(LEASE, [allocation], 0.0)
        assert isinstance(answer, Allocated), answer
        self.manager.commit(LEASE, Commit(sequence_id, len(prompt), 0, array("I")), 0.0)
        return sequence_id, answer.num_cached_tokens

    def run(self, prompt: Sequence[int], tenant: str | None = None) -> int:
        """Cached tokens."""
        sequence_id, num_cached = self.start(prompt, tenant)
        self.end(sequence_id)
        return num_cached

    def end(self, sequence_id: SequenceId) -> None:
        self.manager.release(LEASE, Release(sequence_id), 0.0)
        assert self.manager.self_check() == []

    def cached(self, prompt: Sequence[int], tenant: str | None = None) -> int:
        return self.manager.match_prefix(array("I", [*prompt, 0]), Extras(tenant=tenant))

    def held(self) -> dict[str | None, int]:
        return {tenant.name: tenant.num_held for tenant in self.manager.tenants()}


def prompt(number: int, num_blocks: int = 1) -> list[int]:
    return [number] * (B * num_blocks)


def test_a_flood_evicts_its_own_tenant_s_cache_and_leaves_another_its_share():
    cache = Cache(12)
    for number in range(6):
        cache.run(prompt(number), "calm")
    for number in range(50):
        cache.run(prompt(100 + number, 3), "flood")
    assert cache.held() == {"calm": 6, "flood": 6}
    assert all(cache.cached(prompt(number), "calm") == B for number in range(6))


def test_what_is_over_the_share_is_given_up():
    cache = Cache(12)
    for number in range(10):
        cache.run(prompt(number), "first")
    for number in range(50):
        cache.run(prompt(100 + number), "second")
    assert cache.held() == {"first": 6, "second": 6}
    assert [cache.cached(prompt(number), "first") for number in range(10)] == [0] * 4 + [B] * 6


def test_weights_divide_the_cache():
    cache = Cache(12, paying=3.0)
    for number in range(50):
        cache.run(prompt(number), "paying")
        cache.run(prompt(number), "free")
    assert cache.held() == {"paying": 9, "free": 3}


def test_one_request_larger_than_its_share_takes_from_its_own_cache_first():
    """What it is about to have counts before anything is taken from others."""
    cache = Cache(12)
    for number in range(6):
        cache.run(prompt(number), "calm")
        cache.run(prompt(number), "big")
    cache.run(prompt(77, 6), "big")
    assert cache.held() == {"calm": 6, "big": 6}


def test_running_requests_come_before_any_cache():
    """Who has nothing cached cannot give: then others do, rather than that nothing runs."""
    cache = Cache(12)
    for number in range(6):
        cache.run(prompt(number), "calm")
    sequence_id, _ = cache.start(prompt(77, 12), "big")
    assert cache.held() == {"big": 12}
    cache.end(sequence_id)


def test_unused_memory_is_everybody_s():
    cache = Cache(12, small=0.1)
    for number in range(12):
        cache.run(prompt(number), "small")
    assert cache.held() == {"small": 12}


def test_requests_without_a_tenant_are_one_more():
    cache = Cache(4)
    for number in range(10):
        cache.run(prompt(number))
        cache.run(prompt(number), "a")
    assert cache.held() == {None: 2, "a": 2}


def test_among_many_tenants_the_one_with_most_for_its_weight_gives():
    """Whatever is held, freed and pinned in between: the heap says what a walk over all would."""
    draw = random.Random(1)
    weights = {f"t{number}": draw.choice([0.5, 1.0, 3.0]) for number in range(30)}
    cache, running = Cache(120, **weights), list[SequenceId]()
    given: list[bool] = []
    tenants = cache.manager._pool._tenants
    choose = tenants.next_to_give

    def checked() -> TenantBlocks:
        chosen = choose()
        given.append(chosen.load == max(tenant.load for tenant in tenants if tenant.cached))
        return chosen

    tenants.next_to_give = checked  # type: ignore[method-assign]
    for _ in range(1500):
        tenant = f"t{int(30 * draw.random() ** 2)}"
        if draw.random() < 0.3 and len(running) < 20:
            running.append(cache.start(prompt(draw.randrange(40), draw.randint(1, 3)), tenant)[0])
        elif draw.random() < 0.3 and running:
            cache.end(running.pop(draw.randrange(len(running))))
        else:
            cache.run(prompt(draw.randrange(40), draw.randint(1, 4)), tenant)
    assert len(given) > 500
    assert all(given)
    assert len(tenants._heap) <= 2 * 30 + 64


def test_a_tenant_without_blocks_is_forgotten():
    cache = Cache(4)
    cache.run([1, 2], "a")  # no full block: nothing to find again
    assert cache.held() == {}


def test_reuse_keeps_what_is_hit_through_floods_and_forgets_it_then():
    cache = Cache(8, "reuse")
    for _ in range(3):
        cache.run([*prompt(1, 2), 0])
    rounds = 0
    while cache.cached(prompt(1, 2)):
        for number in range(8):
            cache.run(prompt(1000 + 8 * rounds + number))
        rounds += 1
    assert rounds in (2, 3)  # hit twice


@pytest.mark.parametrize("policy", list(POLICIES))
def test_the_tail_of_a_chain_goes_before_its_head(policy: str):
    cache = Cache(5, policy)
    cache.run([*prompt(1, 4), 0])
    for number in range(1, 5):
        cache.run(prompt(1000 + number))
        assert cache.cached(prompt(1, 4)) == B * (5 - number)


def test_least_recently_used_is_the_order_of_use():
    order = LeastRecentlyUsed()
    for block in (1, 2, 3):
        order.add(BlockId(block), 0)
    order.remove(BlockId(1))
    order.add(BlockId(1), 9)
    assert list(order) == [2, 3, 1]
    assert [order.pop() for _ in range(3)] == [2, 3, 1]


def test_least_reused_counts_hits_on_top_of_age_and_forgets_removed_entries():
    order = LeastReused()
    for block, num_hits in ((1, 2), (2, 0), (3, 0)):
        order.add(BlockId(block), num_hits)
    assert list(order) == [2, 3, 1]
    assert order.pop() == 2  # of value 1, which is the age now
    order.add(BlockId(4), 1)  # worth 3, as the block that was hit twice before
    assert list(order) == [3, 1, 4]
    for _ in range(1000):
        order.remove(BlockId(4))
        order.add(BlockId(4), 1)
    assert len(order._heap) < 200
    assert [order.pop() for _ in range(3)] == [3, 1, 4]
    assert len(order) == 0


@pytest.mark.parametrize("tenant", [None, "", "a", "ä" * 300])
def test_the_tenant_is_read_back_from_the_key_s_extras(tenant: str | None):
    extras = Extras(model="m", revision="\x04\x01\x00\x00\x00x", adapter="b", tenant=tenant, salt="s")
    assert tenant_of(extras.encode()) == tenant
    assert tenant_of(b"") is None
