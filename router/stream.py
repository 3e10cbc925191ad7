"""The events of one request on their way to its client: one writer, one reader, coalesced, bounded.

What a slow reader has not taken is one waiting delta per choice that grows, never a queue: a request holds at most its
own answer.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from octavo.errors import OctavoError
from router.logprob import TokenLogprob
from router.request import FinishReason, Timing, Usage


@dataclass(frozen=True, slots=True)
class Started:
    request_id: str
    prompt_tokens: int
    cached_tokens: int
    seed: int


@dataclass(frozen=True, slots=True)
class Delta:
    """`token_offset`: how many tokens of the choice earlier deltas carried."""

    index: int
    token_offset: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """`token_offset`: index in the prompt of the first token here."""

    token_offset: int
    logprobs: tuple[TokenLogprob, ...]


@dataclass(frozen=True, slots=True)
class BeamScore:
    """Of an answer that was searched for."""

    score: float
    cumulative_logprob: float


@dataclass(frozen=True, slots=True)
class Finished:
    index: int
    reason: FinishReason
    matched_stop: str
    beam: BeamScore | None = None


@dataclass(frozen=True, slots=True)
class Completed:
    usage: Usage
    timing: Timing


Event = Started | PromptLogprobs | Delta | Finished | Completed


@dataclass(slots=True)
class _Channel:
    """What waits of one choice."""

    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    num_carried: int = 0
    rest: str = ""
    end: tuple[FinishReason, str, BeamScore | None] | None = None

    def take(self, index: int) -> list[Event]:
        events: list[Event] = []
        if self.text or self.token_ids:
            text, token_ids, logprobs = "".join(self.text), tuple(self.token_ids), tuple(self.logprobs)
            events.append(Delta(index, self.num_carried, text, token_ids, logprobs))
            self.num_carried += len(token_ids)
            self.text, self.token_ids, self.logprobs = [], [], []
        if self.rest:
            events.append(Delta(index, self.num_carried, self.rest, (), ()))
            self.rest = ""
        if self.end is not None:
            events.append(Finished(index, *self.end))
            self.end = None
        return events


class EventStream:
    """Write with `start`, `add`, `finish` and `complete`, or `fail`; read with `async for`. All on one event loop.

    Args:
        num_choices: that are written.
        num_shown: that are read. Where it is less, nothing of them is read before `complete` says which are the best.
        is_held: nothing of them is read before `complete` in any case.
    """

    def __init__(self, num_choices: int, num_shown: int, *, is_held: bool = False) -> None:
        self._channels = [_Channel() for _ in range(num_choices)]
        self._is_ranked = is_held or num_shown < num_choices
        self._num_shown = num_shown
        self._started: Started | None = None
        self._is_started = False
        self._prompt_logprobs: list[TokenLogprob] = []
        self._prompt_offset = 1  # nothing comes before the first token of a prompt
        self._completed: Completed | None = None
        self._error: OctavoError | None = None
        self._filled = asyncio.Event()

    @property
    def prompt_offset(self) -> int:
        """Index of the first prompt token whose log-probability is not here yet."""
        return self._prompt_offset + len(self._prompt_logprobs)

    def resume(self, index: int, num_tokens: int) -> None:
        """The client has as many tokens of this choice, those of an echoed prompt among them."""
        self._channels[index].num_carried = num_tokens

    def start(self, event: Started) -> None:
        """Nothing is read before."""
        self._started = event
        self._is_started = True
        self._filled.set()

    def add_prompt_logprobs(self, logprobs: Sequence[TokenLogprob]) -> None:
        """The next tokens of the prompt."""
        if logprobs:
            self._prompt_logprobs += logprobs
            self._filled.set()

    def add(self, index: int, text: str, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob] = ()) -> None:
        channel = self._channels[index]
        if text:
            channel.text.append(text)
        channel.token_ids += token_ids
        channel.logprobs += logprobs
        self._filled.set()

    def add_rest(self, index: int, text: str) -> None:
        """Text that the end of a choice releases and none of its tokens: a client that resumes knows it by that."""
        self._channels[index].rest = text

    def finish(self, index: int, reason: FinishReason, matched_stop: str, beam: BeamScore | None = None) -> None:
        """A choice is whole."""
        self._channels[index].end = (reason, matched_stop, beam)
        self._filled.set()

    def complete(self, completed: Completed, ranking: Sequence[int]) -> None:
        """All choices are whole; `ranking`: their indices, the best first."""
        self._completed = completed
        if self._is_ranked:
            self._channels = [self._channels[index] for index in ranking[: self._num_shown]]
            self._is_ranked = False
        self._filled.set()

    def fail(self, error: OctavoError) -> None:
        """What was not read yet is dropped: a failed call has no answer."""
        self._error = error
        self._filled.set()

    async def __aiter__(self) -> AsyncIterator[Event]:
        """Raises the error that the stream ended with."""
        while True:
            await self._filled.wait()
            self._filled.clear()
            completed = self._completed  # what is written before it is taken below
            if self._error is not None:
                raise self._error
            for event in self._take():
                yield event
            if self._error is not None:
                raise self._error
            if completed is not None and self._is_started:
                yield completed
                return

    def _take(self) -> list[Event]:
        events: list[Event] = []
        if not self._is_started:
            return events
        if self._started is not None:
            events.append(self._started)
            self._started = None
        if self._prompt_logprobs:
            events.append(PromptLogprobs(self._prompt_offset, tuple(self._prompt_logprobs)))
            self._prompt_offset += len(self._prompt_logprobs)
            self._prompt_logprobs = []
        if not self._is_ranked:
            events += [event for index, channel in enumerate(self._channels) for event in channel.take(index)]
        return events
