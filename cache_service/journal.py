"""The journal: who may write into an arena, kept in the arena itself for the cache service that comes after this one.

Executors with their processes, open sessions, live leases: little, and it changes seldom, so it is written whole each
time, by turns into two places of which the whole one with the higher number counts.

    place    digest of all that follows | number | length | JSON

Here belongs its form and what it says. Not here: who is taken over by it (succession), files (arena).
"""

import json
import mmap
import struct
from dataclasses import asdict, dataclass
from hashlib import blake2b
from typing import Any

JOURNAL_BYTES = 1024 * 1024
_PLACE_BYTES = JOURNAL_BYTES // 2
_DIGEST_BYTES = 16
_HEAD = struct.Struct("<QI")  # number, length


@dataclass(frozen=True, slots=True)
class ExecutorEntry:
    """A process that maps the arena. `started` and `pid` together name one process of this machine."""

    executor_id: str
    epoch: int
    arena_id: str
    pid: int  # 0: not to be seen
    started: int
    sessions: tuple[tuple[int, int], ...]  # open: (session id, lease id)
    closed: tuple[tuple[int, int], ...]  # ranges [start, end) of session ids that are over


@dataclass(frozen=True, slots=True)
class LeaseEntry:
    """A live lease."""

    lease_id: int
    client_id: str
    client_epoch: int
    ttl_s: float


@dataclass(frozen=True, slots=True)
class JournalEntry:
    """All that must be known of the time before.

    Attributes:
        last_epoch: the highest ever granted to anybody.
        last_lease_id: the highest ever granted.
    """

    executors: tuple[ExecutorEntry, ...] = ()
    leases: tuple[LeaseEntry, ...] = ()
    last_epoch: int = 0
    last_lease_id: int = 0
    number: int = 0  # higher than that of any entry before


class Journal:
    """The journal in a buffer: memory that outlives this process.

    Args:
        buffer: writable, JOURNAL_BYTES long.
    """

    def __init__(self, buffer: mmap.mmap | bytearray) -> None:
        self._buffer = memoryview(buffer)
        found = [self._read_place(place) for place in (0, 1)]
        numbers = [entry.number if entry else 0 for entry in found]
        self._newest = numbers.index(max(numbers))  # place

    def write(self, entry: JournalEntry) -> bool:
        """Replace the older of the two places. False: it does not fit, and nothing can be taken over any more."""
        content = json.dumps(asdict(entry), separators=(",", ":")).encode()
        fits = len(content) <= _PLACE_BYTES - _DIGEST_BYTES - _HEAD.size
        self._newest = 1 - self._newest
        self._write_place(self._newest, _HEAD.pack(entry.number, len(content)) + content if fits else b"")
        if not fits:
            self._write_place(1 - self._newest, b"")
        return fits

    def read(self) -> JournalEntry | None:
        """The newest whole entry."""
        found = [entry for entry in (self._read_place(0), self._read_place(1)) if entry is not None]
        return max(found, key=lambda entry: entry.number, default=None)

    def close(self) -> None:
        """Let go of the buffer."""
        self._buffer.release()

    def _write_place(self, place: int, body: bytes) -> None:
        start = place * _PLACE_BYTES
        digest = blake2b(body, digest_size=_DIGEST_BYTES).digest() if body else bytes(_DIGEST_BYTES)
        self._buffer[start : start + _DIGEST_BYTES] = bytes(_DIGEST_BYTES)
        self._buffer[start + _DIGEST_BYTES : start + _DIGEST_BYTES + len(body)] = body
        self._buffer[start : start + _DIGEST_BYTES] = digest

    def _read_place(self, place: int) -> JournalEntry | None:
        start = place * _PLACE_BYTES
        digest = bytes(self._buffer[start : start + _DIGEST_BYTES])
        _, length = _HEAD.unpack_from(self._buffer, start + _DIGEST_BYTES)
        if length > _PLACE_BYTES:
            return None
        body = bytes(self._buffer[start + _DIGEST_BYTES : start + _DIGEST_BYTES + _HEAD.size + length])
        if digest != blake2b(body, digest_size=_DIGEST_BYTES).digest():
            return None
        return _entry_of(json.loads(body[_HEAD.size :]))


def _entry_of(content: dict[str, Any]) -> JournalEntry:
    executors = tuple(
        ExecutorEntry(**(found | {name: tuple(map(tuple, found[name])) for name in ("sessions", "closed")}))
        for found in content["executors"]
    )
    leases = tuple(LeaseEntry(**found) for found in content["leases"])
    return JournalEntry(executors, leases, content["last_epoch"], content["last_lease_id"], content["number"])
