"""How answers and requests end: by themselves, by a limit, by their client, by an error. Each end gives all back.

Not here: why one ends (results, engine, searching), and what its last token shows (delivery).
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from octavo.errors import OctavoError
from router import refusals
from router.capacity import Capacity
from router.delivery import Ending, show_hypothesis
from router.live import Choice, LiveRequest, Phase
from router.model import Model
from router.observer import Observer
from router.reports import report_end
from router.request import FinishReason
from router.roster import Roster
from router.steps import SessionSteps
from router.stream import Completed, Started


@dataclass
class Ends:
    """Part of one engine.

    Attributes:
        steps: of the session of now.
        clock: seconds, monotonic.
        on_room: called when something was given back.
        time_limits: when requests end with what there is.
    """

    model: Model
    roster: Roster
    capacity: Capacity
    observer: Observer
    steps: Callable[[], SessionSteps | None]
    clock: Callable[[], float]
    on_room: Callable[[], None]
    time_limits: dict[LiveRequest, float] = field(default_factory=dict)

    def finish(self, choice: Choice, ending: Ending) -> None:
        """An answer is complete, or as complete as it will be; with the last of its request, the request is."""
        request = choice.request
        choice.finish_reason = ending.reason
        if choice.index < request.checked.sampling.num_written:
            request.stream.finish(choice.index, ending.reason, ending.matched_stop)
        self._end_choice(choice)
        if request.is_ended:
            self._complete(request, ending.reason)

    def finish_search(self, request: LiveRequest, cut: FinishReason | None = None) -> None:
        """The best answers of a search that ended by itself, or was `cut`: then those that are missing are empty."""
        assert request.beams is not None, "only a search is finished as one"
        n, reasons = request.checked.sampling.n, []
        best = request.beams.search.best(n)
        if not best:
            self.fail(request, refusals.no_token_left())
            return
        for index, found in enumerate(best):
            reasons.append(show_hypothesis(request, index, found, self.model.eos_token_ids, cut))
            request.choices[index].finish_reason = reasons[index]
        if cut is not None:
            for index in range(len(reasons), n):
                request.stream.finish(index, cut, "")
        self._end_all(request)
        self._complete(request, reasons[0])

    def finish_all(self, request: LiveRequest, reason: FinishReason) -> None:
        """End what is not ended, with what its client is owed: the beginning, if it never ran, and held text."""
        if request.num_cached_tokens is None:
            request.stream.start(started(request))
        if request.beams is not None:
            self.finish_search(request, reason)
            return
        for choice in request.choices:
            if choice.phase is not Phase.ENDED:
                if choice.tokens:
                    request.stream.add_rest(choice.index, choice.answer.finish())
                self.finish(choice, Ending(reason))

    def fail(self, request: LiveRequest, error: OctavoError) -> None:
        """End a request with an error. Does nothing for one that ended."""
        if not request.is_ended:
            request.stream.fail(error)
            self._end_all(request)
            self._report(request, "error")

    def abort(self, request: LiveRequest) -> None:
        """Its client is gone. Does nothing for one that ended."""
        if not request.is_ended:
            self._end_all(request)
            self._report(request, "abort")

    def expire(self, now: float) -> None:
        """End those whose time is over."""
        for request in [request for request, moment in self.time_limits.items() if moment <= now]:
            self.finish_all(request, FinishReason.TIME_LIMIT)

    def _end_all(self, request: LiveRequest) -> None:
        for choice in request.choices:
            if choice.phase is not Phase.ENDED:
                self._end_choice(choice)

    def _end_choice(self, choice: Choice) -> None:
        """Give back all that it holds."""
        self.capacity.release(choice, self.steps())
        self.roster.end(choice)
        self.on_room()

    def _complete(self, request: LiveRequest, reason: FinishReason) -> None:
        request.stream.complete(Completed(request.usage(), request.timing(self.clock())), request.ranking())
        self._report(request, reason.name.lower())

    def _report(self, request: LiveRequest, outcome: str) -> None:
        self.time_limits.pop(request, None)
        report_end(self.observer, request, outcome, self.clock())


def started(live: LiveRequest) -> Started:
    """What its client hears first."""
    return Started(live.request_id, live.usage().prompt_tokens, live.num_cached_tokens or 0, live.checked.sampling.seed)
