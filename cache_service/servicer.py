"""BlockManagerService: calls in, the service's answers out.

One event loop is the one mutator: no handler waits between reading a request and having its answer, except for the
making of an arena. Here belongs translation of whole calls. Not here: decisions (service), shapes (servicer_messages).
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

import grpc
from google.rpc import status_pb2

from cache_service.config import CacheServiceConfig
from cache_service.geometry import KvGeometry
from cache_service.lease import Lease
from cache_service.managed_arena import ArenaMemory
from cache_service.operation import Allocated, Allocation, LeaseId, SequenceId
from cache_service.process import Watched
from cache_service.registration import Registration
from cache_service.registry import Executor
from cache_service.service import CacheService
from cache_service.servicer_messages import (
    allocated_message,
    allocation_of,
    arena_message,
    commit_of,
    events_message,
    extended_message,
    extension_of,
    extras_of,
    fork_of,
    forked_message,
    header_of,
    item_status,
    registration_of,
    release_of,
    session_of,
    snapshot_of,
    stats_message,
    steps_of,
    tokens_of,
)
from cache_service.watching import Watching
from octavo.errors import FieldViolation, OctavoError, invalid_argument
from octavo.rpc import ServerParts, duration_message, start_server
from octavo.tracing import NO_TRACING, TraceContext, Tracing
from octavo.v1 import cache_pb2, cache_pb2_grpc

log = logging.getLogger(__name__)

Response = TypeVar("Response")


class MakeArena(Protocol):
    """Makes memory; may take seconds; raises OctavoError."""

    def __call__(self, arena_id: str, model_fingerprint: str, geometry: KvGeometry, kv_bytes: int) -> ArenaMemory: ...


@dataclass(frozen=True, slots=True)
class Clock:
    """The two clocks of this process, in one place so that tests can hold them."""

    monotonic_s: Callable[[], float] = time.monotonic
    unix_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000


class BlockManagerServicer(cache_pb2_grpc.BlockManagerServiceServicer):
    """Serves one `CacheService`.

    Args:
        make_arena: called in a thread.
        watch_process: of a pid as this process sees it, 0 where it cannot; raises INVALID_ARGUMENT.
        on_arena: called when an arena was made.
    """

    def __init__(
        self,
        service: CacheService,
        config: CacheServiceConfig,
        make_arena: MakeArena,
        watch_process: Callable[[int], Watched],
        clock: Clock,
        tracing: Tracing = NO_TRACING,
        on_arena: Callable[[], object] = lambda: None,
    ) -> None:
        self._service = service
        self._config = config
        self._make_arena = make_arena
        self._watch_process = watch_process
        self._clock = clock
        self._tracing = tracing
        self._on_arena = on_arena
        self.watching = Watching(service)
        self._registering = asyncio.Lock()

    # ------------------------------------------------------------------------------------------- executors, sessions

    async def RegisterExecutor(
        self, request: cache_pb2.RegisterExecutorRequest, context: grpc.aio.ServicerContext
    ) -> cache_pb2.RegisterExecutorResponse:
        # Shielded: a caller that leaves must not leave a half-made arena behind.
        registration = asyncio.ensure_future(self._register(registration_of(request)))
        executor = await asyncio.shield(registration)
        executor.metrics_address = request.metrics_address
        arena = self._service.find_arena(executor.arena_id).memory.description
        return cache_pb2.RegisterExecutorResponse(arena=arena_message(arena), executor_epoch=executor.epoch)

    async def _register(self, asked: Registration) -> Executor:
        async with self._registering:
            executor = self._service.begin_registration(asked, self._now())
            if executor is not None:
                return executor
            process = self._watch_process(asked.pid)
            try:
                made = await self._make_missing_arena(asked)
            except BaseException:
                process.close()
                raise
            executor = self._service.finish_registration(asked, made, process, self._clock.unix_ms())
            self.watch(executor, process)
            if made is not None:
                self._on_arena()
            return executor

    def watch(self, executor: Executor, process: Watched) -> None:
        """Hear of the end of an executor's process."""
        process.when_dead(asyncio.get_running_loop(), partial(self._end_executor, executor))

    async def _make_missing_arena(self, asked: Registration) -> ArenaMemory | None:
        if self._service.has_arena(asked.arena_id):
            return None
        return await asyncio.to_thread(
            self._make_arena, asked.arena_id, asked.model_fingerprint, asked.geometry, asked.kv_bytes
        )

    def _end_executor(self, executor: Executor) -> None:
        self._service.end_executor(executor, self._now())

    async def OpenSession(
        self, request: cache_pb2.OpenSessionRequest, context: grpc.aio.ServicerContext
    ) -> cache_pb2.OpenSessionResponse:
        session, takeover = session_of(request.session), request.takeover
        self._service.open_session(session, request.client_id, request.client_epoch, self._now(), takeover=takeover)
        return cache_pb2.OpenSessionResponse()

    async def ListOrphanedSessions(
        self, request: cache_pb2.ListOrphanedSessionsRequest, context: grpc.aio.ServicerContext
    ) -> cache_pb2.ListOrphanedSessionsResponse:
        session_ids = self._service.orphaned_sessions(request.executor_id, request.executor_epoch)
        return cache_pb2.ListOrphanedSessionsResponse(session_ids=session_ids)

    async def CloseSession(
        self, request: cache_pb2.CloseSessionRequest, context: grpc.aio.ServicerContext
    ) -> cache_pb2.CloseSessionResponse:
        self._service.close_session(session_of(request.session), self._now())
        return cache_pb2.CloseSessionResponse()

    async def GetArena(
        self, request: cache_pb2.GetArenaRequest, context: grpc.aio.ServicerContext
    ) -> cache_pb2.GetArenaResponse:
        description = self._service.find_arena(request.arena_id).memory.description
        return cache_pb2.GetArenaResponse(arena=arena_message(description))

    # ---------------------------------------------------------------------------------------------------------- leases

    async def OpenLease(
        self, request: cache_pb2.OpenLeaseRequest, context: grpc.aio.ServicerContext
    ) -> cache_pb2.OpenLeaseResponse:
        lease = self._service.open_lease(
            request.client_id, request.client_epoch, self._grant_ttl_s(request), self._now(), self._clock.unix_ms()
        )
        return cache_pb2.OpenLeaseResponse(
            lease_id=lease.lease_id,
            ttl=duration_message(lease.ttl_s),
            last_sequence_number=lease.last_number,
            client_epoch=lease.client_epoch,
        )

    def _grant_ttl_s(self, request: cache_pb2.OpenLeaseRequest) -> float:
        if not request.HasField("ttl"):
            return self._config.default_lease_ttl_s
        asked_s = request.ttl.seconds + request.ttl.nanos / 1e9
        if asked_s <= 0:
            raise invalid_argument(FieldViolation("ttl", f"is {asked_s:g} s; above 0, or unset for the default"))
        return min(max(asked_s, self._config.min_lease_ttl_s), self._config.max_lease_ttl_s)

    async def KeepLeaseAlive(
        self, request: cache_pb2.KeepLeaseAliveRequest, context: grpc.aio.ServicerContext
    ) -> cache_pb2.KeepLeaseAliveResponse:
        steps = steps_of(request.acknowledged)
        lease = self._service.keep_lease_alive(LeaseId(request.lease_id), steps, self._now())
        return cache_pb2.KeepLeaseAliveResponse(ttl=duration_message(lease.ttl_s))

    async def CloseLease(
        self, request: cache_pb2.CloseLeaseRequest, context: grpc.aio.ServicerContext
    ) -> cache_pb2.CloseLeaseResponse:
        self._service.close_lease(LeaseId(request.lease_id), steps_of(request.free_after), self._now())
        return cache_pb2.CloseLeaseResponse()

    # ------------------------------------------------------------------------------------------------------- sequences

    async def MatchPrefix(
        self, request: cache_pb2.MatchPrefixRequest, context: grpc.aio.ServicerContext
    ) -> cache_pb2.MatchPrefixResponse:
        if not request.token_ids:
            raise invalid_argument(FieldViolation("token_ids", "is empty; at least one token"))
        asked = Allocation(SequenceId(0), tokens_of(request.token_ids), extras_of(request.extras))
        return cache_pb2.MatchPrefixResponse(num_cached_tokens=self._service.match_prefix(request.arena_id, asked))

    async def AllocateSequences(
        self, request: cache_pb2.AllocateSequencesRequest, context: grpc.aio.ServicerContext
    ) -> cache_pb2.AllocateSequencesResponse:
        def apply(lease: Lease) -> cache_pb2.AllocateSequencesResponse:
            began_ns = time.time_ns()
            items = list(map(allocation_of, request.allocations))
            answers = self._service.operations.allocate(lease, request.arena_id, items, self._now())
            self._tell_allocated(request.allocations, answers, began_ns)
            sequences = [allocated_message(answer, f"allocations[{i}]") for i, answer in enumerate(answers)]
            return cache_pb2.AllocateSequencesResponse(sequences=sequences)

        return self._in_order(request, apply)

    def _tell_allocated(
        self,
        asked: Sequence[cache_pb2.SequenceAllocation],
        answers: Sequence[Allocated | OctavoError],
        began_ns: int,
    ) -> None:
        """To the log and to the traces of the requests. What is refused is asked for again soon, so it is not told."""
        for allocation, answer in zip(asked, answers, strict=True):
            if isinstance(answer, OctavoError):
                continue
            request, num_blocks, num_cached = allocation.request, len(answer.block_ids), answer.num_cached_tokens
            log.debug("request %s has %d blocks, %d tokens cached", request.request_id, num_blocks, num_cached)
            if request.traceparent and self._tracing.is_on:
                context = TraceContext(request.traceparent, request.tracestate)
                about = {"octavo.blocks": num_blocks, "octavo.cached_tokens": num_cached}
                self._tracing.begin("allocate", context, about, at_ns=began_ns).end()

    async def ExtendSequences(
        self, request: cache_pb2.ExtendSequencesRequest, context: grpc.aio.ServicerContext
    ) -> cache_pb2.ExtendSequencesResponse:
        def apply(lease: Lease) -> cache_pb2.ExtendSequencesResponse:
            answers = self._service.operations.extend(lease, list(map(extension_of, request.extensions)), self._now())
            sequences = [extended_message(answer, f"extensions[{i}]") for i, answer in enumerate(answers)]
            return cache_pb2.ExtendSequencesResponse(sequences=sequences)

        return self._in_order(request, apply)

    async def CommitBlocks(
        self, request: cache_pb2.CommitBlocksRequest, context: grpc.aio.ServicerContext
    ) -> cache_pb2.CommitBlocksResponse:
        def apply(lease: Lease) -> cache_pb2.CommitBlocksResponse:
            answers = self._service.operations.commit(lease, list(map(commit_of, request.commits)), self._now())
            statuses = [item_status(answer, f"commits[{i}]") for i, answer in enumerate(answers)]
            return cache_pb2.CommitBlocksResponse(statuses=statuses)

        return self._in_order(request, apply)

    async def ForkSequences(
        self, request: cache_pb2.ForkSequencesRequest, context: grpc.aio.ServicerContext
    ) -> cache_pb2.ForkSequencesResponse:
        def apply(lease: Lease) -> cache_pb2.ForkSequencesResponse:
            items = [fork_of(message, f"forks[{i}]") for i, message in enumerate(request.forks)]
            statuses = self._release_all(lease, request.releases)
            answers = self._service.operations.fork(lease, items, self._now())
            forks = [forked_message(answer, f"forks[{i}]") for i, answer in enumerate(answers)]
            return cache_pb2.ForkSequencesResponse(forks=forks, release_statuses=statuses)

        return self._in_order(request, apply)

    async def ReleaseSequences(
        self, request: cache_pb2.ReleaseSequencesRequest, context: grpc.aio.ServicerContext
    ) -> cache_pb2.ReleaseSequencesResponse:
        def apply(lease: Lease) -> cache_pb2.ReleaseSequencesResponse:
            return cache_pb2.ReleaseSequencesResponse(statuses=self._release_all(lease, request.releases))

        return self._in_order(request, apply)

    def _release_all(self, lease: Lease, messages: Any) -> list[status_pb2.Status]:
        items = [release_of(message, f"releases[{i}]") for i, message in enumerate(messages)]
        answers = self._service.operations.release(lease, items, self._now())
        return [item_status(answer, f"releases[{i}]") for i, answer in enumerate(answers)]

    async def Reconcile(
        self, request: cache_pb2.ReconcileRequest, context: grpc.aio.ServicerContext
    ) -> cache_pb2.ReconcileResponse:
        header, snapshots = header_of(request.header), list(map(snapshot_of, request.sequences))
        named = (type(request), request)
        answers = self._service.reconcile(header, named, snapshots, steps_of(request.sent), self._now())
        statuses = [item_status(answer, f"sequences[{i}]") for i, answer in enumerate(answers)]
        return cache_pb2.ReconcileResponse(statuses=statuses)

    def _in_order(self, request: Any, apply: Callable[[Lease], Response]) -> Response:
        # A number used for another kind of message is no repetition.
        named = (type(request), request)
        return self._service.in_order(header_of(request.header), named, apply, self._now())

    # ----------------------------------------------------------------------------------------------------------- stats

    async def GetStats(
        self, request: cache_pb2.GetStatsRequest, context: grpc.aio.ServicerContext
    ) -> cache_pb2.GetStatsResponse:
        service = self._service
        arenas = [service.find_arena(request.arena_id)] if request.arena_id else service.arenas()
        between = service.violations() if request.self_check else []
        stats = [
            stats_message(arena, [*arena.manager.self_check(), *between] if request.self_check else [])
            for arena in arenas
        ]
        return cache_pb2.GetStatsResponse(
            arenas=stats, num_leases=service.num_leases, num_executors=sum(one.is_alive for one in service.executors())
        )

    async def WatchBlockEvents(
        self, request: cache_pb2.WatchBlockEventsRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[cache_pb2.WatchBlockEventsResponse]:
        async for batch in self.watching.follow(request.arena_id, request.stream_id, request.last_number):
            yield events_message(batch)

    def _now(self) -> float:
        return self._clock.monotonic_s()


async def start_cache_server(listen: str, servicer: BlockManagerServicer, **options: Any) -> ServerParts:
    """Serve on `host:port` or `unix:/path`, with options of `octavo.rpc.start_server`. Raises OSError as it does."""
    name = cache_pb2.DESCRIPTOR.services_by_name["BlockManagerService"].full_name
    register = partial(cache_pb2_grpc.add_BlockManagerServiceServicer_to_server, servicer)
    return await start_server(listen, [(name, register)], **options)
