"""The arena on a CPU: one POSIX shared-memory segment that this process owns and executors map.

    header | journal | block 0 | block 1 | ... | ledger

Files are made with plain calls, because `multiprocessing.shared_memory` lets any attacher's exit unlink the segment.
Three rules keep /dev/shm clean and every mapping whole:
 1. a segment gets its name only when it is complete: all its pages reserved, its header written, its lock held;
 2. owner and attachers hold a shared flock on it for as long as they use it;
 3. whoever gets the exclusive lock may unlink it: nobody uses it, whatever became of its owner.
The owner also holds a lock of its own, by which a successor tells a dead owner from a living one (inheritance).
Not here: what lies in a block (geometry) and who owns which (manager).
"""

import errno
import fcntl
import json
import logging
import mmap
import os
import re
import secrets
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cache_service import refusal
from cache_service.geometry import (
    DATA_OFFSET_BYTES,
    ArenaDescription,
    ArenaLayout,
    KvGeometry,
    align_up,
    check_geometry,
    count_blocks,
    lay_out,
)
from cache_service.journal import JOURNAL_BYTES, Journal
from cache_service.ledger import BufferLedger, ledger_bytes
from cache_service.memory import available_bytes
from octavo.errors import Code, FieldViolation, OctavoError, invalid_argument

log = logging.getLogger(__name__)

SHARED_MEMORY_DIR = "/dev/shm"
MAGIC = b"OCTAVOKV"
VERSION = 2
JOURNAL_OFFSET_BYTES = DATA_OFFSET_BYTES - JOURNAL_BYTES
_HEADER = struct.Struct("<8sII")  # magic, version, length of the JSON that follows
NAME_PREFIX = "octavo-"
_OUT_OF_SPACE = (errno.ENOSPC, errno.EFBIG, errno.ENOMEM, errno.EDQUOT)


class Arena:
    """A segment that this process owns and will unlink."""

    def __init__(self, descriptor: int, description: ArenaDescription) -> None:
        self.description = description
        num_blocks, block_size = description.num_blocks, description.geometry.block_size
        self._ledger_map = mmap.mmap(
            descriptor, ledger_bytes(num_blocks, block_size), offset=_ledger_offset(description)
        )
        self._journal_map = mmap.mmap(descriptor, JOURNAL_BYTES, offset=JOURNAL_OFFSET_BYTES)
        self.ledger = BufferLedger(self._ledger_map, num_blocks, block_size)
        self.journal = Journal(self._journal_map)
        self._descriptor = descriptor

    def close(self) -> None:
        """Unlink the segment; processes that map it keep their mapping. Idempotent."""
        if self._descriptor >= 0:
            Path(self.description.path).unlink(missing_ok=True)
            self.leave()

    def leave(self) -> None:
        """Let go of the segment as the end of this process would. Idempotent."""
        if self._descriptor < 0:
            return
        for part in (self.ledger, self.journal, self._ledger_map, self._journal_map):
            part.close()
        os.close(self._descriptor)
        self._descriptor = -1


def create_arena(
    arena_id: str,
    model_fingerprint: str,
    geometry: KvGeometry,
    kv_bytes: int,
    *,
    directory: str = SHARED_MEMORY_DIR,
    owner: str = "",
) -> Arena:
    """Make a segment of as many whole blocks as fit into `kv_bytes`, every page of it reserved.

    Takes 0.3 s a GiB. Leaves nothing behind when it fails.

    Args:
        owner: who may take it over when this process was killed: the next that goes by this name. Empty: nobody.

    Raises:
        OctavoError: INVALID_ARGUMENT, or RESOURCE_EXHAUSTED ARENA_TOO_LARGE.
    """
    if not re.fullmatch(r"cpu(:\d+)?", arena_id):
        raise invalid_argument(
            FieldViolation("arena_id", f"is {arena_id!r}; this cache service has cpu, cpu:N or cuda:N")
        )
    check_geometry(geometry)
    layout = lay_out(geometry)
    num_blocks = count_blocks(layout, kv_bytes)
    size_bytes = _end_of_blocks(layout, num_blocks) + ledger_bytes(num_blocks, geometry.block_size)
    name = f"{NAME_PREFIX}{arena_id.replace(':', '-')}-{os.getpid()}-{secrets.token_hex(8)}"
    path = f"{directory}/{name}"
    description = ArenaDescription(arena_id, model_fingerprint, geometry, num_blocks, layout, path, size_bytes)
    return Arena(_make_segment(description, directory, owner), description)


def _end_of_blocks(layout: ArenaLayout, num_blocks: int) -> int:
    return align_up(layout.data_offset + num_blocks * layout.block_bytes, mmap.ALLOCATIONGRANULARITY)


def _ledger_offset(description: ArenaDescription) -> int:
    return _end_of_blocks(description.layout, description.num_blocks)


def _make_segment(description: ArenaDescription, directory: str, owner: str) -> int:
    _check_room(description.size_bytes, directory)
    descriptor = os.open(directory, os.O_TMPFILE | os.O_RDWR, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, description.size_bytes)
        os.pwrite(descriptor, _header_of(description, owner), 0)
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        lock_as_owner(descriptor)
        _give_name(descriptor, description.path)
    except OSError as error:
        os.close(descriptor)
        if error.errno in _OUT_OF_SPACE:
            raise refusal.arena_too_large(description.size_bytes, available_bytes(directory), directory) from error
        raise
    return descriptor


def _check_room(size_bytes: int, directory: str) -> None:
    """Ask before reserving: beyond a memory limit the kernel kills instead of answering."""
    free_bytes = available_bytes(directory)
    if size_bytes > free_bytes:
        raise refusal.arena_too_large(size_bytes, free_bytes, directory)


def _give_name(descriptor: int, path: str) -> None:
    # With a directory descriptor Python calls linkat and follows the symbolic link to the nameless file.
    parent = os.open(os.path.dirname(path), os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.link(f"/proc/self/fd/{descriptor}", os.path.basename(path), dst_dir_fd=parent, follow_symlinks=True)
    finally:
        os.close(parent)


def lock_as_owner(descriptor: int) -> None:
    """Be the owner for as long as the descriptor is open. Raises BlockingIOError while another is.

    A lock of the open file (F_OFD_SETLK), because flock says already who maps it, and a lock of the process would go
    when it closes any other descriptor of the file.
    """
    whole_file = struct.pack("hhqqi", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, whole_file)


def _header_of(description: ArenaDescription, owner: str) -> bytes:
    content = json.dumps(asdict(description) | {"owner": owner}, separators=(",", ":")).encode()
    header = _HEADER.pack(MAGIC, VERSION, len(content)) + content
    if len(header) > JOURNAL_OFFSET_BYTES:
        raise invalid_argument(FieldViolation("geometry.layers", "describe more than the header of an arena can hold"))
    return header


# --------------------------------------------------------------------------------------------------------- attaching


@contextmanager
def attached(path: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Hold a segment of another process: yields its descriptor and the content of its header.

    Raises:
        OctavoError: NOT_FOUND ARENA_GONE (unlinked, or about to be), DATA_LOSS (not an arena of this version).
    """
    try:
        descriptor = os.open(path, os.O_RDWR)
    except FileNotFoundError as error:
        raise _gone(path) from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise _gone(path) from error
        if os.fstat(descriptor).st_nlink == 0:
            raise _gone(path)
        yield descriptor, read_header(descriptor)
    finally:
        os.close(descriptor)


def read_header(descriptor: int) -> dict[str, Any]:
    """What a segment says about itself: `ArenaDescription` and its owner. Raises DATA_LOSS if it is not an arena."""
    magic, version, length = _HEADER.unpack(os.pread(descriptor, _HEADER.size, 0).ljust(_HEADER.size, b"\0"))
    if magic != MAGIC or version != VERSION:
        raise OctavoError(Code.DATA_LOSS, "NOT_AN_ARENA", f"magic {magic!r}, version {version}: not an arena")
    return json.loads(os.pread(descriptor, length, _HEADER.size))


def _gone(path: str) -> OctavoError:
    return OctavoError(Code.NOT_FOUND, "ARENA_GONE", f"arena {path} is gone; register again to get the present one")


# --------------------------------------------------------------------------------------------------------- reclaiming


def reclaim_stale(directory: str = SHARED_MEMORY_DIR) -> list[str]:
    """Unlink this user's segments that nobody holds any more, left by processes that were killed. Returns their paths.

    Safe beside other cache services that start, run and end: only the holder of the exclusive lock unlinks.
    """
    return [entry.path for entry in os.scandir(directory) if entry.name.startswith(NAME_PREFIX) and _reclaim(entry)]


def _reclaim(entry: os.DirEntry[str]) -> bool:
    try:
        if not entry.is_file(follow_symlinks=False) or entry.stat(follow_symlinks=False).st_uid != os.geteuid():
            return False
        descriptor = os.open(entry.path, os.O_RDWR | os.O_NOFOLLOW)
    except OSError:  # it went, or it is not ours
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.pread(descriptor, len(MAGIC), 0) != MAGIC:
            return False
        os.unlink(entry.path)
    except OSError:  # somebody holds it, or another was faster
        return False
    finally:
        os.close(descriptor)
    log.info("reclaimed %s, which nobody held any more", entry.path)
    return True
