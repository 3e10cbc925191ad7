"""The pool and the prefix index by themselves: counts, double frees, the order of eviction, twins, collisions."""

from array import array

import pytest

from cache_service.block import RESERVED_BLOCK, BlockId, BlockState, OwnershipError
from cache_service.pool import BlockPool
from cache_service.prefix import Extras, HashFunction, PrefixIndex, blake2b_key, pack_tokens
from tests.property.cache_service.cache_drivers import HASHES

B = 2


def make_pool(num_blocks: int, hash_function: HashFunction = blake2b_key) -> tuple[BlockPool, PrefixIndex]:
    index = PrefixIndex(num_blocks, B, hash_function)
    return BlockPool(num_blocks, index), index


def packed(*ids: int) -> bytes:
    return pack_tokens(array("I", ids))


def snapshot(pool: BlockPool) -> list[object]:
    states = [pool.state_of(BlockId(b)) for b in range(pool.num_blocks)]
    return [*states, pool.num_free, pool.num_cached, pool.num_fenced, pool.eviction_order()]


@pytest.mark.parametrize("blocks", [[1, 2, 1], [3], [RESERVED_BLOCK], [2, RESERVED_BLOCK]])
def test_a_double_free_is_loud_and_changes_nothing(blocks: list[int]) -> None:
    """Field failure 7: a table that names a block twice, one that is free, and the reserved one."""
    pool, _ = make_pool(4)
    assert pool.take(2, now=0.0) == [1, 2]
    before = snapshot(pool)
    with pytest.raises(OwnershipError):
        pool.unpin([BlockId(block) for block in blocks], now=1.0)
    assert snapshot(pool) == before
    assert pool.violations({BlockId(1): 1, BlockId(2): 1}, {}) == []


def test_a_block_that_is_owned_twice_by_one_table_counts_twice() -> None:
    """Field failure 7: refcounts count owners; each naming is one."""
    pool, _ = make_pool(3)
    [block] = pool.take(1, now=0.0)
    pool.pin([block], now=0.0)
    pool.unpin([block, block], now=0.0)
    assert pool.state_of(block) is BlockState.FREE
    assert pool.num_free == 2
    assert pool.violations({}, {}) == []


@pytest.mark.parametrize("block", [RESERVED_BLOCK, BlockId(1)])
def test_what_is_free_or_reserved_cannot_be_pinned(block: BlockId) -> None:
    pool, _ = make_pool(3)
    with pytest.raises(OwnershipError):
        pool.pin([block], now=0.0)


def test_more_than_is_available_is_not_taken() -> None:
    pool, _ = make_pool(3)
    with pytest.raises(OwnershipError):
        pool.take(3, now=0.0)
    assert pool.num_free == 2


def test_times_follow_a_block_from_birth_to_eviction() -> None:
    pool, index = make_pool(2)
    [block] = pool.take(1, now=10.0)
    index.attach(block, None, b"", packed(1, 2))
    pool.unpin([block], now=20.0)
    pool.pin([block], now=23.0)
    pool.unpin([block], now=30.0)
    pool.take(1, now=70.0)
    assert pool.times.reuse_gap.sum_s == 3.0
    assert pool.times.idle_before_evict.sum_s == 40.0
    assert pool.times.lifetime.sum_s == 60.0
    assert sum(pool.times.lifetime.counts) == 1


def test_the_self_check_sees_what_is_wrong() -> None:
    pool, index = make_pool(4)
    first, second = pool.take(2, now=0.0)
    assert pool.violations({first: 1}, {}) != []
    assert pool.violations({first: 1, second: 1}, {first: 1}) != []
    node = index.attach(first, None, b"", packed(1, 2))
    assert index.violations() == []
    node.num_children = 1
    assert index.violations() != []


@pytest.mark.parametrize("name", list(HASHES))
def test_a_child_is_found_again_when_its_parent_was_computed_anew(name: str) -> None:
    """A node without blocks keeps its place as long as children hang on it."""
    index = PrefixIndex(4, B, HASHES[name])
    parent = index.attach(BlockId(1), None, b"", packed(1, 2))
    index.attach(BlockId(2), parent, b"", packed(3, 4))
    index.forget(BlockId(1))
    assert index.match(b"", packed(1, 2, 3, 4), 2) == []
    assert index.attach(BlockId(3), None, b"", packed(1, 2)) is parent
    assert [node.blocks for node in index.match(b"", packed(1, 2, 3, 4), 2)] == [[3], [2]]
    for block in (3, 2):
        index.forget(BlockId(block))
    assert list(index.nodes()) == []
    assert index.violations() == []


def test_keys_are_the_same_in_every_process_and_release() -> None:
    """Field failure 4: the bytes behind a key are fixed; a change here loses every cache that outlives a process."""
    index = PrefixIndex(2, B)
    extras = Extras(model="m", revision="1", kv_dtype="float32", salt="").encode()
    assert extras == (
        b"octavo-kv-1\x00\x01\x00\x00\x00m\x01\x01\x00\x00\x001\x02\x07\x00\x00\x00float32\x05\x00\x00\x00\x00"
    )
    node = index.attach(BlockId(1), None, extras, packed(1, 2**32 - 1))
    assert node.key == blake2b_key(blake2b_key(extras) + b"\x01\x00\x00\x00\xff\xff\xff\xff")
