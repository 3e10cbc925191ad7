"""Octavo's BlockManager, in this process, on the trace of `block_trace`.

python octavo_blocks_peer.py [--ledger] < rounds.jsonl
"""

import sys
from array import array

import block_trace

from cache_service.ledger import BufferLedger, ledger_bytes
from cache_service.manager import BlockManager
from cache_service.operation import Allocation, Commit, Extension, LeaseId, Release, SequenceId
from cache_service.prefix import Extras, blake2b_key, pack_tokens

BLOCK_SIZE = block_trace.BLOCK_SIZE
LEASE = LeaseId(1)
NOW = 0.0


class Request:
    """What a router knows of one."""

    def __init__(self, sequence_id: SequenceId, num_tokens: int, num_blocks: int) -> None:
        self.sequence_id, self.num_tokens, self.num_blocks = sequence_id, num_tokens, num_blocks


class Manager:
    """As a router's operations reach it: one extension and one commit for each new block.

    Args:
        has_ledger: records what blocks hold, as arenas in shared memory do, for a successor of the cache service.
    """

    hashes_in_look_up = True

    def __init__(self, num_blocks: int, has_ledger: bool) -> None:
        memory = bytearray(ledger_bytes(num_blocks, BLOCK_SIZE)) if has_ledger else bytearray()
        ledger = BufferLedger(memory, num_blocks, BLOCK_SIZE) if has_ledger else None
        self._manager = BlockManager(num_blocks, BLOCK_SIZE, ledger=ledger)

    def native(self, tokens: "array[int]") -> "array[int]":
        return tokens

    def admit(self, number: int, prompt: "array[int]") -> Request:
        sequence_id = SequenceId(number + 1)
        (allocated,) = self._manager.allocate(LEASE, [Allocation(sequence_id, prompt)], NOW)
        self._manager.commit(LEASE, Commit(sequence_id, len(prompt), len(prompt), array("I")), NOW)
        return Request(sequence_id, len(prompt), len(allocated.block_ids))  # type: ignore[union-attr]

    def grow(self, request: Request, tokens: "array[int]") -> None:
        have = request.num_blocks
        (extended,) = self._manager.extend(LEASE, [Extension(request.sequence_id, have, have + 1, have + 1)], NOW)
        num_tokens = request.num_tokens + len(tokens)
        self._manager.commit(LEASE, Commit(request.sequence_id, num_tokens, request.num_tokens, tokens), NOW)
        request.num_tokens, request.num_blocks = num_tokens, have + len(extended.block_ids)  # type: ignore[union-attr]

    def release(self, request: Request) -> None:
        self._manager.release(LEASE, Release(request.sequence_id), NOW)

    def hash(self, prompt: "array[int]") -> bytes:
        packed, key = pack_tokens(prompt), blake2b_key(Extras().encode())
        for start in range(0, len(packed), 4 * BLOCK_SIZE):
            key = blake2b_key(key + packed[start : start + 4 * BLOCK_SIZE])
        return key

    def look_up(self, number: int, prompt: "array[int]", keys: bytes) -> int:
        return self._manager.match_prefix(prompt, Extras())


def main() -> None:
    has_ledger = "--ledger" in sys.argv[1:]
    block_trace.serve("with its ledger" if has_ledger else "", lambda num_blocks: Manager(num_blocks, has_ledger))


if __name__ == "__main__":
    main()
