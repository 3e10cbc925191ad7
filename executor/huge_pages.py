"""Shared memory in huge pages, where Linux gives them: blocks are read in any order, and 4 KiB at a time most of the
addresses must be looked up again.

A tmpfs file gets them neither from its mount, unless that says so, nor by advice: its pages are gathered afterwards
(MADV_COLLAPSE, Linux 6.1), for every process that maps it, in a thread that gives way to all others. Whatever the
kernel refuses stays as it was.
"""

import ctypes
import errno
import logging
import mmap
import os
import threading
import weakref
from pathlib import Path

import torch
from torch import Tensor

HUGE_PAGE_BYTES = 2 << 20
_MADV_COLLAPSE = 25
_PROT_NONE, _MAP_NORESERVE, _MAP_FIXED = 0, 0x4000, 0x10
_LOWEST_PRIORITY = 19
_ENABLED = Path("/sys/kernel/mm/transparent_hugepage/enabled")

log = logging.getLogger(__name__)

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def map_aligned(descriptor: int, size_bytes: int) -> Tensor:
    """Map a whole file, shared, at an address that huge pages need.

    The mapping holds no lock that the descriptor has: it is of another opening of the file.

    Returns:
        [size_bytes] uint8; the mapping ends with the last tensor on it.

    Raises:
        OSError: it cannot be mapped.
    """
    opened_again = os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
    try:
        return _map_shared(opened_again, size_bytes)
    finally:
        os.close(opened_again)


def _map_shared(descriptor: int, size_bytes: int) -> Tensor:
    reserved_bytes = size_bytes + HUGE_PAGE_BYTES
    reserved = _map(None, reserved_bytes, _PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE, -1)
    address = -(-reserved // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    try:
        _map(address, size_bytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_FIXED, descriptor)
    except OSError:
        _libc.munmap(reserved, reserved_bytes)
        raise
    memory = (ctypes.c_uint8 * size_bytes).from_address(address)
    weakref.finalize(memory, _libc.munmap, reserved, reserved_bytes).atexit = False  # threads may still read it then
    return torch.frombuffer(memory, dtype=torch.uint8)


def _map(address: int | None, size_bytes: int, protection: int, flags: int, descriptor: int) -> int:
    mapped = _libc.mmap(address, size_bytes, protection, flags, descriptor, 0)
    if mapped == ctypes.c_void_p(-1).value:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return int(mapped)


class Collapsing:
    """Gathers the pages of a mapping into huge ones, a huge page at a time, while others use it."""

    def __init__(self, memory: Tensor) -> None:
        """memory: from `map_aligned`."""
        self.num_collapsed = 0  # huge pages that there are
        self._memory = memory  # holds the mapping
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="huge-pages", daemon=True)
        self._thread.start()

    @property
    def is_at_work(self) -> bool:
        """Whether there is more to gather."""
        return self._thread.is_alive()

    def stop(self) -> None:
        """Return when nothing is gathered any more."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        if not may_collapse():
            return
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)
        address = self._memory.data_ptr()
        for page in range(self._memory.numel() // HUGE_PAGE_BYTES):
            if self._stop.is_set():
                return
            if _libc.madvise(address + page * HUGE_PAGE_BYTES, HUGE_PAGE_BYTES, _MADV_COLLAPSE) == 0:
                self.num_collapsed += 1
            elif ctypes.get_errno() == errno.EINVAL:  # this kernel cannot
                break
        log.debug("%d of %d MiB of KV blocks are in huge pages", self.num_collapsed * 2, self._memory.numel() >> 20)


def may_collapse() -> bool:
    """Whether this machine has huge pages and its administrator did not switch them off, which collapsing ignores."""
    try:
        return "[never]" not in _ENABLED.read_text()
    except OSError:
        return False
