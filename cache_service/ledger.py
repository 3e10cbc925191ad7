"""The ledger: for each findable block, a record in the arena itself that says what it holds and under which history.

A cache service that takes an arena over from one that was killed proves by it which blocks are cached. A record is
written when a block becomes findable and struck out before the block is handed out again, so a whole record is true at
every instant; one that a death tore has a wrong digest and proves nothing.

    record   digest of block id and what follows | node | parent node (0: root) | length of extras | tokens | extras

Nodes are named by serial numbers, which are given once, because keys may collide and identity decides. Only children
of a root carry the extras. Here belongs the form of records. Not here: what follows from them (prefix, rebuild), files.
"""

import mmap
import struct
from hashlib import blake2b
from typing import NamedTuple, Protocol

from cache_service.block import BlockId

TOKEN_BYTES = 4
DIGEST_BYTES = 16
# Model, revision, KV dtype, adapter, tenant and salt, encoded. A block whose extras are longer has no record.
MAX_EXTRAS_BYTES = 512
_HEAD = struct.Struct("<QQH")  # node, parent node, length of extras
_BLOCK = struct.Struct("<I")
_ALIGNMENT_BYTES = 64


class Record(NamedTuple):
    """What a block holds."""

    node: int  # serial of its node in the prefix tree, above 0; twins have the same
    parent: int  # serial of the node before, lower than `node`; 0: a root
    tokens: bytes  # packed, of the whole block
    extras: bytes  # encoded, of a child of a root; else empty


class Ledger(Protocol):
    """Where records are kept."""

    def write(self, block: BlockId, record: Record) -> None:
        """The block holds this from now on."""

    def strike(self, block: BlockId) -> None:
        """The block holds nothing that anyone may find. Idempotent."""


class NoLedger:
    """Keeps nothing: for memory that dies with its cache service."""

    def write(self, block: BlockId, record: Record) -> None:
        """Nothing."""

    def strike(self, block: BlockId) -> None:
        """Nothing."""


def record_bytes(block_size: int) -> int:
    """Room of one record."""
    longest = DIGEST_BYTES + _HEAD.size + block_size * TOKEN_BYTES + MAX_EXTRAS_BYTES
    return -(-longest // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def ledger_bytes(num_blocks: int, block_size: int) -> int:
    """Room of a whole ledger."""
    return num_blocks * record_bytes(block_size)


class BufferLedger:
    """Records in a buffer: memory that outlives this process.

    Args:
        buffer: writable, of `ledger_bytes`.
    """

    def __init__(self, buffer: mmap.mmap | bytearray, num_blocks: int, block_size: int) -> None:
        self._buffer = memoryview(buffer)
        self._num_blocks = num_blocks
        self._token_bytes = block_size * TOKEN_BYTES
        self._stride = record_bytes(block_size)

    def write(self, block: BlockId, record: Record) -> None:
        """Body first, digest last: what is torn proves nothing."""
        if len(record.extras) > MAX_EXTRAS_BYTES:
            return
        body = _HEAD.pack(record.node, record.parent, len(record.extras)) + record.tokens + record.extras
        start = block * self._stride
        self._buffer[start + DIGEST_BYTES : start + DIGEST_BYTES + len(body)] = body
        self._buffer[start : start + DIGEST_BYTES] = _digest(block, body)

    def strike(self, block: BlockId) -> None:
        """The digest goes, and with it the proof."""
        start = block * self._stride
        self._buffer[start : start + DIGEST_BYTES] = bytes(DIGEST_BYTES)

    def read(self, block: BlockId) -> Record | None:
        """The record of a block, if it is whole."""
        start = block * self._stride
        digest = bytes(self._buffer[start : start + DIGEST_BYTES])
        if digest == bytes(DIGEST_BYTES):
            return None
        rest = bytes(self._buffer[start + DIGEST_BYTES : start + self._stride])
        node, parent, num_extras = _HEAD.unpack_from(rest)
        end_of_tokens = _HEAD.size + self._token_bytes
        body = rest[: end_of_tokens + num_extras]
        if num_extras > MAX_EXTRAS_BYTES or digest != _digest(block, body):
            return None
        return Record(node, parent, body[_HEAD.size : end_of_tokens], body[end_of_tokens:])

    def read_all(self) -> dict[BlockId, Record]:
        """Every whole record. What is torn is struck out."""
        records = {}
        for number in range(1, self._num_blocks):
            block = BlockId(number)
            record = self.read(block)
            if record is not None:
                records[block] = record
            else:
                self.strike(block)
        return records

    def close(self) -> None:
        """Let go of the buffer."""
        self._buffer.release()


def _digest(block: BlockId, body: bytes) -> bytes:
    return blake2b(_BLOCK.pack(block) + body, digest_size=DIGEST_BYTES).digest()
