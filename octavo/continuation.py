"""What a client has of one answer, over all the calls that it takes: each event comes out once, whatever broke.

Pure, the same for both clients. Not here: when to call again (`octavo.retry`), and the fields of the request
(`octavo.messages`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from octavo.errors import Code, OctavoError
from octavo.results import Completed, Delta, Event, Finished, FinishReason, PromptLogprobs, Started


@dataclass(frozen=True, slots=True)
class AnswerShape:
    """What of a request says how its answer comes.

    Attributes:
        echoes: each choice begins with the prompt.
        is_ranked: the choices are chosen at the end, so that nothing of one can be resumed.
        shows_token_ids: to the caller; the server is always asked for them, since they are what is resumed.
    """

    echoes: bool
    is_ranked: bool
    shows_token_ids: bool


@dataclass(slots=True)
class _Choice:
    """`token_ids` are generated ones; `num_tokens` and `num_chars` count an echoed prompt too."""

    token_ids: list[int] = field(default_factory=list)
    num_tokens: int = 0
    num_chars: int = 0
    rest: Delta | None = None  # text without a token: it comes with the end alone, and so it is shown
    is_finished: bool = False


class Continuation:
    """Takes the events of one call after another."""

    def __init__(self, shape: AnswerShape) -> None:
        self.is_complete = False
        self._shape = shape
        self._started: Started | None = None
        self._next_prompt_offset = 1  # nothing comes before the first token of a prompt
        self._choices: dict[int, _Choice] = {}
        self._ranked: list[Event] = []  # shown together, with the end
        self._was_cancelled = False

    def resume(self) -> Mapping[int, Sequence[int]]:
        """Generated tokens by choice, for the next call; empty: it begins anew, and what comes twice is left out."""
        if self._shape.is_ranked or not any(choice.token_ids for choice in self._choices.values()):
            return {}
        return {index: choice.token_ids for index, choice in sorted(self._choices.items()) if choice.num_tokens}

    def begin_call(self) -> None:
        """The call before is lost, with what it had not said whole.

        Raises:
            OctavoError: CANCELLED where somebody ended the request: what is missing of it is not to be made.
        """
        if self._was_cancelled:
            raise OctavoError(Code.CANCELLED, "CANCELLED", "the request was cancelled, and then its call was lost")
        self._ranked = []
        for choice in self._choices.values():
            choice.rest = None

    def take(self, event: Event) -> list[Event]:
        """What the caller has not seen of an event; often the event itself.

        Raises:
            OctavoError: DATA_LOSS where it does not go on with what there is: another model answers, for example.
        """
        if isinstance(event, Started):
            return self._take_started(event)
        if isinstance(event, PromptLogprobs):
            return self._take_prompt(event)
        if isinstance(event, Completed):
            return self._take_completed(event)
        if self._shape.is_ranked:
            self._ranked += self._shown(event) if isinstance(event, Delta) else [event]
            return []
        return self._take_delta(event) if isinstance(event, Delta) else self._take_finished(event)

    def _take_started(self, event: Started) -> list[Event]:
        before, self._started = self._started, self._started or event
        if before is None:
            return [event]
        if _identity(before) != _identity(event):
            raise _lost(f"the answer began as {_identity(before)} and would go on as {_identity(event)}")
        return []

    def _take_prompt(self, event: PromptLogprobs) -> list[Event]:
        num_known = max(0, self._next_prompt_offset - event.token_offset)
        fresh = event.logprobs[num_known:]
        self._next_prompt_offset += len(fresh)
        return [PromptLogprobs(event.token_offset + num_known, fresh)] if fresh else []

    def _take_delta(self, event: Delta) -> list[Event]:
        choice = self._choices.setdefault(event.index, _Choice())
        if choice.is_finished:
            return []
        if not event.token_ids:
            choice.rest = event
            return []
        if event.token_offset == 0 and choice.num_tokens and not choice.token_ids:  # the echo, which came before
            event = _without(event, choice.num_tokens, choice.num_chars)
        if event.token_offset != choice.num_tokens:
            raise _lost(f"choice {event.index} has {choice.num_tokens} tokens, and goes on with {event.token_offset}")
        num_echoed = self._started.prompt_tokens if self._shape.echoes and self._started else 0
        choice.token_ids += event.token_ids[max(0, num_echoed - choice.num_tokens) :]
        choice.num_tokens += len(event.token_ids)
        choice.num_chars += len(event.text)
        return self._shown(event)

    def _take_finished(self, event: Finished) -> list[Event]:
        choice = self._choices.setdefault(event.index, _Choice())
        if choice.is_finished:
            return []
        choice.is_finished = True
        self._was_cancelled = self._was_cancelled or event.reason is FinishReason.CANCELLED
        return [*(self._shown(choice.rest) if choice.rest else ()), event]

    def _take_completed(self, event: Completed) -> list[Event]:
        self.is_complete = True
        if self._started is not None:  # what the first call said, whatever the last one found in the cache
            event = replace(event, usage=replace(event.usage, cached_tokens=self._started.cached_tokens))
        return [*self._ranked, event]

    def _shown(self, event: Delta) -> list[Event]:
        if self._shape.shows_token_ids:
            return [event] if event.token_ids or event.text else []
        return [replace(event, token_ids=())] if event.text or event.logprobs else []


def _without(event: Delta, num_tokens: int, num_chars: int) -> Delta:
    """What comes behind tokens that have no log-probabilities."""
    return replace(
        event,
        token_offset=min(num_tokens, event.token_offset + len(event.token_ids)),
        token_ids=event.token_ids[num_tokens:],
        text=event.text[num_chars:],
    )


def _identity(started: Started) -> str:
    return f"{started.prompt_tokens} prompt tokens of {started.model} with seed {started.effective_seed}"


def _lost(what: str) -> OctavoError:
    return OctavoError(Code.DATA_LOSS, "ANSWER_CHANGED", f"the answer cannot be resumed: {what}; send the request anew")
