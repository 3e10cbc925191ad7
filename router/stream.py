"""The events of one request on their way to its client: one writer, one reader, coalesced, bounded.

What a slow reader has not taken is one waiting delta that grows, never a queue: a request holds at most its own answer.
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
    """`token_offset`: how many tokens earlier deltas carried."""

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
class Finished:
    reason: FinishReason
    matched_stop: str


@dataclass(frozen=True, slots=True)
class Completed:
    usage: Usage
    timing: Timing


Event = Started | PromptLogprobs | Delta | Finished | Completed


@dataclass(slots=True, eq=False)
class EventStream:
    """Write with `start`, `add`, `finish` or `fail`; read with `async for`. All on one event loop."""

    _started: Started | None = None
    _text: list[str] = field(default_factory=list)
    _token_ids: list[int] = field(default_factory=list)
    _logprobs: list[TokenLogprob] = field(default_factory=list)
    _prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    _num_carried: int = 0
    _prompt_offset: int = 1  # nothing comes before the first token of a prompt
    _end: tuple[Finished, Completed] | OctavoError | None = None
    _filled: asyncio.Event = field(default_factory=asyncio.Event)

    def start(self, event: Started) -> None:
        self._started = event
        self._filled.set()

    @property
    def prompt_offset(self) -> int:
        """Index of the first prompt token whose log-probability is not here yet."""
        return self._prompt_offset + len(self._prompt_logprobs)

    def add_prompt_logprobs(self, logprobs: Sequence[TokenLogprob]) -> None:
        """The next tokens of the prompt."""
        if logprobs:
            self._prompt_logprobs += logprobs
            self._filled.set()

    def add(self, text: str, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob] = ()) -> None:
        if text:
            self._text.append(text)
        self._token_ids += token_ids
        self._logprobs += logprobs
        self._filled.set()

    def finish(self, finished: Finished, completed: Completed) -> None:
        self._end = (finished, completed)
        self._filled.set()

    def fail(self, error: OctavoError) -> None:
        """What was not read yet is dropped: a failed call has no answer."""
        self._end = error
        self._filled.set()

    async def __aiter__(self) -> AsyncIterator[Event]:
        """Raises the error that the stream ended with."""
        while True:
            await self._filled.wait()
            self._filled.clear()
            if isinstance(self._end, OctavoError):
                raise self._end
            for event in self._take():
                yield event
            if self._end is not None and not (self._text or self._token_ids or self._prompt_logprobs):
                break
        if isinstance(self._end, OctavoError):
            raise self._end
        for event in self._end:
            yield event

    def _take(self) -> list[Event]:
        events: list[Event] = []
        if self._started is not None:
            events.append(self._started)
            self._started = None
        if self._prompt_logprobs:
            events.append(PromptLogprobs(self._prompt_offset, tuple(self._prompt_logprobs)))
            self._prompt_offset += len(self._prompt_logprobs)
            self._prompt_logprobs = []
        if self._text or self._token_ids:
            text, token_ids, logprobs = "".join(self._text), tuple(self._token_ids), tuple(self._logprobs)
            events.append(Delta(self._num_carried, text, token_ids, logprobs))
            self._num_carried += len(self._token_ids)
            self._text, self._token_ids, self._logprobs = [], [], []
        return events
