"""The few calls of CUDA's driver that device arenas need: memory that several processes hold, and its mapping.

One thin, typed layer over `cuda.bindings.driver`, which is imported only when a device is asked for. Here belong the
calls, their structures and their errors. Not here: what the memory is for, who may have it (memory_handle).

Memory of `cuMemCreate` lives as long as anything holds it: an allocation's handle, an exported descriptor, a mapping,
in whatever process. Memory of `cuMemAlloc` (the older IPC handles) lives as long as its process leaves it.
"""

import ctypes
import importlib
from typing import Any, NewType

from octavo.errors import Code, OctavoError

Allocation = NewType("Allocation", int)  # a CUmemGenericAllocationHandle
Address = NewType("Address", int)  # a CUdeviceptr

IPC_HANDLE_BYTES = 64
_UNSUPPORTED = frozenset(
    {"CUDA_ERROR_NOT_SUPPORTED", "CUDA_ERROR_NOT_PERMITTED", "CUDA_ERROR_OPERATING_SYSTEM", "CUDA_ERROR_INVALID_DEVICE"}
)


class CudaError(Exception):
    """A call of the driver that failed.

    Attributes:
        call: its name.
        result: the name of its `CUresult`.
    """

    def __init__(self, call: str, result: str) -> None:
        super().__init__(f"{call} failed with {result}")
        self.call = call
        self.result = result

    @property
    def is_out_of_memory(self) -> bool:
        return self.result == "CUDA_ERROR_OUT_OF_MEMORY"

    @property
    def is_unsupported(self) -> bool:
        """Whether this machine, driver or container does not do such a thing at all."""
        return self.result in _UNSUPPORTED


class CudaDriver:
    """The driver of this process, initialized."""

    def __init__(self, binding: Any) -> None:
        """binding: `cuda.bindings.driver`, or what stands for it. Raises CudaError."""
        self._binding = binding
        self._contexts: dict[int, Any] = {}
        self._call("cuInit", 0)

    # ------------------------------------------------------------------------------------------------------ the device

    @property
    def num_devices(self) -> int:
        return int(self._call("cuDeviceGetCount"))

    def device_uuid(self, ordinal: int) -> str:
        """What tells a device from any other, whatever number a process knows it by."""
        return bytes(self._call("cuDeviceGetUuid", self._device(ordinal)).bytes).hex()

    def total_bytes(self, ordinal: int) -> int:
        return int(self._call("cuDeviceTotalMem", self._device(ordinal)))

    def exports_descriptors(self, ordinal: int) -> bool:
        """Whether the driver says that memory of the device can be shared by file descriptors."""
        attributes = self._binding.CUdevice_attribute
        wanted = (
            attributes.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED,
            attributes.CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED,
        )
        device = self._device(ordinal)
        return all(int(self._call("cuDeviceGetAttribute", attribute, device)) for attribute in wanted)

    def use_primary_context(self, ordinal: int) -> None:
        """Make the device's primary context, the one that torch uses, the current one of this thread."""
        if ordinal not in self._contexts:
            self._contexts[ordinal] = self._call("cuDevicePrimaryCtxRetain", self._device(ordinal))
        self._call("cuCtxSetCurrent", self._contexts[ordinal])

    def synchronize(self) -> None:
        """Wait for all work of the current context."""
        self._call("cuCtxSynchronize")

    # ---------------------------------------------------------------------------------- memory behind file descriptors

    def granularity_bytes(self, ordinal: int) -> int:
        """Sizes of allocations are multiples of it."""
        minimum = self._binding.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        return int(self._call("cuMemGetAllocationGranularity", self._properties(ordinal), minimum))

    def create(self, ordinal: int, size_bytes: int) -> Allocation:
        """Allocate memory that is mapped nowhere yet; needs no context. Released by `release`."""
        return Allocation(int(self._call("cuMemCreate", size_bytes, self._properties(ordinal), 0)))

    def export_descriptor(self, allocation: Allocation) -> int:
        """A file descriptor that holds the memory; the caller closes it."""
        return int(self._call("cuMemExportToShareableHandle", self._handle(allocation), self._posix_kind(), 0))

    def import_descriptor(self, descriptor: int) -> Allocation:
        """The allocation behind a descriptor, which may be closed then. Released by `release`."""
        return Allocation(int(self._call("cuMemImportFromShareableHandle", descriptor, self._posix_kind())))

    def release(self, allocation: Allocation) -> None:
        """Let go of an allocation; what is mapped stays mapped."""
        self._call("cuMemRelease", self._handle(allocation))

    def map(self, allocation: Allocation, ordinal: int, size_bytes: int) -> Address:
        """Map the whole allocation for reading and writing by the device. Leaves nothing behind when it fails."""
        address = Address(int(self._call("cuMemAddressReserve", size_bytes, 0, self._pointer(Address(0)), 0)))
        try:
            self._call("cuMemMap", self._pointer(address), size_bytes, 0, self._handle(allocation), 0)
            try:
                self._call("cuMemSetAccess", self._pointer(address), size_bytes, [self._access(ordinal)], 1)
            except CudaError:
                self._call("cuMemUnmap", self._pointer(address), size_bytes)
                raise
        except CudaError:
            self._call("cuMemAddressFree", self._pointer(address), size_bytes)
            raise
        return address

    def unmap(self, address: Address, size_bytes: int) -> None:
        """Undo `map`. No work of the device may still use the memory."""
        self._call("cuMemUnmap", self._pointer(address), size_bytes)
        self._call("cuMemAddressFree", self._pointer(address), size_bytes)

    # --------------------------------------------------------------------------------- memory behind older IPC handles

    def allocate(self, size_bytes: int) -> Address:
        """Plain memory of the current context's device."""
        return Address(int(self._call("cuMemAlloc", size_bytes)))

    def free(self, address: Address) -> None:
        """Undo `allocate`. Every process must have closed its handle before."""
        self._call("cuMemFree", self._pointer(address))

    def ipc_handle(self, address: Address) -> bytes:
        """What another process of this machine opens the memory by."""
        # The binding gives the structure no field: its bytes are read where they lie.
        structure = self._call("cuIpcGetMemHandle", self._pointer(address))
        return ctypes.string_at(structure.getPtr(), IPC_HANDLE_BYTES)

    def open_ipc_handle(self, handle: bytes) -> Address:
        """Map memory of another process into the current context; once in a process. Undone by `close_ipc_handle`."""
        structure = self._binding.CUipcMemHandle()
        ctypes.memmove(structure.getPtr(), handle, IPC_HANDLE_BYTES)
        lazily = int(self._binding.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS)
        return Address(int(self._call("cuIpcOpenMemHandle", structure, lazily)))

    def close_ipc_handle(self, address: Address) -> None:
        """Undo `open_ipc_handle`. No work of the device may still use the memory."""
        self._call("cuIpcCloseMemHandle", self._pointer(address))

    # --------------------------------------------------------------------------------------------------------- helpers

    def _call(self, name: str, *arguments: Any) -> Any:
        result, *values = getattr(self._binding, name)(*arguments)
        if int(result) != 0:
            raise CudaError(name, getattr(result, "name", str(result)))
        return values[0] if values else None

    def _device(self, ordinal: int) -> Any:
        return self._call("cuDeviceGet", ordinal)

    def _properties(self, ordinal: int) -> Any:
        properties = self._binding.CUmemAllocationProp()
        properties.type = self._binding.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location.type = self._binding.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        properties.location.id = ordinal
        properties.requestedHandleTypes = self._posix_kind()
        return properties

    def _access(self, ordinal: int) -> Any:
        access = self._binding.CUmemAccessDesc()
        access.location.type = self._binding.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = ordinal
        access.flags = self._binding.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        return access

    def _posix_kind(self) -> Any:
        return self._binding.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR

    def _handle(self, allocation: Allocation) -> Any:
        return self._binding.CUmemGenericAllocationHandle(allocation)

    def _pointer(self, address: Address) -> Any:
        return self._binding.CUdeviceptr(address)


def load_driver() -> CudaDriver:
    """The driver of this machine.

    Raises:
        OctavoError: FAILED_PRECONDITION CUDA_NOT_AVAILABLE: no binding, no driver, or no device.
    """
    try:
        binding = importlib.import_module("cuda.bindings.driver")
    except ImportError as error:
        raise _not_available(f"cuda-bindings is not installed ({error}); pip install 'octavo[cuda]'") from error
    try:
        driver = CudaDriver(binding)
        if driver.num_devices == 0:
            raise _not_available("the driver sees no device; CUDA_VISIBLE_DEVICES may hide it")
    except (CudaError, RuntimeError) as error:  # RuntimeError: there is no libcuda to load
        raise _not_available(f"{error}; is an NVIDIA driver installed, and the device visible here?") from error
    return driver


def parse_ordinal(arena_id: str) -> int | None:
    """The number of the device in `cuda:N`; None for what names no such device."""
    kind, _, number = arena_id.partition(":")
    return int(number) if kind == "cuda" and number.isascii() and number.isdigit() and len(number) <= 3 else None


def _not_available(why: str) -> OctavoError:
    return OctavoError(Code.FAILED_PRECONDITION, "CUDA_NOT_AVAILABLE", f"CUDA cannot be used: {why}")
