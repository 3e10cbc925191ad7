"""All live requests by what the engine looks them up by: id, place in the queue, slot, sequence. No decisions here."""

import bisect
import heapq
from collections.abc import Iterator

from router.ids import SequenceId, Slot
from router.live import Choice, LiveRequest, Phase


class Roster:
    """Live requests, their choices, and free slots.

    Args:
        max_running: slots there are.
    """

    def __init__(self, max_running: int) -> None:
        self.running: dict[Slot, Choice] = {}
        self.waiting: list[Choice] = []  # in order of service
        self.allocating: dict[SequenceId, Choice] = {}
        self.forking: dict[SequenceId, Choice] = {}
        self._by_id: dict[tuple[str, str], LiveRequest] = {}  # (tenant, request id)
        self._by_sequence: dict[SequenceId, Choice] = {}
        self._free_slots = [Slot(number) for number in range(max_running)]
        self._num_arrived = 0
        self._num_sequences = 0

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[LiveRequest]:
        return iter(list(self._by_id.values()))

    @property
    def num_running(self) -> int:
        """Requests with a choice that runs."""
        return len({choice.request for choice in list(self.running.values())})

    @property
    def num_queued(self) -> int:
        """Live requests of which nothing runs: in preparation, waiting, asking for blocks."""
        return len(self._by_id) - self.num_running

    def num_queued_of(self, tenant: str) -> int:
        """As `num_queued`, of a tenant."""
        running = {choice.request for choice in self.running.values()}
        return sum(live.checked.tenant == tenant and live not in running for live in self._by_id.values())

    @property
    def num_free_slots(self) -> int:
        """Slots without a row and not promised to a choice that is about to be born."""
        return len(self._free_slots) - len(self.forking) - sum(c.num_places - 1 for c in self.running.values())

    def find(self, request_id: str, tenant: str = "") -> LiveRequest | None:
        return self._by_id.get((tenant, request_id))

    def find_sequence(self, sequence_id: SequenceId) -> Choice | None:
        return self._by_sequence.get(sequence_id)

    def add(self, live: LiveRequest) -> None:
        """A request arrives, under an id that no live one has."""
        assert live.key not in self._by_id, "who calls looked"
        live.arrival = self._num_arrived
        self._num_arrived += 1
        self._by_id[live.key] = live

    def remove(self, live: LiveRequest) -> None:
        """A request leaves of which nothing began: its choices give up their places, and are as before."""
        assert not live.has_begun, "its choices hold more than places"
        for choice in live.choices:
            if choice.phase is Phase.WAITING:
                self.waiting.remove(choice)
            elif choice.phase is Phase.ALLOCATING:
                self._forget_sequence(choice)
                choice.phase = Phase.WAITING
        del self._by_id[live.key]

    def enqueue(self, choice: Choice) -> None:
        """Into the queue by priority and arrival: who ran before stands before all who came later."""
        choice.phase = Phase.WAITING
        bisect.insort(self.waiting, choice, key=lambda other: other.order)

    def begin_allocation(self, choice: Choice) -> None:
        self.waiting.remove(choice)
        choice.begin_sequence(self._new_sequence(choice))
        self.allocating[choice.sequence_id] = choice

    def begin_fork(self, choice: Choice, num_shared: int) -> None:
        """A choice asks for a share of another one's blocks, as far as so many tokens."""
        choice.begin_fork(self._new_sequence(choice), num_shared)
        self.forking[choice.sequence_id] = choice

    def refuse(self, choice: Choice) -> None:
        """There were no blocks for it: into the queue."""
        self._forget_sequence(choice)
        choice.leave_row(Phase.WAITING)
        self.enqueue(choice)

    def take_slot(self, choice: Choice) -> Slot:
        """The blocks are there: the lowest free slot is its."""
        self.allocating.pop(choice.sequence_id, None)
        self.forking.pop(choice.sequence_id, None)
        slot = heapq.heappop(self._free_slots)
        self.running[slot] = choice
        return slot

    def preempt(self, choice: Choice) -> None:
        """Out of its slot, back into the queue."""
        self._leave_slot(choice)
        choice.leave_row(Phase.WAITING)
        self.enqueue(choice)

    def park(self, choice: Choice) -> None:
        """A lane is given up, and is free for another beam."""
        if choice.phase is Phase.RUNNING:
            self._leave_slot(choice)
        else:
            self._forget_sequence(choice)
        choice.leave_row(Phase.UNBORN)

    def end(self, choice: Choice) -> None:
        """Nothing leads to it any more; nor to its request, if it was the last."""
        if choice.phase is Phase.WAITING:
            self.waiting.remove(choice)
        elif choice.phase in (Phase.ALLOCATING, Phase.FORKING):
            self._forget_sequence(choice)
        elif choice.phase is Phase.RUNNING:
            self._leave_slot(choice)
        choice.leave_row(Phase.ENDED)
        request = choice.request
        if request.is_ended and self._by_id.get(request.key) is request:
            del self._by_id[request.key]

    def _new_sequence(self, choice: Choice) -> SequenceId:
        self._num_sequences += 1
        sequence_id = SequenceId(self._num_sequences)
        self._by_sequence[sequence_id] = choice
        return sequence_id

    def _leave_slot(self, choice: Choice) -> None:
        del self.running[choice.row.slot]
        heapq.heappush(self._free_slots, choice.row.slot)
        self._forget_sequence(choice)

    def _forget_sequence(self, choice: Choice) -> None:
        self.allocating.pop(choice.sequence_id, None)
        self.forking.pop(choice.sequence_id, None)
        del self._by_sequence[choice.sequence_id]
