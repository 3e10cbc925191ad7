"""CUDA's driver without a device: memory is anonymous files, and lives and dies by the same rules.

An allocation is a file, an exported descriptor one more descriptor of it, a mapping one of this process: so memory that
one process made is read by another, and stays for as long as anything holds it, as on a device. Older IPC handles name
a descriptor of the process that made it, and are dead when it is. Calls are those of `cuda.bindings.driver` by name and
arguments, which `test_cuda_driver` compares.
"""

import ctypes
import mmap
import os
import struct
from dataclasses import dataclass, field
from enum import IntEnum
from types import SimpleNamespace
from typing import Any

LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.mmap.restype = ctypes.c_void_p
LIBC.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
LIBC.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
MAP_FIXED = 0x10
GRANULARITY_BYTES = 1 << 16


class Result(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_INVALID_CONTEXT = 201
    CUDA_ERROR_MAP_FAILED = 205
    CUDA_ERROR_INVALID_HANDLE = 400
    CUDA_ERROR_NOT_PERMITTED = 800
    CUDA_ERROR_NOT_SUPPORTED = 801


class IpcHandle:
    """64 bytes, and no fields, as the real one."""

    def __init__(self) -> None:
        self._bytes = ctypes.create_string_buffer(64)

    def getPtr(self) -> int:
        return ctypes.addressof(self._bytes)


def _structure(*parts: str) -> Any:
    made = SimpleNamespace(type=None)
    for part in parts:
        setattr(made, part, SimpleNamespace())
    return made


@dataclass
class FakeCuda:
    """Stands for the module `cuda.bindings.driver`.

    Attributes:
        uuids: of the devices that this process sees.
        descriptors: whether the driver says that it exports them.
        errors: call -> the result that it fails with.
        calls: names, in order.
    """

    uuids: tuple[bytes, ...] = (b"\x01" * 16,)
    descriptors: bool = True
    capacity_bytes: int = 1 << 30
    errors: dict[str, Result] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)
    allocations: dict[int, int] = field(default_factory=dict)  # handle -> descriptor
    reserved: dict[int, int] = field(default_factory=dict)  # address -> size
    mapped: dict[int, int] = field(default_factory=dict)
    plain: dict[int, int] = field(default_factory=dict)  # address of cuMemAlloc -> descriptor
    opened: dict[int, int] = field(default_factory=dict)  # address of cuIpcOpenMemHandle -> size
    has_context: bool = False

    CUdevice_attribute = SimpleNamespace(
        CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED=102,
        CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED=103,
    )
    CUmemAllocationGranularity_flags = SimpleNamespace(CU_MEM_ALLOC_GRANULARITY_MINIMUM=0)
    CUmemAllocationType = SimpleNamespace(CU_MEM_ALLOCATION_TYPE_PINNED=1)
    CUmemLocationType = SimpleNamespace(CU_MEM_LOCATION_TYPE_DEVICE=1)
    CUmemAllocationHandleType = SimpleNamespace(CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR=1)
    CUmemAccess_flags = SimpleNamespace(CU_MEM_ACCESS_FLAGS_PROT_READWRITE=3)
    CUipcMem_flags = SimpleNamespace(CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS=1)
    CUmemGenericAllocationHandle = int
    CUdeviceptr = int
    CUipcMemHandle = IpcHandle

    def CUmemAllocationProp(self) -> Any:
        return _structure("location")

    def CUmemAccessDesc(self) -> Any:
        return _structure("location")

    def __getattr__(self, name: str) -> Any:
        """A call of the driver: recorded, failed where a test wants it, else done."""
        if not name.startswith("cu"):
            raise AttributeError(name)
        do = object.__getattribute__(self, f"_{name}")

        def call(*arguments: Any) -> tuple[Any, ...]:
            self.calls.append(name)
            if name in self.errors:
                return (self.errors[name],)
            done = do(*arguments)
            return (done,) if isinstance(done, Result) else (Result.CUDA_SUCCESS, *(() if done is None else (done,)))

        return call

    @property
    def left(self) -> dict[str, int]:
        """What is still held, by kind; empty when nothing is."""
        kinds = ("allocations", "reserved", "mapped", "plain", "opened")
        return {kind: len(getattr(self, kind)) for kind in kinds if getattr(self, kind)}

    # ------------------------------------------------------------------------------------------------------ the device

    def _cuInit(self, flags: int) -> None: ...

    def _cuDeviceGetCount(self) -> int:
        return len(self.uuids)

    def _cuDeviceGet(self, ordinal: int) -> int:
        return ordinal

    def _cuDeviceGetUuid(self, device: int) -> Any:
        return SimpleNamespace(bytes=self.uuids[device])

    def _cuDeviceTotalMem(self, device: int) -> int:
        return self.capacity_bytes

    def _cuDeviceGetAttribute(self, attribute: int, device: int) -> int:
        return int(self.descriptors)

    def _cuDevicePrimaryCtxRetain(self, device: int) -> int:
        return device + 1

    def _cuCtxSetCurrent(self, context: int) -> None:
        self.has_context = True

    def _cuCtxSynchronize(self) -> None: ...

    # ------------------------------------------------------------------------------------------------------ the memory

    def _cuMemGetAllocationGranularity(self, properties: Any, option: int) -> int:
        return GRANULARITY_BYTES

    def _cuMemCreate(self, size: int, properties: Any, flags: int) -> Any:
        if size > self.capacity_bytes:
            return Result.CUDA_ERROR_OUT_OF_MEMORY
        if size % GRANULARITY_BYTES or properties.requestedHandleTypes != 1:
            return Result.CUDA_ERROR_INVALID_VALUE
        return self._keep(_file(size))

    def _cuMemExportToShareableHandle(self, handle: int, kind: int, flags: int) -> int:
        return os.dup(self.allocations[handle])

    def _cuMemImportFromShareableHandle(self, descriptor: int, kind: int) -> int:
        return self._keep(os.dup(descriptor))

    def _cuMemRelease(self, handle: int) -> None:
        os.close(self.allocations.pop(handle))

    def _cuMemAddressReserve(self, size: int, alignment: int, address: int, flags: int) -> int:
        found = LIBC.mmap(None, size, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
        self.reserved[found] = size
        return found

    def _cuMemMap(self, address: int, size: int, offset: int, handle: int, flags: int) -> None:
        assert self.reserved[address] == size, "as reserved"
        _map_file(self.allocations[handle], size, address)
        self.mapped[address] = size

    def _cuMemSetAccess(self, address: int, size: int, descriptions: list[Any], count: int) -> Any:
        return None if len(descriptions) == count == 1 else Result.CUDA_ERROR_INVALID_VALUE

    def _cuMemUnmap(self, address: int, size: int) -> None:
        assert self.mapped.pop(address) == size, "as mapped"
        LIBC.munmap(address, size)

    def _cuMemAddressFree(self, address: int, size: int) -> None:
        assert address not in self.mapped, "unmapped first"
        assert self.reserved.pop(address) == size, "as reserved"

    def _cuMemAlloc(self, size: int) -> Any:
        if not self.has_context:
            return Result.CUDA_ERROR_INVALID_CONTEXT
        descriptor = _file(size)
        address = _map_file(descriptor, size, None)
        self.plain[address] = descriptor
        return address

    def _cuMemFree(self, address: int) -> None:
        os.close(self.plain.pop(address))

    def _cuIpcGetMemHandle(self, address: int) -> IpcHandle:
        handle = IpcHandle()
        ctypes.memmove(handle.getPtr(), struct.pack("2q", os.getpid(), self.plain[address]), 16)
        return handle

    def _cuIpcOpenMemHandle(self, handle: IpcHandle, flags: int) -> Any:
        if not self.has_context:
            return Result.CUDA_ERROR_INVALID_CONTEXT
        pid, number = struct.unpack("2q", ctypes.string_at(handle.getPtr(), 16))
        try:
            descriptor = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR)
        except OSError:
            return Result.CUDA_ERROR_INVALID_HANDLE
        size = os.fstat(descriptor).st_size
        address = _map_file(descriptor, size, None)
        os.close(descriptor)
        self.opened[address] = size
        return address

    def _cuIpcCloseMemHandle(self, address: int) -> None:
        LIBC.munmap(address, self.opened.pop(address))

    def _keep(self, descriptor: int) -> int:
        handle = 0x10000 + descriptor
        self.allocations[handle] = descriptor
        return handle


def _file(size: int) -> int:
    descriptor = os.memfd_create("fake-cuda")
    os.ftruncate(descriptor, size)
    return descriptor


def _map_file(descriptor: int, size: int, address: int | None) -> int:
    flags = mmap.MAP_SHARED | (MAP_FIXED if address else 0)
    found = LIBC.mmap(address, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, descriptor, 0)
    assert found not in (None, ctypes.c_void_p(-1).value), os.strerror(ctypes.get_errno())
    return found
