"""One answer as a client gets it, over all the calls that it takes. Pure, the same for both clients.

Here meet what is asked (`octavo.messages`), what of it has come (`octavo.continuation`) and when to call again
(`octavo.retry`). Not here: the calls themselves, and the waiting.
"""

from collections import deque
from collections.abc import Iterator

from octavo import messages
from octavo.continuation import Continuation
from octavo.errors import OctavoError
from octavo.results import Event, Generation, GenerationBuilder
from octavo.retry import Attempts
from octavo.v1 import inference_pb2 as pb


class Answer:
    """The state of one request. Times are in seconds of one monotonic clock.

    Attributes:
        num_calls: made so far.
    """

    def __init__(self, request: pb.GenerateStreamRequest, attempts: Attempts) -> None:
        self.num_calls = 0
        self._request, self._attempts = request, attempts
        self._continuation = Continuation(messages.shape_of(request))
        self._builder = GenerationBuilder()
        self._fresh: deque[Event] = deque()  # that nobody has read
        self._began: float | None = None

    @property
    def is_complete(self) -> bool:
        """Whether the last event is there, however its call ends."""
        return self._continuation.is_complete

    def next_call(self, now: float) -> tuple[pb.GenerateStreamRequest, float | None]:
        """What to send, and the timeout to send it with. Raises OctavoError where the deadline has passed."""
        self._began = now if self._began is None else self._began
        timeout_s = self._attempts.timeout_s(now)
        self.num_calls += 1
        return messages.request_to_send(self._request, self._continuation.resume(), now - self._began), timeout_s

    def take(self, response: pb.GenerateStreamResponse) -> None:
        """A message of the call. Raises OctavoError where it does not go on with what there is: end the call."""
        event = messages.event_of(response)
        shown = self._continuation.take(event) if event is not None else []
        if shown:
            self._attempts.progress()
        for each in shown:
            self._builder.add(each)
        self._fresh += shown

    def pause_after(self, failure: OctavoError, now: float, chance: float) -> float:
        """Seconds to wait before the next call; `chance` is from [0, 1).

        Raises:
            OctavoError: there is to be none.
        """
        pause_s = self._attempts.pause_after(failure, now, chance)
        self._continuation.begin_call()
        return pause_s

    def fresh(self) -> Iterator[Event]:
        """The events that nobody has read."""
        while self._fresh:
            yield self._fresh.popleft()

    def build(self) -> Generation:
        """The whole answer; of use when it is complete."""
        return self._builder.build()
