"""The cache service as the router sees it: a lease, and its mutations one at a time in order of their numbers.

A retry repeats the number, so that a lost reply costs nothing. Here gRPC messages become our words.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import grpc
from google.rpc import status_pb2

from octavo.errors import Code, OctavoError
from octavo.rpc import duration_message, error_of, error_of_call, open_channel
from octavo.tls import TlsSource
from octavo.v1 import cache_pb2, cache_pb2_grpc
from router.clients.lease_messages import commit_message, session_steps, tag_message
from router.ids import BlockId, SequenceId, SessionKey, StepId
from router.model import Model
from router.outbox import (
    Allocated,
    Allocation,
    Batch,
    Commit,
    Extended,
    Extension,
    Fork,
    Forked,
    Outbox,
    Release,
    Replies,
    Snapshot,
)
from router.request import CacheScope

log = logging.getLogger(__name__)

CALL_TIMEOUT_S = 5.0
RETRY_S = 0.1
# The service is there but rebuilds, or is not reached: the same number again. All else means that the lease is lost.
REPEATABLE = frozenset({Code.UNAVAILABLE, Code.DEADLINE_EXCEEDED})


@dataclass(frozen=True, slots=True)
class Lease:
    """A claim on blocks; `client_epoch` is also the epoch of the sessions that go with it."""

    lease_id: int
    client_epoch: int
    ttl_s: float
    last_sequence_number: int


class CacheClient:
    """The cache service at an address."""

    def __init__(
        self,
        address: str,
        client_id: str,
        ttl_s: float,
        patience_s: float,
        tls: TlsSource | None = None,
        server_name: str = "",
    ) -> None:
        """patience_s: how long a message of a lease is sent again before the lease is given up."""
        self._channel = open_channel(address, tls, server_name)
        self._stub = cache_pb2_grpc.BlockManagerServiceStub(self._channel)
        self._client_id = client_id
        self._ttl_s = ttl_s
        self._patience_s = patience_s

    async def open_lease(self) -> Lease:
        """A new lease, which ends any earlier one of this client.

        Raises:
            OctavoError: not reached, or refused.
        """
        request = cache_pb2.OpenLeaseRequest(client_id=self._client_id, ttl=duration_message(self._ttl_s))
        response = await _call(self._stub.OpenLease, request)
        ttl_s = response.ttl.ToNanoseconds() / 1e9
        return Lease(response.lease_id, response.client_epoch, ttl_s, response.last_sequence_number)

    async def close_lease(self, lease: Lease, free_after: dict[SessionKey, StepId]) -> None:
        """Give back all that the lease holds.

        Raises:
            OctavoError: not reached, or the lease is gone.
        """
        request = cache_pb2.CloseLeaseRequest(lease_id=lease.lease_id, free_after=session_steps(free_after))
        await _call(self._stub.CloseLease, request)

    def mutations(self, lease: Lease, model: Model, outbox: Outbox, replies: Replies) -> "LeaseMutations":
        """The mutations of a lease, from its outbox."""
        return LeaseMutations(self._channel, self._stub, lease, self._patience_s, model, outbox, replies)

    async def close(self) -> None:
        await self._channel.close()


class LeaseMutations:
    """Empties an outbox into a lease, and keeps the lease alive."""

    def __init__(
        self,
        channel: grpc.aio.Channel,
        stub: cache_pb2_grpc.BlockManagerServiceStub,
        lease: Lease,
        patience_s: float,
        model: Model,
        outbox: Outbox,
        replies: Replies,
    ) -> None:
        self._channel = channel
        self._stub = stub
        self._lease = lease
        self._patience_s = patience_s
        self._model = model
        self._outbox = outbox
        self._replies = replies
        self._number = lease.last_sequence_number
        self._filled = asyncio.Event()
        self.num_reconciled = 0  # times that a restarted cache service was told what is held
        self._granted: frozenset[SequenceId] | None = None  # by the Reconcile that the message on its way waited for
        self._is_reconnected = False
        outbox.on_filled = self._filled.set

    async def run(self) -> None:
        """Until the lease is lost.

        Raises:
            OctavoError: why it is lost.
        """
        watching = asyncio.create_task(self._watch_connection(), name="cache-connection")
        try:
            while True:
                try:
                    async with asyncio.timeout(self._lease.ttl_s / 3):
                        await self._filled.wait()
                except TimeoutError:
                    self._is_reconnected = True
                self._filled.clear()
                if self._is_reconnected:
                    self._is_reconnected = False
                    await self._keep_alive()
                await self.flush()
        finally:
            watching.cancel()

    async def _watch_connection(self) -> None:
        """Speak as soon as there is a connection again: a restarted cache service waits for every client's word."""
        while True:
            state = self._channel.get_state(try_to_connect=True)
            if state is grpc.ChannelConnectivity.READY:
                self._is_reconnected = True
                self._filled.set()
            await self._channel.wait_for_state_change(state)

    async def flush(self) -> None:
        """Send all that waits; then, if fences wait for an acknowledgement that no message carried, say it alone.

        Raises:
            OctavoError: the lease is lost.
        """
        while (batch := self._outbox.take()) is not None:
            await self._send(batch)
        if self._outbox.lifts_fences():
            await self._keep_alive()

    async def _keep_alive(self) -> None:
        acknowledged = dict(self._outbox.acknowledged)
        request = cache_pb2.KeepLeaseAliveRequest(
            lease_id=self._lease.lease_id, acknowledged=session_steps(acknowledged)
        )
        await self._until_answered(self._stub.KeepLeaseAlive, request)
        self._outbox.mark_told(acknowledged)

    async def _send(self, batch: Batch) -> None:
        acknowledged = dict(self._outbox.acknowledged)
        self._granted = None
        self._number += 1
        header = cache_pb2.LeaseHeader(
            lease_id=self._lease.lease_id,
            sequence_number=self._number,
            acknowledged=session_steps(acknowledged),
        )
        send = {
            Allocation: self._allocate,
            Extension: self._extend,
            Commit: self._commit,
            Fork: self._fork,
            Release: self._release,
        }[type(batch[0])]
        await cast(Callable[[cache_pb2.LeaseHeader, Batch], Awaitable[None]], send)(header, batch)
        self._outbox.mark_told(acknowledged)

    async def _allocate(self, header: cache_pb2.LeaseHeader, batch: list[Allocation]) -> None:
        request = cache_pb2.AllocateSequencesRequest(header=header, arena_id=self._model.arena_id)
        for allocation in batch:
            request.allocations.add(
                sequence_id=allocation.sequence_id,
                token_ids=allocation.token_ids,
                extras=self._extras(allocation.scope),
                slack_blocks=allocation.slack_blocks,
                bypass_cache=allocation.bypass_cache,
                request=tag_message(allocation.tag),
            )
        response = await self._until_answered(self._stub.AllocateSequences, request)
        for allocation, sequence in zip(batch, response.sequences, strict=True):
            error = _item_error(sequence.status)
            outcome = Allocated(_block_ids(sequence.tables), sequence.num_cached_tokens, error)
            self._replies.on_allocated(allocation, outcome)

    async def _extend(self, header: cache_pb2.LeaseHeader, batch: list[Extension]) -> None:
        request = cache_pb2.ExtendSequencesRequest(header=header)
        for extension in batch:
            request.extensions.add(
                sequence_id=extension.sequence_id,
                have_blocks=extension.have_blocks,
                need_blocks=extension.need_blocks,
                want_blocks=extension.want_blocks,
            )
        response = await self._until_answered(self._stub.ExtendSequences, request)
        for extension, sequence in zip(batch, response.sequences, strict=True):
            outcome = Extended(_block_ids(sequence.tables), _item_error(sequence.status))
            self._replies.on_extended(extension, outcome)

    async def _commit(self, header: cache_pb2.LeaseHeader, batch: list[Commit]) -> None:
        request = cache_pb2.CommitBlocksRequest(header=header, commits=map(commit_message, batch))
        response = await self._until_answered(self._stub.CommitBlocks, request)
        self._log_refusals("commit", batch, response.statuses)

    async def _fork(self, header: cache_pb2.LeaseHeader, batch: list[Fork]) -> None:
        releases = [release for fork in batch for release in fork.first]
        request = cache_pb2.ForkSequencesRequest(header=header, releases=map(_release_message, releases))
        for fork in batch:
            request.forks.add(
                parent_sequence_id=fork.parent_id,
                child_sequence_ids=fork.child_ids,
                commit=commit_message(fork.commit),
            )
        response = await self._until_answered(self._stub.ForkSequences, request)
        self._log_refusals("release", releases, response.release_statuses)
        for fork, forked in zip(batch, response.forks, strict=True):
            tables = tuple(tuple(map(BlockId, table.block_ids)) for table in forked.child_tables)
            copies = zip(map(BlockId, forked.copy_sources), map(BlockId, forked.copy_targets), strict=True)
            self._replies.on_forked(fork, Forked(tables, tuple(copies), _item_error(forked.status)))

    async def _release(self, header: cache_pb2.LeaseHeader, batch: list[Release]) -> None:
        request = cache_pb2.ReleaseSequencesRequest(header=header, releases=map(_release_message, batch))
        response = await self._until_answered(self._stub.ReleaseSequences, request)
        self._log_refusals("release", batch, response.statuses)

    def _log_refusals(self, what: str, batch: Sequence[Commit | Release], statuses: Any) -> None:
        for item, status in zip(batch, statuses, strict=True):
            error = _item_error(status)
            if error is None:
                continue
            # A cache service that was restarted while this message was on its way knows what it granted then, and not
            # what had been given up by then.
            was_given_up = self._granted is not None and item.sequence_id not in self._granted
            is_expected = was_given_up and error.reason == "UNKNOWN_SEQUENCE"
            level = logging.INFO if is_expected else logging.ERROR
            log.log(level, "the cache service refused the %s of sequence %d: %r", what, item.sequence_id, error)

    async def _reconcile(self) -> None:
        """Tell a cache service that was restarted what is held; then all messages go on behind this one's number.

        Nothing that waits is changed by it: what was on its way is sent again, and is either new to it or repeated.
        """
        self.num_reconciled += 1
        acknowledged, sent = dict(self._outbox.acknowledged), self._replies.sent_steps()
        snapshots = self._replies.snapshots()
        self._number += 1
        request = cache_pb2.ReconcileRequest(
            header=cache_pb2.LeaseHeader(
                lease_id=self._lease.lease_id,
                sequence_number=self._number,
                acknowledged=session_steps(acknowledged),
            ),
            sequences=map(self._snapshot_message, snapshots),
            sent=session_steps(sent),
        )
        response = await _call(self._stub.Reconcile, request)
        self._outbox.mark_told(acknowledged)
        self._outbox.fence(sent)
        log.warning("the cache service was restarted and was told of %d sequences", len(snapshots))
        errors = {
            snapshot.sequence_id: _item_error(status)
            for snapshot, status in zip(snapshots, response.statuses, strict=True)
        }
        self._granted = frozenset(sequence_id for sequence_id, error in errors.items() if error is None)
        for sequence_id, error in errors.items():
            if error is not None:
                self._outbox.drop_commit(sequence_id)
                self._replies.on_disowned(sequence_id, error)

    def _snapshot_message(self, snapshot: Snapshot) -> cache_pb2.SequenceSnapshot:
        return cache_pb2.SequenceSnapshot(
            sequence_id=snapshot.sequence_id,
            arena_id=self._model.arena_id,
            token_ids=snapshot.token_ids,
            extras=self._extras(snapshot.scope),
            num_computed_tokens=snapshot.num_computed_tokens,
            tables=[cache_pb2.BlockTable(block_ids=snapshot.block_ids)],
            bypass_cache=snapshot.bypass_cache,
            copy_source=snapshot.copy_source,
        )

    async def _until_answered(self, method: Any, request: Any) -> Any:
        """The answer, however often the same message must be sent for it, within the patience.

        A restarted cache service is told first what is held; the message then gets a new number.
        """
        clock = asyncio.get_running_loop().time
        began_s, is_lost, must_reconcile = clock(), False, False
        while True:
            try:
                if must_reconcile:
                    await self._reconcile()
                    must_reconcile = False
                    self._renumber(request)
                response = await _call(method, request)
                break
            except OctavoError as error:
                if error.code not in REPEATABLE:
                    raise
                if clock() - began_s >= self._patience_s:
                    raise _given_up(self._patience_s, error) from error
                if not is_lost:
                    log.warning("the cache service does not answer (%s); sending again", error.message)
                is_lost = True
                must_reconcile = must_reconcile or error.reason == "RECONCILE"
                if error.reason == "REBUILDING":
                    self._tell_anew(request)
                await asyncio.sleep(error.retry_after_s or RETRY_S)
        if is_lost:
            log.info("the cache service answers again")
        return response

    def _renumber(self, request: Any) -> None:
        """Of a message that the cache service of now has not seen."""
        if not isinstance(request, cache_pb2.KeepLeaseAliveRequest):
            self._number += 1
            request.header.sequence_number = self._number
        self._tell_anew(request)

    def _tell_anew(self, request: Any) -> None:
        """What was acknowledged since then; of a message that has not been applied."""
        carrier = request if isinstance(request, cache_pb2.KeepLeaseAliveRequest) else request.header
        del carrier.acknowledged[:]
        carrier.acknowledged.extend(session_steps(dict(self._outbox.acknowledged)))

    def _extras(self, scope: CacheScope) -> cache_pb2.KeyExtras:
        model = self._model
        return cache_pb2.KeyExtras(
            model=model.name,
            revision=model.fingerprint,
            kv_dtype=model.kv_dtype,
            tenant=scope.tenant,
            salt=scope.salt,
        )


async def _call(method: Any, request: Any) -> Any:
    try:
        return await method(request, timeout=CALL_TIMEOUT_S)
    except grpc.aio.AioRpcError as error:
        raise error_of_call(error) from error


def _given_up(patience_s: float, last: OctavoError) -> OctavoError:
    message = f"the cache service has not answered for {patience_s:g} s: {last.message}"
    return OctavoError(Code.UNAVAILABLE, "CACHE_SERVICE_LOST", message, retry_after_s=1.0)


def _release_message(release: Release) -> cache_pb2.SequenceRelease:
    return cache_pb2.SequenceRelease(
        sequence_id=release.sequence_id,
        commit=commit_message(release.commit) if release.commit else None,
        free_after=session_steps(dict(release.free_after)),
    )


def _item_error(status: status_pb2.Status) -> OctavoError | None:
    return error_of(status) if status.code else None


def _block_ids(tables: Any) -> tuple[BlockId, ...]:
    return tuple(tables[0].block_ids) if tables else ()
