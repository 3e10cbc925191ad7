"""A request from its arrival to its end, and its choices: the engine's own record of them, changed by nobody else.

A request is what a client sent and hears of; a choice is one of its answers: it has tokens, blocks and a row.

    first choice    prompt .... [ last chunk of the prompt samples one token for each choice ]
                                        | fork: the other choices share the blocks of the prompt
    every choice                        decodes, waits, is preempted and ends for itself

With beam search a choice is a lane, in which one beam after another is computed; all of them wait, are preempted and
end together, and the answers are the search's.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from itertools import chain

from octavo.tracing import NO_CONTEXT, RequestTag, TraceContext
from router.beams import BeamGroup
from router.ids import BlockId, SequenceId, SessionKey, StepId
from router.request import CheckedRequest, FinishReason, RequestSpec, Timing, Usage
from router.scheduler import Row
from router.stream import EventStream
from router.text.answer import AnswerText


class Phase(Enum):
    """Where a choice is.

    PREPARING: its prompt is tokenized. UNBORN: its first token will come out of the first choice's row, or no beam is
    in this lane. WAITING: in the queue. ALLOCATING: asked the cache service for blocks. FORKING: asked it for a share
    of another one's. RUNNING: has blocks and a row. ENDED: nothing of it is left but what its client still reads.
    """

    PREPARING = auto()
    UNBORN = auto()
    WAITING = auto()
    ALLOCATING = auto()
    FORKING = auto()
    RUNNING = auto()
    ENDED = auto()


@dataclass(slots=True)
class Times:
    """Moments, in the engine's clock (seconds); None: not yet."""

    arrived: float
    first_scheduled: float | None = None
    first_token: float | None = None
    last_token: float | None = None


@dataclass(slots=True, eq=False)
class Choice:
    """One answer to a request.

    Attributes:
        tokens: prompt and generated, as far as results are here.
        sequence_id: of this incarnation in the lease; a preempted choice gets a new one.
        incarnation: tells this use of a slot from those before.
        num_steps_in_flight: sent steps that contain it and whose results are still to come.
        num_cache_tokens: token ids that the cache service knows of this sequence.
        block_ids: its table; while it forks, what it will share.
        num_asked_blocks: blocks that it has asked for besides and has no answer about.
        copy: (source, target) of a block that must be copied before its first step; None once a result proved it.
        num_known: tokens of a beam that the executor knows.
        free_after: the highest sent step of each session that contains this sequence.
        lost: why it gave up its blocks, and how many tokens were computed in them.
    """

    request: "LiveRequest"
    index: int
    phase: Phase = Phase.PREPARING
    _answer: AnswerText | None = None
    tokens: list[int] = field(default_factory=list)
    last_token_at: float | None = None
    finish_reason: FinishReason | None = None
    cumulative_logprob: float = 0.0

    _row: Row | None = None
    sequence_id: SequenceId = SequenceId(0)
    incarnation: int = 0
    block_ids: list[BlockId] = field(default_factory=list)
    num_asked_blocks: int = 0
    num_blocks_sent: int = 0
    is_at_executor: bool = False
    num_known: int = 0
    num_steps_in_flight: int = 0
    num_cache_tokens: int = 0
    num_committed_blocks: int = 0
    copy: tuple[BlockId, BlockId] | None = None
    is_extending: bool = False
    was_extend_refused: bool = False
    free_after: dict[SessionKey, StepId] = field(default_factory=dict)
    lost: tuple[str, int] = ("", 0)

    @property
    def checked(self) -> CheckedRequest:
        return self.request.checked

    @property
    def spec(self) -> RequestSpec:
        return self.request.spec

    @property
    def stream(self) -> EventStream:
        return self.request.stream

    @property
    def answer(self) -> AnswerText:
        assert self._answer is not None, "only a submitted request has its text"
        return self._answer

    @property
    def row(self) -> Row:
        assert self._row is not None, "only a running choice has a row"
        return self._row

    @property
    def order(self) -> tuple[int, int, int]:
        """Who comes first: the smaller."""
        return (-self.checked.priority, self.request.arrival, self.index)

    @property
    def num_generated(self) -> int:
        return max(0, len(self.tokens) - self.spec.num_prompt_tokens)

    @property
    def num_places(self) -> int:
        """Slots that it needs: its own, and of the first that has or wants one, those of choices to be born."""
        choices = self.request.choices
        if len(choices) == 1 or self.phase is Phase.UNBORN:
            return 1
        first = next(choice for choice in choices if choice.phase not in _WITHOUT_OTHERS)
        return 1 + (self.request.num_unborn if self is first else 0)

    @property
    def num_samples(self) -> int:
        """Tokens that its row draws when it first samples: one for each choice that is to be born of it."""
        return 1 if self.request.beams is not None else self.num_places

    def submit(self, answer: AnswerText, tokens: list[int], phase: Phase) -> None:
        """The prompt is tokenized."""
        self._answer, self.tokens, self.phase = answer, tokens, phase

    def begin_sequence(self, sequence_id: SequenceId) -> None:
        """Ask for blocks under a fresh id."""
        self.phase = Phase.ALLOCATING
        self.sequence_id = sequence_id
        self.num_asked_blocks = 0
        self.num_cache_tokens = len(self.tokens)

    def begin_fork(self, sequence_id: SequenceId, num_shared: int) -> None:
        """Ask for a share of another choice's blocks under a fresh id: it will know of their tokens."""
        self.phase = Phase.FORKING
        self.sequence_id = sequence_id
        self.num_cache_tokens = num_shared

    def begin_row(self, row: Row, block_ids: list[BlockId], copy: tuple[BlockId, BlockId] | None = None) -> None:
        """The blocks are there: it runs."""
        self.phase = Phase.RUNNING
        self._row, self.block_ids, self.copy = row, block_ids, copy
        self.num_asked_blocks = self.num_committed_blocks = 0
        self.is_extending = self.was_extend_refused = False
        self.reset_at_executor()

    def reset_at_executor(self) -> None:
        """No session knows the row: it must be sent whole."""
        self.incarnation += 1
        self.is_at_executor = False
        self.num_blocks_sent = 0

    def leave_row(self, phase: Phase) -> None:
        """The row and its blocks are given up."""
        self.phase = phase
        self._row = self.copy = None
        self.block_ids = []
        self.num_asked_blocks = 0
        self.free_after = {}


def num_held_blocks(choices: Iterable[Choice]) -> int:
    """Blocks in their tables, a shared one once."""
    return len(set(chain.from_iterable(choice.block_ids for choice in choices)))


# Whose phase is one of these has no slot and asks for none but its own.
_WITHOUT_OTHERS = (Phase.UNBORN, Phase.FORKING, Phase.ENDED)


@dataclass(slots=True, eq=False)
class LiveRequest:
    """One request.

    Attributes:
        arrival: counts requests of an engine; with the priority it is the order in which they are served.
        choices: its answers, by index.
        num_cached_tokens: of the prompt, at the first admission; None: not admitted yet.
        trace: of its call.
        beams: its search; None: it draws its answers.
    """

    checked: CheckedRequest
    times: Times
    arrival: int = 0
    stream: EventStream = field(init=False)
    choices: list[Choice] = field(init=False)
    num_cached_tokens: int | None = None
    num_preemptions: int = 0
    trace: TraceContext = NO_CONTEXT
    beams: BeamGroup | None = None
    _spec: RequestSpec | None = None

    def __post_init__(self) -> None:
        sampling = self.checked.sampling
        self.stream = EventStream(sampling.num_written, sampling.n, is_held=sampling.beam is not None)
        self.choices = [Choice(self, index) for index in range(sampling.num_choices)]

    @property
    def request_id(self) -> str:
        return self.checked.request_id

    @property
    def tag(self) -> RequestTag:
        """What other processes are told of it, for their logs and traces."""
        return RequestTag(self.request_id, self.trace)

    @property
    def key(self) -> tuple[str, str]:
        """What no two live requests have in common: ids are those of a tenant."""
        return self.checked.tenant, self.checked.request_id

    @property
    def spec(self) -> RequestSpec:
        assert self._spec is not None, "only a submitted request has its specification"
        return self._spec

    @property
    def is_submitted(self) -> bool:
        return self._spec is not None

    @property
    def has_begun(self) -> bool:
        """Whether it ever had blocks: then it is bound to its engine."""
        return self.num_cached_tokens is not None

    @property
    def is_ended(self) -> bool:
        return all(choice.phase is Phase.ENDED for choice in self.choices)

    @property
    def num_unborn(self) -> int:
        return sum(choice.phase is Phase.UNBORN for choice in self.choices)

    def submit(self, spec: RequestSpec, answers: list[AnswerText]) -> None:
        """The prompt is tokenized: the first choice waits for its place, the others for the first one's token.

        Where one is resumed its history is its own, and each choice waits for its own place.
        """
        self._spec = spec
        for choice, answer in zip(self.choices, answers, strict=True):
            phase = Phase.UNBORN if choice.index and not self.checked.resume else Phase.WAITING
            choice.submit(answer, list(spec.prompt_ids), phase)

    def refit(self, spec: RequestSpec) -> None:
        """It goes to another engine before it began: its length is another there."""
        self._spec = replace(spec, banned=self.spec.banned, grammar=self.spec.grammar, echo_text=self.spec.echo_text)
        if self.beams is not None:
            self.beams.search.refit(spec.max_tokens)

    def ranking(self) -> list[int]:
        """Indices of the choices, the likeliest first; of equals the lower one. A search ranks its answers itself."""
        return sorted(range(len(self.choices)), key=lambda index: (-self.choices[index].cumulative_logprob, index))

    def usage(self) -> Usage:
        if self._spec is None:
            return Usage(0, 0, 0, 0)
        generated = sum(choice.num_generated for choice in self.choices)
        if self.beams is not None:
            generated = self.beams.search.num_tokens
        resumed = sum(len(token_ids) for _, token_ids in self.checked.resume)
        return Usage(self._spec.num_prompt_tokens, self.num_cached_tokens or 0, generated, resumed)

    def timing(self, now: float) -> Timing:
        """Spans that were not reached end now, or are 0."""
        times = self.times
        scheduled = times.first_scheduled if times.first_scheduled is not None else now
        first = times.first_token
        return Timing(
            queue_s=scheduled - times.arrived,
            prefill_s=(first if first is not None else now) - scheduled,
            first_token_s=first - times.arrived if first is not None else 0.0,
            decode_s=times.last_token - first if first is not None and times.last_token is not None else 0.0,
        )
