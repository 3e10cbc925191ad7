"""The KV arena in a GPU's memory: fetched from the cache service, mapped, and seen by torch without a copy.

    socket -> descriptor -> allocation -> mapping -> __cuda_array_interface__ -> uint8 tensor -> views of K and V

The mapping holds the memory whatever becomes of the process that made it, but for the older IPC handles, whose memory
goes with its maker. Not here: views and their layout (executor.arena), calls of the driver (octavo.cuda_driver).
"""

from collections.abc import Callable

import torch
from torch import Tensor

from executor.arena import Arena, ArenaLayout, CudaMemory, KvGeometry
from octavo.cuda_driver import Address, CudaDriver, CudaError, load_driver
from octavo.errors import Code, OctavoError
from octavo.memory_handle import Hold, fetch_memory


class CudaMapping:
    """Memory of another process in the primary context of a device of this one."""

    def __init__(self, driver: CudaDriver, ordinal: int, hold: Hold) -> None:
        """Map it; `hold` is this object's from now on, also when this fails. Raises CudaError."""
        self._driver, self._ordinal, self._hold = driver, ordinal, hold
        self.size_bytes = hold.offer.size_bytes
        try:
            driver.use_primary_context(ordinal)
            self._address: Address | None = self._map()
        except CudaError:
            hold.close()
            raise

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        """Version 3: https://numba.readthedocs.io/en/stable/cuda/cuda_array_interface.html"""
        return {"shape": (self.size_bytes,), "typestr": "|u1", "data": (self._address, False), "version": 3}

    @property
    def maker_is_needed(self) -> bool:
        """Whether the memory goes when its maker goes."""
        return self._hold.offer.sharing == "ipc"

    @property
    def maker_is_there(self) -> bool:
        """Whether the process that made it still runs."""
        return self._hold.maker_is_there

    def close(self) -> None:
        """Unmap, once the device's work is done; nothing may use the memory any more. Idempotent."""
        if self._address is None:
            return
        self._driver.use_primary_context(self._ordinal)
        self._driver.synchronize()
        address, self._address = self._address, None
        if self.maker_is_needed:
            self._driver.close_ipc_handle(address)
        else:
            self._driver.unmap(address, self.size_bytes)
        self._hold.close()  # last: the maker may free what nobody holds

    def _map(self) -> Address:
        if self.maker_is_needed:
            return self._driver.open_ipc_handle(bytes.fromhex(self._hold.offer.ipc_handle))
        assert self._hold.descriptor is not None, "memory that is shared by descriptor came with one"
        allocation = self._driver.import_descriptor(self._hold.descriptor)
        try:
            return self._driver.map(allocation, self._ordinal, self.size_bytes)
        finally:
            self._driver.release(allocation)  # the mapping holds the memory


class CudaArena(Arena):
    """An arena whose blocks lie on a GPU."""

    def __init__(self, mapping: CudaMapping, memory: Tensor, layout: ArenaLayout, geometry: KvGeometry) -> None:
        super().__init__(memory, layout, geometry)
        self._mapping = mapping

    def lost_reason(self) -> str | None:
        """Why the memory must not be used any more; None: it is sound."""
        if self._mapping.maker_is_needed and not self._mapping.maker_is_there:
            return "the cache service that made the device memory has ended, and by an IPC handle it goes with it"
        return None

    def close(self) -> None:
        """Unmap; no view of it may be used any more."""
        self.views = ()
        self.blocks = torch.empty(0, 0, dtype=torch.uint8)
        self._mapping.close()


def as_tensor(mapping: CudaMapping, ordinal: int) -> Tensor:
    """The memory as torch sees it: [size_bytes] uint8 on the device, the very same bytes."""
    return torch.as_tensor(mapping, device=torch.device("cuda", ordinal))


def map_cuda_arena(
    memory: CudaMemory,
    layout: ArenaLayout,
    geometry: KvGeometry,
    ordinal: int,
    *,
    driver: CudaDriver | None = None,
    wrap: Callable[[CudaMapping, int], Tensor] = as_tensor,
) -> CudaArena:
    """Fetch and map the arena. Leaves nothing behind when it fails.

    Args:
        ordinal: of the device, as this process numbers them.
        driver, wrap: the driver, and how its memory becomes a tensor.

    Raises:
        OctavoError: FAILED_PRECONDITION: MEMORY_GONE (its maker has ended or made another), WRONG_DEVICE,
            ARENA_UNUSABLE (size, layout or the driver's refusal), CUDA_NOT_AVAILABLE.
    """
    driver = driver or load_driver()
    _check_device(memory, driver, ordinal)
    hold = fetch_memory(memory.socket, memory.memory_id)
    try:
        _check_offer(memory, hold)
    except OctavoError:
        hold.close()
        raise
    try:
        mapping = CudaMapping(driver, ordinal, hold)
    except CudaError as error:
        raise _unusable(f"{error}; is this process on the same machine and driver as the cache service?") from error
    try:
        return CudaArena(mapping, wrap(mapping, ordinal), layout, geometry)
    except BaseException:
        mapping.close()
        raise


def _check_device(memory: CudaMemory, driver: CudaDriver, ordinal: int) -> None:
    here = [driver.device_uuid(number) for number in range(driver.num_devices)]
    if ordinal < len(here) and here[ordinal] == memory.device_uuid:
        return
    if memory.device_uuid in here:
        what = f"that is cuda:{here.index(memory.device_uuid)} here; choose the same device for both"
    else:
        what = "this process does not see that device at all; give both the same CUDA_VISIBLE_DEVICES"
    mine = here[ordinal] if ordinal < len(here) else f"none ({len(here)} are seen)"
    raise OctavoError(
        Code.FAILED_PRECONDITION,
        "WRONG_DEVICE",
        f"the arena lies on device {memory.device_uuid}, cuda:{ordinal} of this executor is {mine}: {what}",
    )


def _check_offer(memory: CudaMemory, hold: Hold) -> None:
    offer = hold.offer
    if (offer.size_bytes, offer.device_uuid) != (memory.size_bytes, memory.device_uuid):
        raise _unusable(
            f"{offer.size_bytes} bytes on {offer.device_uuid} were handed out, "
            f"{memory.size_bytes} on {memory.device_uuid} were told"
        )


def _unusable(what: str) -> OctavoError:
    return OctavoError(Code.FAILED_PRECONDITION, "ARENA_UNUSABLE", f"the arena cannot be used: {what}")
