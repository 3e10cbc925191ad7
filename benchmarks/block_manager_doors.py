"""Two ways to the block manager for benchmarks/block_manager.py: the object itself, and the service over gRPC."""

import os
from array import array
from collections.abc import Awaitable
from typing import Any, Protocol

from cache_service.geometry import KvGeometry, LayerGeometry, lay_out
from cache_service.manager import BlockManager
from cache_service.operation import Allocation, Commit, Extension, LeaseId, Release, SequenceId
from cache_service.prefix import Extras
from octavo.errors import OctavoError
from octavo.rpc import open_channel
from octavo.v1 import cache_pb2, cache_pb2_grpc

BLOCK_SIZE = 16
LEASE = LeaseId(1)


class Door(Protocol):
    """What a client does with one lease. A call over gRPC is to be awaited."""

    def allocate(self, sequence_id: int, tokens: "array[int]") -> Awaitable[None] | None: ...

    def commit(self, sequence_id: int, num_computed: int, new: "array[int]") -> Awaitable[None] | None:
        """`new` are the last of the computed tokens."""

    def extend(self, sequence_id: int, have: int) -> Awaitable[None] | None:
        """One block more."""

    def release(self, sequence_id: int) -> Awaitable[None] | None: ...

    def look_up(self, tokens: "array[int]") -> int | Awaitable[int]:
        """How many of them are cached."""

    def num_free(self) -> int | Awaitable[int]: ...


class InProcess:
    """The manager itself."""

    def __init__(self, num_blocks: int) -> None:
        self._manager = BlockManager(num_blocks, BLOCK_SIZE)

    def allocate(self, sequence_id: int, tokens: "array[int]") -> None:
        (answer,) = self._manager.allocate(LEASE, [Allocation(SequenceId(sequence_id), tokens)], 0.0)
        assert not isinstance(answer, OctavoError), answer

    def commit(self, sequence_id: int, num_computed: int, new: "array[int]") -> None:
        self._manager.commit(LEASE, Commit(SequenceId(sequence_id), num_computed, num_computed - len(new), new), 0.0)

    def extend(self, sequence_id: int, have: int) -> None:
        (answer,) = self._manager.extend(LEASE, [Extension(SequenceId(sequence_id), have, have + 1, have + 1)], 0.0)
        assert not isinstance(answer, OctavoError), answer

    def release(self, sequence_id: int) -> None:
        self._manager.release(LEASE, Release(SequenceId(sequence_id)), 0.0)

    def look_up(self, tokens: "array[int]") -> int:
        return self._manager.match_prefix(tokens, Extras())

    def num_free(self) -> int:
        return self._manager.stats().free_blocks


class OverGrpc:
    """A lease at a cache service; one call at a time, as a router has it."""

    def __init__(self, stub: cache_pb2_grpc.BlockManagerServiceStub, lease_id: int) -> None:
        self._stub = stub
        self._lease_id = lease_id
        self._number = 0

    def _header(self) -> cache_pb2.LeaseHeader:
        self._number += 1
        return cache_pb2.LeaseHeader(lease_id=self._lease_id, sequence_number=self._number)

    async def allocate(self, sequence_id: int, tokens: "array[int]") -> None:
        item = cache_pb2.SequenceAllocation(sequence_id=sequence_id, token_ids=tokens)
        request = cache_pb2.AllocateSequencesRequest(header=self._header(), arena_id="cpu", allocations=[item])
        _check((await self._stub.AllocateSequences(request)).sequences[0].status)

    async def commit(self, sequence_id: int, num_computed: int, new: "array[int]") -> None:
        offset = num_computed - len(new)
        item = cache_pb2.SequenceCommit(
            sequence_id=sequence_id, num_computed_tokens=num_computed, token_offset=offset, token_ids=new
        )
        request = cache_pb2.CommitBlocksRequest(header=self._header(), commits=[item])
        _check(*(await self._stub.CommitBlocks(request)).statuses)

    async def extend(self, sequence_id: int, have: int) -> None:
        item = cache_pb2.SequenceExtension(
            sequence_id=sequence_id, have_blocks=have, need_blocks=have + 1, want_blocks=have + 1
        )
        request = cache_pb2.ExtendSequencesRequest(header=self._header(), extensions=[item])
        _check((await self._stub.ExtendSequences(request)).sequences[0].status)

    async def release(self, sequence_id: int) -> None:
        item = cache_pb2.SequenceRelease(sequence_id=sequence_id)
        request = cache_pb2.ReleaseSequencesRequest(header=self._header(), releases=[item])
        _check(*(await self._stub.ReleaseSequences(request)).statuses)

    async def look_up(self, tokens: "array[int]") -> int:
        request = cache_pb2.MatchPrefixRequest(arena_id="cpu", token_ids=tokens)
        return int((await self._stub.MatchPrefix(request)).num_cached_tokens)

    async def num_free(self) -> int:
        (arena,) = (await self._stub.GetStats(cache_pb2.GetStatsRequest())).arenas
        return int(arena.free_blocks)


def _check(status: Any) -> None:
    assert not status.code, status


async def open_doors(address: str, num_blocks: int, count: int) -> list[OverGrpc]:
    """Leases on an arena of so many blocks, which is made for this."""
    stub = cache_pb2_grpc.BlockManagerServiceStub(open_channel(address))
    layer = cache_pb2.LayerGeometry(num_kv_heads=1, k_head_dim=1, v_head_dim=1)
    block_bytes = lay_out(KvGeometry(BLOCK_SIZE, "float32", (LayerGeometry(1, 1, 1),))).block_bytes
    geometry = cache_pb2.KvGeometry(block_size=BLOCK_SIZE, dtype="float32", layers=[layer])
    about: Any = {"executor_id": "benchmark", "arena_id": "cpu", "model_fingerprint": "none", "pid": os.getpid()}
    request = cache_pb2.RegisterExecutorRequest(geometry=geometry, kv_bytes=num_blocks * block_bytes, **about)
    registered = await stub.RegisterExecutor(request)
    assert registered.arena.num_blocks == num_blocks, registered.arena.num_blocks
    leases = [await stub.OpenLease(cache_pb2.OpenLeaseRequest(client_id=f"client {n}")) for n in range(count)]
    return [OverGrpc(stub, lease.lease_id) for lease in leases]
