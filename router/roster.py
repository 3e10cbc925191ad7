"""All live requests by what the engine looks them up by: id, place in the queue, slot, sequence. No decisions here."""

import bisect
import heapq
from collections.abc import Iterator

from octavo.errors import Code, OctavoError
from router.ids import SequenceId, Slot
from router.live import LiveRequest, Phase, Times
from router.request import CheckedRequest


class Roster:
    """Live requests and free slots.

    Args:
        max_running: slots there are.
    """

    def __init__(self, max_running: int) -> None:
        self.running: dict[Slot, LiveRequest] = {}
        self.waiting: list[LiveRequest] = []  # in order of service
        self.allocating: dict[SequenceId, LiveRequest] = {}
        self._by_id: dict[str, LiveRequest] = {}
        self._by_sequence: dict[SequenceId, LiveRequest] = {}
        self._free_slots = [Slot(number) for number in range(max_running)]
        self._num_arrived = 0
        self._num_sequences = 0

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[LiveRequest]:
        return iter(list(self._by_id.values()))

    @property
    def num_queued(self) -> int:
        """Live requests that do not run: in preparation, waiting, asking for blocks."""
        return len(self._by_id) - len(self.running)

    @property
    def num_free_slots(self) -> int:
        """Slots without a row; those who ask for blocks will take some of them."""
        return len(self._free_slots)

    def find(self, request_id: str) -> LiveRequest | None:
        return self._by_id.get(request_id)

    def find_sequence(self, sequence_id: SequenceId) -> LiveRequest | None:
        return self._by_sequence.get(sequence_id)

    def reserve(self, checked: CheckedRequest, now: float) -> LiveRequest:
        """Take an id.

        Raises:
            OctavoError: ALREADY_EXISTS.
        """
        request_id = checked.request_id
        if request_id in self._by_id:
            raise OctavoError(
                Code.ALREADY_EXISTS,
                "REQUEST_ID_LIVE",
                "request_id: a live request has this id; choose another, cancel that one, or wait for its end",
                metadata={"request_id": request_id},
            )
        live = LiveRequest(checked, self._num_arrived, Times(now))
        self._num_arrived += 1
        self._by_id[request_id] = live
        return live

    def enqueue(self, live: LiveRequest) -> None:
        """Into the queue by priority and arrival: who ran before stands before all who came later."""
        bisect.insort(self.waiting, live, key=lambda other: other.order)

    def begin_allocation(self, live: LiveRequest) -> None:
        self._num_sequences += 1
        self.waiting.remove(live)
        live.begin_sequence(SequenceId(self._num_sequences))
        self.allocating[live.sequence_id] = live
        self._by_sequence[live.sequence_id] = live

    def refuse_allocation(self, live: LiveRequest) -> None:
        """Back into the queue."""
        self._forget_sequence(live)
        live.phase = Phase.WAITING
        self.enqueue(live)

    def take_slot(self, live: LiveRequest) -> Slot:
        """The blocks are there: the lowest free slot is its."""
        del self.allocating[live.sequence_id]
        slot = heapq.heappop(self._free_slots)
        self.running[slot] = live
        return slot

    def preempt(self, live: LiveRequest) -> None:
        """Out of its slot, back into the queue."""
        self._leave_slot(live)
        live.leave_row(Phase.WAITING)
        self.enqueue(live)

    def end(self, live: LiveRequest) -> None:
        """Nothing leads to it any more."""
        if live.phase is Phase.WAITING:
            self.waiting.remove(live)
        elif live.phase is Phase.ALLOCATING:
            self._forget_sequence(live)
        elif live.phase is Phase.RUNNING:
            self._leave_slot(live)
        live.leave_row(Phase.ENDED)
        if self._by_id.get(live.request_id) is live:
            del self._by_id[live.request_id]

    def _leave_slot(self, live: LiveRequest) -> None:
        del self.running[live.row.slot]
        heapq.heappush(self._free_slots, live.row.slot)
        self._forget_sequence(live)

    def _forget_sequence(self, live: LiveRequest) -> None:
        self.allocating.pop(live.sequence_id, None)
        del self._by_sequence[live.sequence_id]
