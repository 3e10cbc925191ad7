"""Searches in a turn of the engine: candidates come in, beams go on, part, die, and are forked.

    result      a lane's candidates; with the last of a search's lanes it advances by a token
    free        lanes whose beams do not go on give up their blocks, in the message that forks others
    fork        lanes whose beams go on twice; all lanes wait until each child has its share, then all go on
    go on       each lane gets its token, and the next step computes it

Without a fork nothing is asked of the cache service, and the next step goes out in the same turn. Not here: the search
itself (beam), which lane has which beam (beams), blocks (capacity).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from router.beam import Candidate, Search, SearchRules
from router.beams import BeamGroup, Moves
from router.capacity import Capacity
from router.live import Choice, LiveRequest, Phase
from router.model import Model
from router.observer import Observer
from router.request import RequestSpec
from router.sampling import ending_ids
from router.steps import SessionSteps


class SearchEnders(Protocol):
    """Who ends searches."""

    def finish_search(self, request: LiveRequest) -> None:
        """Its answers are complete."""


@dataclass
class Searching:
    """All searches of an engine.

    Attributes:
        steps: of the session of now.
        clock: seconds, monotonic.
    """

    capacity: Capacity
    observer: Observer
    enders: SearchEnders
    steps: Callable[[], SessionSteps | None]
    clock: Callable[[], float]

    def take_candidates(self, lane: Choice, beams: BeamGroup, candidates: Sequence[Candidate], now: float) -> None:
        """A lane that runs has computed all of its beam's tokens."""
        if not beams.offer(lane.index, candidates):
            return
        request, num_before = lane.request, beams.search.num_tokens
        moves = beams.advance()
        self._count(request, beams.search.num_tokens - num_before, now)
        if beams.search.is_done:
            self.enders.finish_search(request)
        else:
            self._move(request, beams, moves)

    def take_share(self, child: Choice, beams: BeamGroup) -> None:
        """A lane has its share of another one's blocks."""
        beams.num_forking -= 1
        if not beams.num_forking:
            self._go_on(child.request, beams)

    def _move(self, request: LiveRequest, beams: BeamGroup, moves: Moves) -> None:
        lanes = request.choices
        releases = [self.capacity.give_up(lanes[lane], self.steps()) for lane in moves.freed]
        for parent, children in moves.forks:
            born = [lanes[child] for child in children]
            for child in born:
                child.tokens = list(lanes[parent].tokens)
            if not self.capacity.fork(lanes[parent], born, releases):
                self.capacity.release_lanes(releases)
                self.capacity.break_off(request, self.steps(), self.clock(), "quota")
                return
            releases = []
        self.capacity.release_lanes(releases)
        if not beams.num_forking:
            self._go_on(request, beams)

    def _go_on(self, request: LiveRequest, beams: BeamGroup) -> None:
        """All beams have lanes with blocks: each gets what comes behind that."""
        for index in beams.lane_of or ():
            lane = request.choices[index]
            assert lane.phase is Phase.RUNNING, "it computed, or has its share"
            tail = beams.tail(index, lane.num_generated)
            if len(tail) > 1:
                self._send_anew(lane)
            lane.tokens += tail
            lane.row.num_tokens = len(lane.tokens)

    def _send_anew(self, lane: Choice) -> None:
        """A step appends one token to a row: one that gets more is sent whole."""
        steps = self.steps()
        if lane.is_at_executor and steps is not None:
            steps.retire(lane.row.slot)
            lane.reset_at_executor()

    def _count(self, request: LiveRequest, num_tokens: int, now: float) -> None:
        times = request.times
        if times.first_token is None and num_tokens:
            times.first_token = now
            self.observer.on_first_token(now - times.arrived)
        gap_s = None if times.last_token is None else now - times.last_token
        for _ in range(num_tokens):
            self.observer.on_token(gap_s)
        times.last_token = now


def search_of(spec: RequestSpec, model: Model) -> BeamGroup | None:
    """The search of a request that asks for one."""
    beam = spec.checked.sampling.beam
    if beam is None:
        return None
    ends = ending_ids(spec.checked, model.eos_token_ids)
    rules = SearchRules(beam.width, beam.length_penalty, beam.early_stopping, ends, spec.max_tokens)
    return BeamGroup(Search(rules))
