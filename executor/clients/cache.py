"""The executor's side of the cache service: registration, and which sessions live.

Here belong the calls, their retries and their messages. Not here: what follows from an answer.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

import grpc

from executor.arena import ArenaLayout, CudaMemory, KvGeometry, LayerGeometry, LayerLayout, TensorLayout
from executor.ids import SessionId
from executor.sessions import Opening
from octavo import rpc
from octavo.errors import Code, OctavoError
from octavo.tls import TlsSource
from octavo.v1 import cache_pb2, cache_pb2_grpc

log = logging.getLogger(__name__)

T = TypeVar("T")

_CALL_TIMEOUT_S = 10.0
_REGISTER_CALL_TIMEOUT_S = 120.0  # making a large arena takes a third of a second per GiB
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 2.0


@dataclass(frozen=True, slots=True)
class Registration:
    """What an executor says of itself."""

    executor_id: str
    pid: int
    arena_id: str
    model_fingerprint: str
    geometry: KvGeometry
    kv_bytes: int
    metrics_address: str = ""  # for those who look at a stack; empty: none


@dataclass(frozen=True, slots=True)
class ArenaGrant:
    """What it got: an epoch, and memory."""

    executor_epoch: int
    path: str
    size_bytes: int
    layout: ArenaLayout
    geometry: KvGeometry
    cuda: CudaMemory | None = None  # None: the segment at `path`

    @property
    def memory_id(self) -> str:
        """Tells this memory from any other."""
        return self.cuda.memory_id if self.cuda else self.path


class CacheClient:
    """Calls on one channel. Every method raises OctavoError as the cache service says it, or UNAVAILABLE."""

    def __init__(
        self, address: str, registration: Registration, tls: TlsSource | None = None, server_name: str = ""
    ) -> None:
        self._address = address
        self._registration = registration
        self._channel = rpc.open_channel(address, tls, server_name)
        self._stub = cache_pb2_grpc.BlockManagerServiceStub(self._channel)
        self._epoch = 0

    async def close(self) -> None:
        """Close the channel."""
        await self._channel.close()

    async def register(self, timeout_s: float) -> ArenaGrant:
        """Register, waiting as long as the cache service is not there or an earlier process of this id still ends."""
        clock = asyncio.get_running_loop().time
        deadline, pause_s, said = clock() + timeout_s, _FIRST_PAUSE_S, ""
        while True:
            try:
                return await self._register()
            except OctavoError as error:
                if not _may_pass(error) or clock() + pause_s > deadline:
                    raise
                if error.reason != said:
                    log.info("waiting for the cache service at %s: %s", self._address, error.message)
                said = error.reason
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def open_session(self, session_id: SessionId, opening: Opening) -> None:
        """Announce a session before any step of it runs."""
        request = cache_pb2.OpenSessionRequest(
            session=self._session_key(session_id),
            client_id=opening.router_id,
            client_epoch=opening.router_epoch,
            takeover=opening.takeover,
        )
        await _call(lambda: self._stub.OpenSession(request, timeout=_CALL_TIMEOUT_S))

    async def close_session(self, session_id: SessionId) -> None:
        """Say that no step of the session runs or will run."""
        request = cache_pb2.CloseSessionRequest(session=self._session_key(session_id))
        await _call(lambda: self._stub.CloseSession(request, timeout=_CALL_TIMEOUT_S))

    async def orphaned_sessions(self) -> frozenset[SessionId]:
        """The open sessions whose lease is over."""
        request = cache_pb2.ListOrphanedSessionsRequest(
            executor_id=self._registration.executor_id, executor_epoch=self._epoch
        )
        response = await _call(lambda: self._stub.ListOrphanedSessions(request, timeout=_CALL_TIMEOUT_S))
        return frozenset(map(SessionId, response.session_ids))

    async def _register(self) -> ArenaGrant:
        registration = self._registration
        request = cache_pb2.RegisterExecutorRequest(
            executor_id=registration.executor_id,
            executor_epoch=self._epoch,
            pid=registration.pid,
            arena_id=registration.arena_id,
            model_fingerprint=registration.model_fingerprint,
            geometry=_geometry_message(registration.geometry),
            kv_bytes=registration.kv_bytes,
            metrics_address=registration.metrics_address,
        )
        response = await _call(lambda: self._stub.RegisterExecutor(request, timeout=_REGISTER_CALL_TIMEOUT_S))
        self._epoch = response.executor_epoch
        return _grant_of(response)

    def _session_key(self, session_id: SessionId) -> cache_pb2.SessionKey:
        return cache_pb2.SessionKey(
            executor_id=self._registration.executor_id, executor_epoch=self._epoch, session_id=session_id
        )


async def _call(call: Callable[[], Awaitable[T]]) -> T:
    try:
        return await call()
    except grpc.RpcError as error:
        raise rpc.error_of_call(error) from error


def _may_pass(error: OctavoError) -> bool:
    return error.code is Code.UNAVAILABLE or error.reason == "EXECUTOR_ALIVE"


def _geometry_message(geometry: KvGeometry) -> cache_pb2.KvGeometry:
    layers = [
        cache_pb2.LayerGeometry(
            num_kv_heads=layer.num_kv_heads, k_head_dim=layer.k_head_dim, v_head_dim=layer.v_head_dim
        )
        for layer in geometry.layers
    ]
    return cache_pb2.KvGeometry(block_size=geometry.block_size, dtype=geometry.dtype, layers=layers)


def _grant_of(response: cache_pb2.RegisterExecutorResponse) -> ArenaGrant:
    arena = response.arena
    kind = arena.WhichOneof("handle")
    if kind not in ("posix", "cuda"):
        raise OctavoError(
            Code.FAILED_PRECONDITION, "ARENA_UNUSABLE", "the arena is of a kind of memory that is not known here"
        )
    cuda = arena.cuda
    geometry = KvGeometry(
        arena.geometry.block_size,
        arena.geometry.dtype,
        tuple(LayerGeometry(each.num_kv_heads, each.k_head_dim, each.v_head_dim) for each in arena.geometry.layers),
    )
    return ArenaGrant(
        executor_epoch=response.executor_epoch,
        path=arena.posix.path,
        size_bytes=cuda.size_bytes if kind == "cuda" else arena.posix.size_bytes,
        layout=_layout_of(arena),
        geometry=geometry,
        cuda=CudaMemory(cuda.socket, cuda.memory_id, cuda.size_bytes, cuda.device_uuid) if kind == "cuda" else None,
    )


def _layout_of(arena: cache_pb2.Arena) -> ArenaLayout:
    layers = tuple(
        LayerLayout(
            _tensor_of(layer.k),
            _tensor_of(layer.v),
            _tensor_of(layer.k_scale) if layer.HasField("k_scale") else None,
            _tensor_of(layer.v_scale) if layer.HasField("v_scale") else None,
        )
        for layer in arena.layout.layers
    )
    return ArenaLayout(arena.layout.data_offset, arena.layout.block_bytes, arena.num_blocks, layers)


def _tensor_of(message: cache_pb2.TensorLayout) -> TensorLayout:
    return TensorLayout(message.offset, message.head_stride, message.token_stride, message.element_stride)
