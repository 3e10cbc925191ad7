"""One cache service behind two doors: called in process, and over gRPC. The suites run over both.

Memory, processes and clocks are fakes: no executor process and no shared memory is needed.
"""

import asyncio
from array import array
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import grpc
from google.protobuf.duration_pb2 import Duration

from cache_service.app import Outside, running
from cache_service.config import CacheServiceConfig
from cache_service.eviction import POLICIES, Eviction
from cache_service.fence import SessionKey, SessionStep
from cache_service.geometry import ArenaDescription, KvGeometry, LayerGeometry, lay_out
from cache_service.journal import JOURNAL_BYTES, Journal
from cache_service.lease import Lease
from cache_service.lease_operations import LeaseOperations
from cache_service.ledger import BufferLedger, ledger_bytes
from cache_service.operation import (
    Allocated,
    Allocation,
    Commit,
    Extended,
    Extension,
    Fork,
    Forked,
    LeaseHeader,
    LeaseId,
    Release,
    SequenceSnapshot,
)
from cache_service.prefix import Extras, HashFunction, blake2b_key
from cache_service.registration import Registration
from cache_service.service import CacheService
from cache_service.servicer import Clock
from octavo.errors import OctavoError
from octavo.rpc import error_of, error_of_call, open_channel
from octavo.v1 import cache_pb2, cache_pb2_grpc

ARENA = "cpu"
FINGERPRINT = "model-1"
TTL_S = 10.0

T = TypeVar("T")
LRU = Eviction(POLICIES["lru"])


def constant_hash(message: bytes) -> bytes:
    """Every key collides with every other."""
    return b"x"


def three_bit_hash(message: bytes) -> bytes:
    """Eight keys in all."""
    return bytes((blake2b_key(message)[0] & 7,))


def tokens(*ids: int) -> "array[int]":
    return array("I", ids)


def geometry_of(block_size: int, dtype: str = "float32") -> KvGeometry:
    return KvGeometry(block_size, dtype, (LayerGeometry(1, 4, 4),))


@dataclass
class FakeMemory:
    """An arena without blocks: its description, and what the next cache service is to know of it."""

    description: ArenaDescription
    ledger_buffer: bytearray = field(init=False)
    journal_buffer: bytearray = field(default_factory=lambda: bytearray(JOURNAL_BYTES))
    is_closed: bool = False

    def __post_init__(self) -> None:
        num_blocks, block_size = self.description.num_blocks, self.description.geometry.block_size
        self.ledger_buffer = bytearray(ledger_bytes(num_blocks, block_size))
        self.ledger = BufferLedger(self.ledger_buffer, num_blocks, block_size)
        self.journal = Journal(self.journal_buffer)

    def close(self) -> None:
        self.is_closed = True

    def leave(self) -> None: ...

    def inherited(self) -> "FakeMemory":
        """As the next process sees it."""
        heir = FakeMemory(self.description)
        heir.ledger_buffer[:] = self.ledger_buffer
        heir.journal_buffer[:] = self.journal_buffer
        heir.journal = Journal(heir.journal_buffer)
        return heir


def make_fake_arena(arena_id: str, model_fingerprint: str, geometry: KvGeometry, kv_bytes: int) -> FakeMemory:
    layout = lay_out(geometry)
    num_blocks = kv_bytes // layout.block_bytes
    return FakeMemory(ArenaDescription(arena_id, model_fingerprint, geometry, num_blocks, layout, "/none", kv_bytes))


def kv_bytes_of(num_blocks: int, block_size: int, dtype: str = "float32") -> int:
    return num_blocks * lay_out(geometry_of(block_size, dtype)).block_bytes


@dataclass
class FakeProcess:
    """A process that dies when a test says so."""

    alive: bool = True
    started: int = 1
    on_death: list[Callable[[], None]] = field(default_factory=list)

    def is_alive(self) -> bool:
        return self.alive

    def when_dead(self, loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
        self.on_death.append(callback)

    def close(self) -> None:
        self.on_death.clear()

    def die(self) -> None:
        self.alive = False
        for callback in list(self.on_death):
            callback()


@dataclass
class FakeClock:
    now_s: float = 1000.0
    unix_ms: int = 1_700_000_000_000

    def as_clock(self) -> Clock:
        return Clock(lambda: self.now_s, lambda: self.unix_ms)


@dataclass(frozen=True)
class Counts:
    """Blocks per state, and what the self-check found."""

    free: int
    cached: int
    used: int
    fenced: int
    reserved: int
    total: int
    num_sequences: int
    queried_tokens: int
    hit_tokens: int
    evicted_blocks: int
    violations: tuple[str, ...]


class CacheDriver(Protocol):
    """What the suites ask of a cache service, in the words of the domain."""

    clock: FakeClock
    service: CacheService

    def register(self, executor_id: str, num_blocks: int, block_size: int) -> int: ...
    def kill_executor(self, executor_id: str) -> None: ...
    def open_session(
        self, session: SessionKey, client_id: str, client_epoch: int, *, takeover: bool = False
    ) -> None: ...
    def close_session(self, session: SessionKey) -> None: ...
    def orphaned(self, executor_id: str, epoch: int) -> list[int]: ...
    def open_lease(self, client_id: str, client_epoch: int = 0) -> tuple[LeaseId, int]: ...
    def keep_alive(self, lease_id: LeaseId, acknowledged: Sequence[SessionStep] = ()) -> None: ...
    def close_lease(self, lease_id: LeaseId, free_after: Sequence[SessionStep] = ()) -> None: ...
    def match(self, token_ids: "array[int]", **extras: Any) -> int: ...
    def allocate(self, header: LeaseHeader, items: Sequence[Allocation]) -> list[Allocated | OctavoError]: ...
    def extend(self, header: LeaseHeader, items: Sequence[Extension]) -> list[Extended | OctavoError]: ...
    def commit(self, header: LeaseHeader, items: Sequence[Commit]) -> list[OctavoError | None]: ...
    def fork(self, header: LeaseHeader, items: Sequence[Fork]) -> list[Forked | OctavoError]: ...
    def release(self, header: LeaseHeader, items: Sequence[Release]) -> list[OctavoError | None]: ...
    def reconcile(
        self, header: LeaseHeader, items: Sequence[SequenceSnapshot], sent: Sequence[SessionStep]
    ) -> list[OctavoError | None]: ...
    def die(self, tear: Callable[[FakeMemory], None] = lambda memory: None) -> None: ...
    def counts(self) -> Counts: ...
    def advance(self, seconds: float) -> None: ...
    def close(self) -> None: ...


class InProcessDriver:
    """The domain alone."""

    def __init__(self, hash_function: HashFunction = blake2b_key, eviction: Eviction = LRU) -> None:
        self.clock = FakeClock()
        self._made_with = (hash_function, eviction)
        self.service = CacheService(*self._made_with)
        self._processes: dict[str, FakeProcess] = {}

    def die(self, tear: Callable[[FakeMemory], None] = lambda memory: None) -> None:
        """Killed, and started again on what is left of its memory, after `tear` had its way with it."""
        memories = _heirs(self.service, tear)
        self.service = CacheService(*self._made_with)
        pids = {pid: process for pid, process in enumerate(self._processes.values(), 1) if process.alive}
        names = list(self._processes)
        for process in self._processes.values():
            process.on_death.clear()
        service = self.service
        for executor in service.take_over(memories, lambda pid, started: pids.get(pid), self._now):
            process = self._processes[names[executor.pid - 1]]
            process.on_death.append(lambda executor=executor: service.end_executor(executor, self._now))

    def register(self, executor_id: str, num_blocks: int, block_size: int) -> int:
        geometry, kv_bytes = geometry_of(block_size), kv_bytes_of(num_blocks, block_size)
        process = self._processes[executor_id] = FakeProcess()
        pid = list(self._processes).index(executor_id) + 1
        asked = Registration(executor_id, 0, ARENA, FINGERPRINT, geometry, kv_bytes, pid)
        self.service.begin_registration(asked, self._now)
        made = None if self.service.has_arena(ARENA) else make_fake_arena(ARENA, FINGERPRINT, geometry, kv_bytes)
        executor = self.service.finish_registration(asked, made, process, self.clock.unix_ms)
        process.on_death.append(lambda: self.service.end_executor(executor, self._now))
        return executor.epoch

    def kill_executor(self, executor_id: str) -> None:
        self._processes[executor_id].die()

    def open_session(self, session: SessionKey, client_id: str, client_epoch: int, *, takeover: bool = False) -> None:
        self.service.open_session(session, client_id, client_epoch, self._now, takeover=takeover)

    def close_session(self, session: SessionKey) -> None:
        self.service.close_session(session, self._now)

    def orphaned(self, executor_id: str, epoch: int) -> list[int]:
        return self.service.orphaned_sessions(executor_id, epoch)

    def open_lease(self, client_id: str, client_epoch: int = 0) -> tuple[LeaseId, int]:
        lease = self.service.open_lease(client_id, client_epoch, TTL_S, self._now, self.clock.unix_ms)
        return lease.lease_id, lease.client_epoch

    def keep_alive(self, lease_id: LeaseId, acknowledged: Sequence[SessionStep] = ()) -> None:
        self.service.keep_lease_alive(lease_id, acknowledged, self._now)

    def close_lease(self, lease_id: LeaseId, free_after: Sequence[SessionStep] = ()) -> None:
        self.service.close_lease(lease_id, free_after, self._now)

    def match(self, token_ids: "array[int]", **extras: Any) -> int:
        return self.service.match_prefix(ARENA, allocation(0, token_ids, **extras))

    def allocate(self, header: LeaseHeader, items: Sequence[Allocation]) -> list[Allocated | OctavoError]:
        return self._mutate(
            header, items, lambda operations, lease: operations.allocate(lease, ARENA, items, self._now)
        )

    def extend(self, header: LeaseHeader, items: Sequence[Extension]) -> list[Extended | OctavoError]:
        return self._mutate(header, items, lambda operations, lease: operations.extend(lease, items, self._now))

    def commit(self, header: LeaseHeader, items: Sequence[Commit]) -> list[OctavoError | None]:
        return _errors(
            self._mutate(header, items, lambda operations, lease: operations.commit(lease, items, self._now))
        )

    def fork(self, header: LeaseHeader, items: Sequence[Fork]) -> list[Forked | OctavoError]:
        return self._mutate(header, items, lambda operations, lease: operations.fork(lease, items, self._now))

    def release(self, header: LeaseHeader, items: Sequence[Release]) -> list[OctavoError | None]:
        return _errors(
            self._mutate(header, items, lambda operations, lease: operations.release(lease, items, self._now))
        )

    def reconcile(
        self, header: LeaseHeader, items: Sequence[SequenceSnapshot], sent: Sequence[SessionStep]
    ) -> list[OctavoError | None]:
        return self.service.reconcile(header, (header, list(items), sent), items, sent, self._now)

    def _mutate(self, header: LeaseHeader, items: Sequence[Any], apply: Callable[[LeaseOperations, Lease], Any]) -> Any:
        named = (header, list(items))
        return self.service.in_order(header, named, lambda lease: apply(self.service.operations, lease), self._now)

    def counts(self) -> Counts:
        manager = self.service.find_arena(ARENA).manager
        return _counts(manager.stats(), [*manager.self_check(), *self.service.violations()])

    def advance(self, seconds: float) -> None:
        self.clock.now_s += seconds
        self.service.expire_leases(self._now)

    def close(self) -> None:
        self.service.close()

    @property
    def _now(self) -> float:
        return self.clock.now_s


class GrpcDriver:
    """A real server and a real client in one event loop, with fakes only outside of the process."""

    def __init__(self, hash_function: HashFunction = blake2b_key, eviction: Eviction = LRU) -> None:
        self.clock = FakeClock()
        self._made_with = (hash_function, eviction)
        self.service = CacheService(*self._made_with)
        self._processes: dict[int, FakeProcess] = {}
        self._pid_of: dict[str, int] = {}
        self._loop = asyncio.new_event_loop()
        self._loop.run_until_complete(self._start([]))

    def die(self, tear: Callable[[FakeMemory], None] = lambda memory: None) -> None:
        """Killed, and started again on what is left of its memory, after `tear` had its way with it."""
        memories = _heirs(self.service, tear)
        for process in self._processes.values():
            process.on_death.clear()
        self._loop.run_until_complete(self._stop())
        self.service = CacheService(*self._made_with)
        self._loop.run_until_complete(self._start(memories))

    async def _start(self, memories: list[FakeMemory]) -> None:
        config = CacheServiceConfig(
            listen="127.0.0.1:0", metrics_listen="", reflection=False, expiry_interval_s=3600.0, drain_grace_s=0.0
        )
        outside = Outside(make_fake_arena, lambda: memories, self._processes.__getitem__, self.clock.as_clock())
        self._running = running(config, outside, self.service)
        app = await self._running.__aenter__()
        self._channel = open_channel(f"127.0.0.1:{app.server.port}")
        self._stub = cache_pb2_grpc.BlockManagerServiceStub(self._channel)

    @property
    def stub(self) -> cache_pb2_grpc.BlockManagerServiceStub:
        """For calls that `call` does not make, inside of `run`."""
        return self._stub

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """In the loop of server and client."""
        return self._loop.run_until_complete(work)

    def call(self, method: str, request: Any) -> Any:
        """One call. Raises OctavoError as the status says."""
        try:
            return self._loop.run_until_complete(self._await(getattr(self._stub, method), request))
        except grpc.aio.AioRpcError as error:
            raise error_of_call(error) from None

    @staticmethod
    async def _await(method: Any, request: Any) -> Any:
        return await method(request, timeout=30)

    def register(self, executor_id: str, num_blocks: int, block_size: int) -> int:
        pid = self._pid_of[executor_id] = len(self._processes) + 1
        self._processes[pid] = FakeProcess()
        request = cache_pb2.RegisterExecutorRequest(
            executor_id=executor_id,
            pid=pid,
            arena_id=ARENA,
            model_fingerprint=FINGERPRINT,
            geometry=geometry_message(block_size),
            kv_bytes=kv_bytes_of(num_blocks, block_size),
        )
        return self.call("RegisterExecutor", request).executor_epoch

    def kill_executor(self, executor_id: str) -> None:
        self._processes[self._pid_of[executor_id]].die()

    def open_session(self, session: SessionKey, client_id: str, client_epoch: int, *, takeover: bool = False) -> None:
        request = cache_pb2.OpenSessionRequest(
            session=session_message(session), client_id=client_id, client_epoch=client_epoch, takeover=takeover
        )
        self.call("OpenSession", request)

    def close_session(self, session: SessionKey) -> None:
        self.call("CloseSession", cache_pb2.CloseSessionRequest(session=session_message(session)))

    def orphaned(self, executor_id: str, epoch: int) -> list[int]:
        request = cache_pb2.ListOrphanedSessionsRequest(executor_id=executor_id, executor_epoch=epoch)
        return list(self.call("ListOrphanedSessions", request).session_ids)

    def open_lease(self, client_id: str, client_epoch: int = 0) -> tuple[LeaseId, int]:
        ttl = Duration(seconds=int(TTL_S))
        request = cache_pb2.OpenLeaseRequest(client_id=client_id, client_epoch=client_epoch, ttl=ttl)
        response = self.call("OpenLease", request)
        return LeaseId(response.lease_id), response.client_epoch

    def keep_alive(self, lease_id: LeaseId, acknowledged: Sequence[SessionStep] = ()) -> None:
        steps = step_messages(acknowledged)
        self.call("KeepLeaseAlive", cache_pb2.KeepLeaseAliveRequest(lease_id=lease_id, acknowledged=steps))

    def close_lease(self, lease_id: LeaseId, free_after: Sequence[SessionStep] = ()) -> None:
        steps = step_messages(free_after)
        self.call("CloseLease", cache_pb2.CloseLeaseRequest(lease_id=lease_id, free_after=steps))

    def match(self, token_ids: "array[int]", **extras: Any) -> int:
        request = cache_pb2.MatchPrefixRequest(
            arena_id=ARENA, token_ids=token_ids, extras=cache_pb2.KeyExtras(**extras)
        )
        return self.call("MatchPrefix", request).num_cached_tokens

    def allocate(self, header: LeaseHeader, items: Sequence[Allocation]) -> list[Allocated | OctavoError]:
        request = cache_pb2.AllocateSequencesRequest(
            header=header_message(header), arena_id=ARENA, allocations=map(allocation_message, items)
        )
        return [
            error_of(sequence.status)
            if sequence.status.code
            else Allocated(tuple(sequence.tables[0].block_ids), sequence.num_cached_tokens)
            for sequence in self.call("AllocateSequences", request).sequences
        ]

    def extend(self, header: LeaseHeader, items: Sequence[Extension]) -> list[Extended | OctavoError]:
        request = cache_pb2.ExtendSequencesRequest(header=header_message(header))
        for item in items:
            request.extensions.add(
                sequence_id=item.sequence_id,
                have_blocks=item.have_blocks,
                need_blocks=item.need_blocks,
                want_blocks=item.want_blocks,
            )
        return [
            error_of(sequence.status) if sequence.status.code else Extended(tuple(sequence.tables[0].block_ids))
            for sequence in self.call("ExtendSequences", request).sequences
        ]

    def commit(self, header: LeaseHeader, items: Sequence[Commit]) -> list[OctavoError | None]:
        request = cache_pb2.CommitBlocksRequest(header=header_message(header), commits=map(commit_message, items))
        return _status_errors(self.call("CommitBlocks", request).statuses)

    def fork(self, header: LeaseHeader, items: Sequence[Fork]) -> list[Forked | OctavoError]:
        request = cache_pb2.ForkSequencesRequest(header=header_message(header))
        for item in items:
            request.forks.add(parent_sequence_id=item.parent_sequence_id, child_sequence_ids=item.child_sequence_ids)
        return [
            error_of(fork.status)
            if fork.status.code
            else Forked(
                tuple(tuple(table.block_ids) for table in fork.child_tables),
                tuple(zip(fork.copy_sources, fork.copy_targets, strict=True)),
            )
            for fork in self.call("ForkSequences", request).forks
        ]

    def release(self, header: LeaseHeader, items: Sequence[Release]) -> list[OctavoError | None]:
        request = cache_pb2.ReleaseSequencesRequest(header=header_message(header))
        for item in items:
            request.releases.add(
                sequence_id=item.sequence_id,
                commit=commit_message(item.commit) if item.commit else None,
                free_after=step_messages(item.free_after),
            )
        return _status_errors(self.call("ReleaseSequences", request).statuses)

    def reconcile(
        self, header: LeaseHeader, items: Sequence[SequenceSnapshot], sent: Sequence[SessionStep]
    ) -> list[OctavoError | None]:
        request = cache_pb2.ReconcileRequest(
            header=header_message(header), sequences=map(snapshot_message, items), sent=step_messages(sent)
        )
        return _status_errors(self.call("Reconcile", request).statuses)

    def counts(self) -> Counts:
        response = self.call("GetStats", cache_pb2.GetStatsRequest(arena_id=ARENA, self_check=True))
        return _counts(response.arenas[0], response.arenas[0].violations)

    def advance(self, seconds: float) -> None:
        self.clock.now_s += seconds
        self.service.expire_leases(self.clock.now_s)

    def close(self) -> None:
        self._loop.run_until_complete(self._stop())
        self._loop.close()

    async def _stop(self) -> None:
        await self._channel.close()
        await self._running.__aexit__(None, None, None)


def geometry_message(block_size: int, dtype: str = "float32") -> cache_pb2.KvGeometry:
    geometry = geometry_of(block_size, dtype)
    layers = [
        cache_pb2.LayerGeometry(num_kv_heads=x.num_kv_heads, k_head_dim=x.k_head_dim, v_head_dim=x.v_head_dim)
        for x in geometry.layers
    ]
    return cache_pb2.KvGeometry(block_size=block_size, dtype=geometry.dtype, layers=layers)


def session_message(session: SessionKey) -> cache_pb2.SessionKey:
    return cache_pb2.SessionKey(**session._asdict())


def step_messages(steps: Iterable[SessionStep]) -> list[cache_pb2.SessionStep]:
    return [cache_pb2.SessionStep(session=session_message(session), step_id=step_id) for session, step_id in steps]


def header_message(header: LeaseHeader) -> cache_pb2.LeaseHeader:
    return cache_pb2.LeaseHeader(
        lease_id=header.lease_id,
        sequence_number=header.sequence_number,
        acknowledged=step_messages(header.acknowledged),
    )


def allocation_message(item: Allocation) -> cache_pb2.SequenceAllocation:
    return cache_pb2.SequenceAllocation(
        sequence_id=item.sequence_id,
        token_ids=item.token_ids,
        extras=cache_pb2.KeyExtras(**item.extras._asdict()),
        slack_blocks=item.slack_blocks,
        bypass_cache=item.bypass_cache,
    )


def snapshot_message(item: SequenceSnapshot) -> cache_pb2.SequenceSnapshot:
    return cache_pb2.SequenceSnapshot(
        sequence_id=item.sequence_id,
        arena_id=item.arena_id,
        token_ids=item.token_ids,
        extras=cache_pb2.KeyExtras(**item.extras._asdict()),
        num_computed_tokens=item.num_computed_tokens,
        tables=[cache_pb2.BlockTable(block_ids=item.block_ids)],
        bypass_cache=item.bypass_cache,
        copy_source=item.copy_source,
    )


def commit_message(item: Commit) -> cache_pb2.SequenceCommit:
    return cache_pb2.SequenceCommit(
        sequence_id=item.sequence_id,
        num_computed_tokens=item.num_computed_tokens,
        token_offset=item.token_offset,
        token_ids=item.token_ids,
    )


def allocation(
    sequence_id: int, token_ids: "array[int]", *, slack: int = 0, bypass: bool = False, **extras: Any
) -> Allocation:
    return Allocation(sequence_id, token_ids, Extras(**extras), slack, bypass)


def _counts(stats: Any, violations: Iterable[str]) -> Counts:
    return Counts(
        free=stats.free_blocks,
        cached=stats.cached_blocks,
        used=stats.used_blocks,
        fenced=stats.fenced_blocks,
        reserved=stats.reserved_blocks,
        total=stats.total_blocks,
        num_sequences=stats.num_sequences,
        queried_tokens=stats.queried_tokens,
        hit_tokens=stats.hit_tokens,
        evicted_blocks=stats.evicted_blocks,
        violations=tuple(violations),
    )


def _errors(answers: Iterable[Any]) -> list[OctavoError | None]:
    return [answer if isinstance(answer, OctavoError) else None for answer in answers]


def _status_errors(statuses: Iterable[Any]) -> list[OctavoError | None]:
    return [error_of(status) if status.code else None for status in statuses]


def _heirs(service: CacheService, tear: Callable[[FakeMemory], None]) -> list[FakeMemory]:
    memories = []
    for arena in service.arenas():
        assert isinstance(arena.memory, FakeMemory)
        memories.append(arena.memory.inherited())
        tear(memories[-1])
    return memories


DRIVERS: dict[str, Callable[[HashFunction, Eviction], CacheDriver]] = {
    "in process": InProcessDriver,
    "grpc": GrpcDriver,
}
HASHES: dict[str, HashFunction] = {"blake2b": blake2b_key, "three-bit": three_bit_hash, "constant": constant_hash}
