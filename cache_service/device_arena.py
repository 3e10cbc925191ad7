"""The arena on a GPU: memory that this process makes, never maps and never reads, and hands to executors.

    cache service      cuMemCreate -> allocation -> descriptor --- Unix socket ---> executor: import, map, use

The memory lives as long as anything holds it: this process by its allocation and descriptor, an executor by its
mapping. So an executor may go on with steps when this process is killed, and nothing is freed under a step. Where
descriptors cannot be had (some containers), the memory is plain and shared by CUDA's older IPC handles: then it dies
with this process, which therefore waits for its holders before it frees.

No context is made on the device for descriptors, so that this process costs none of its memory. Block 0 starts the
memory: a device has no header; what lies where is told by `GetArena` alone. Not here: the calls (octavo.cuda_driver),
the hand-over (octavo.memory_handle), what lies in a block (geometry).
"""

import logging
import os
import secrets
from dataclasses import replace
from typing import Protocol

from cache_service import refusal
from cache_service.geometry import (
    ArenaDescription,
    CudaHandle,
    KvGeometry,
    align_up,
    check_geometry,
    count_blocks,
    lay_out,
)
from cache_service.journal import JOURNAL_BYTES, Journal
from cache_service.ledger import BufferLedger, ledger_bytes
from octavo.cuda_driver import Address, Allocation, CudaDriver, CudaError, parse_ordinal
from octavo.errors import Code, FieldViolation, OctavoError, invalid_argument
from octavo.memory_handle import HandleServer, MemoryOffer, Sharing

log = logging.getLogger(__name__)

_HOLDERS_TIMEOUT_S = 5.0


class _Memory(Protocol):
    """Memory of a device that can be offered."""

    sharing: Sharing
    descriptor: int | None
    ipc_handle: bytes

    def close(self, server: HandleServer) -> None:
        """Answer nobody any more, and let go."""


class DeviceArena:
    """Memory of a GPU that this process made and hands out."""

    def __init__(self, memory: _Memory, server: HandleServer, description: ArenaDescription) -> None:
        self.description = description
        num_blocks, block_size = description.num_blocks, description.geometry.block_size
        # Both in this process's own memory: nobody takes over an arena of a device (decision 0070).
        self.ledger = BufferLedger(bytearray(ledger_bytes(num_blocks, block_size)), num_blocks, block_size)
        self.journal = Journal(bytearray(JOURNAL_BYTES))
        self._memory = memory
        self._server: HandleServer | None = server

    @property
    def num_holders(self) -> int:
        """Processes that use it, besides this one."""
        return self._server.num_holders if self._server else 0

    def close(self) -> None:
        """Hand it out no more and let go; executors that map it keep it. Idempotent."""
        if self._server is not None:
            self._memory.close(self._server)
            self._server = None

    def leave(self) -> None:
        """What its end would be: nobody takes it over, so it is closed."""
        self.close()


def create_device_arena(
    arena_id: str,
    model_fingerprint: str,
    geometry: KvGeometry,
    kv_bytes: int,
    *,
    driver: CudaDriver,
    sharing: Sharing | None = None,
) -> DeviceArena:
    """Make an arena of as many whole blocks as fit into `kv_bytes`.

    Leaves nothing behind when it fails. What its blocks hold at first is not defined.

    Args:
        arena_id: cuda:N, a device as this process numbers them.
        sharing: None: by descriptor, or, where that cannot be had, by IPC handle.

    Raises:
        OctavoError: INVALID_ARGUMENT, FAILED_PRECONDITION CUDA_FAILED, RESOURCE_EXHAUSTED ARENA_TOO_LARGE.
    """
    ordinal = parse_ordinal(arena_id)
    if ordinal is None or ordinal >= driver.num_devices:
        raise invalid_argument(
            FieldViolation("arena_id", f"is {arena_id!r}; this cache service sees {driver.num_devices} devices, cuda:N")
        )
    check_geometry(geometry)
    layout = replace(lay_out(geometry), data_offset=0)
    num_blocks = count_blocks(layout, kv_bytes)
    try:
        size_bytes = align_up(num_blocks * layout.block_bytes, driver.granularity_bytes(ordinal))
        device_uuid = driver.device_uuid(ordinal)
        memory = _make_memory(driver, ordinal, size_bytes, sharing)
    except CudaError as error:
        raise _refused(error, driver, ordinal, num_blocks * layout.block_bytes) from error
    handle = CudaHandle(
        f"octavo-cuda-{ordinal}-{os.getpid()}-{secrets.token_hex(8)}", secrets.token_hex(16), device_uuid
    )
    description = ArenaDescription(
        arena_id, model_fingerprint, geometry, num_blocks, layout, path="", size_bytes=size_bytes, cuda=handle
    )
    offer = MemoryOffer(handle.memory_id, device_uuid, size_bytes, memory.sharing, memory.ipc_handle.hex())
    return DeviceArena(memory, HandleServer(handle.socket, offer, memory.descriptor), description)


def _make_memory(driver: CudaDriver, ordinal: int, size_bytes: int, sharing: Sharing | None) -> _Memory:
    if sharing == "ipc" or (sharing is None and not driver.exports_descriptors(ordinal)):
        return _IpcMemory(driver, ordinal, size_bytes)
    try:
        return _DescriptorMemory(driver, ordinal, size_bytes)
    except CudaError as error:
        if sharing is not None or not error.is_unsupported:
            raise
        log.warning("memory of cuda:%d is shared by IPC handles, which die with this process: %s", ordinal, error)
        return _IpcMemory(driver, ordinal, size_bytes)


class _DescriptorMemory:
    """Held by an allocation and by a descriptor of it."""

    sharing: Sharing = "descriptor"
    ipc_handle = b""

    def __init__(self, driver: CudaDriver, ordinal: int, size_bytes: int) -> None:
        self._driver = driver
        self._allocation: Allocation = driver.create(ordinal, size_bytes)
        try:
            self.descriptor: int | None = driver.export_descriptor(self._allocation)
        except CudaError:
            driver.release(self._allocation)
            raise

    def close(self, server: HandleServer) -> None:
        server.close()
        assert self.descriptor is not None, "closed once"
        os.close(self.descriptor)
        self._driver.release(self._allocation)


class _IpcMemory:
    """Plain memory of this process's context, which nobody may use when it is freed."""

    sharing: Sharing = "ipc"
    descriptor: int | None = None

    def __init__(self, driver: CudaDriver, ordinal: int, size_bytes: int) -> None:
        self._driver = driver
        self._ordinal = ordinal
        driver.use_primary_context(ordinal)
        self._address: Address = driver.allocate(size_bytes)
        try:
            self.ipc_handle = driver.ipc_handle(self._address)
        except CudaError:
            driver.free(self._address)
            raise

    def close(self, server: HandleServer) -> None:
        is_free = server.wait_for_holders(_HOLDERS_TIMEOUT_S)
        server.close()
        if not is_free:
            log.error("executors still use the memory of cuda:%d; it stays until this process ends", self._ordinal)
            return
        self._driver.use_primary_context(self._ordinal)  # another thread may have made it
        self._driver.free(self._address)


def _refused(error: CudaError, driver: CudaDriver, ordinal: int, needed_bytes: int) -> OctavoError:
    if error.is_out_of_memory:
        # What is free is known only within a context, which this process does without.
        return refusal.arena_too_large_for_device(needed_bytes, driver.total_bytes(ordinal), ordinal)
    return OctavoError(
        Code.FAILED_PRECONDITION,
        "CUDA_FAILED",
        f"memory of cuda:{ordinal} cannot be made: {error}; see the driver's log (dmesg, nvidia-smi)",
    )
