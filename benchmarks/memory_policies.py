"""How KV memory is given to requests: contiguous, as the baselines of the PagedAttention paper, and in blocks.

Here belongs what a request takes, when it may grow, and what each slot of the memory holds. Not here: when requests
come and how fast they run (memory_simulation).
"""

from array import array
from dataclasses import dataclass
from typing import Protocol

from benchmarks.buddy import BuddyAllocator
from cache_service.manager import BlockManager
from cache_service.operation import (
    Allocated,
    Allocation,
    Commit,
    Extended,
    Extension,
    Fork,
    LeaseId,
    Release,
    SequenceId,
)
from octavo.errors import OctavoError

LEASE = LeaseId(1)
MAX_TOKENS = 2048  # of prompt and answer


@dataclass(slots=True, eq=False)
class Request:
    """Lengths in tokens. All `num_answers` answers have the same length."""

    arrival_s: float
    num_prompt: int
    num_output: int
    num_answers: int = 1
    num_generated: int = 0  # of each answer

    @property
    def num_held(self) -> int:
        """Tokens of one answer and its prompt; the newest has its KV once the policy made it grow."""
        return self.num_prompt + self.num_generated


@dataclass(frozen=True)
class Shares:
    """What the slots of the whole KV memory hold, as shares of it; their sum is 1."""

    token_states: float
    reservation: float  # will be used by a later token of the same request
    internal: float  # will never be used, inside what a request was given
    external: float  # in no request's hands, or rounded up by the allocator


class Policy(Protocol):
    """One way to give memory to requests."""

    def admit(self, request: Request) -> bool:
        """Take memory for the prompt and whatever the policy takes ahead; False: there is none, nothing changed."""
        ...

    def grow(self, request: Request) -> bool:
        """Make room for the newest token of each answer; False: there is none, and it may be asked for again."""
        ...

    def release(self, request: Request) -> None: ...

    def shares(self, running: list[Request]) -> Shares: ...


class Contiguous:
    """One chunk for each request, for its whole life.

    Args:
        reserve: "max": for the longest possible sequence; "pow2": for the answer's length rounded up to a power of
            two; "oracle": for exactly what the request will need. The last two know the length beforehand.
    """

    def __init__(self, num_slots: int, reserve: str) -> None:
        self._num_slots = num_slots
        self._reserve = reserve
        self._buddies = BuddyAllocator(num_slots)
        self._chunks: dict[Request, tuple[int, int]] = {}

    def _reserved(self, request: Request) -> int:
        answer = {
            "max": MAX_TOKENS,
            "pow2": 1 << (request.num_output - 1).bit_length(),
            "oracle": request.num_output,
        }[self._reserve]
        return min(request.num_prompt + answer, MAX_TOKENS)

    def admit(self, request: Request) -> bool:
        chunk = self._buddies.allocate(self._reserved(request))
        if chunk is None:
            return False
        self._chunks[request] = chunk
        return True

    def grow(self, request: Request) -> bool:
        return request.num_held <= self._reserved(request)

    def release(self, request: Request) -> None:
        self._buddies.free(*self._chunks.pop(request))

    def shares(self, running: list[Request]) -> Shares:
        held = sum(request.num_held for request in running)
        needed = sum(request.num_prompt + request.num_output for request in running)
        reserved = sum(map(self._reserved, running))
        slots = self._num_slots
        return Shares(held / slots, (needed - held) / slots, (reserved - needed) / slots, (slots - reserved) / slots)


class Paged:
    """Blocks from the block manager of the cache service, shared between the answers of a request."""

    def __init__(self, num_slots: int, block_size: int) -> None:
        self._block_size = block_size
        self._num_slots = num_slots // block_size * block_size
        self.manager = BlockManager(num_slots // block_size + 1, block_size)
        self._sequences: dict[Request, list[SequenceId]] = {}
        self._next_id = 1

    def _ids(self, count: int) -> list[SequenceId]:
        first, self._next_id = self._next_id, self._next_id + count
        return [SequenceId(first + i) for i in range(count)]

    def admit(self, request: Request) -> bool:
        """The prompt of the first answer; the others fork from it with their first token, as the router does it."""
        (first,) = self._ids(1)
        prompt = array("I", bytes(4 * request.num_held))
        (answer,) = self.manager.allocate(LEASE, [Allocation(first, prompt, bypass_cache=True)], 0.0)
        if not isinstance(answer, Allocated):
            return False
        self.manager.commit(LEASE, Commit(first, request.num_held, 0, array("I")), 0.0)
        self._sequences[request] = [first]
        return True

    def grow(self, request: Request) -> bool:
        sequences = self._sequences[request]
        if len(sequences) < request.num_answers:
            children = self._ids(request.num_answers - 1)
            try:
                self.manager.fork(LEASE, Fork(sequences[0], tuple(children)), 0.0)
            except OctavoError:
                return False
            sequences += children
        num_blocks = -(-request.num_held // self._block_size)
        have = -(-(request.num_held - 1) // self._block_size)
        if num_blocks > have:
            wanted = [Extension(each, have, num_blocks, num_blocks) for each in sequences]
            if not all(isinstance(each, Extended) for each in self.manager.extend(LEASE, wanted, 0.0)):
                return False
        for each in sequences:
            self.manager.commit(LEASE, Commit(each, request.num_held, request.num_held - 1, array("I", [0])), 0.0)
        return True

    def release(self, request: Request) -> None:
        for each in self._sequences.pop(request):
            self.manager.release(LEASE, Release(each), 0.0)

    def shares(self, running: list[Request]) -> Shares:
        used = self.manager.stats().used_blocks * self._block_size
        held = sum(map(self._distinct_tokens, running))
        return Shares(held / self._num_slots, 0.0, (used - held) / self._num_slots, 1 - used / self._num_slots)

    def _distinct_tokens(self, request: Request) -> int:
        """Tokens with KV of their own: full blocks of the prompt count once for all answers."""
        num_shared = request.num_prompt // self._block_size * self._block_size
        return num_shared + len(self._sequences[request]) * (request.num_held - num_shared)

    def saved_by_sharing(self) -> float:
        """Blocks that the tables name more often than once, as a share of those they name: what sharing saves."""
        named = sum(
            len(answers) * -(-request.num_held // self._block_size) for request, answers in self._sequences.items()
        )
        return 1 - self.manager.stats().used_blocks / named if named else 0.0
