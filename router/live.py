"""A request from its arrival to its end: the engine's own record of it, changed by nobody else."""

from dataclasses import dataclass, field
from enum import Enum, auto

from router.ids import BlockId, SequenceId, SessionKey, StepId
from router.request import CheckedRequest, RequestSpec, Timing, Usage
from router.scheduler import Row
from router.stream import EventStream
from router.text.answer import AnswerText


class Phase(Enum):
    """Where a live request is.

    PREPARING: its prompt is tokenized. WAITING: in the queue. ALLOCATING: asked the cache service for blocks.
    RUNNING: has blocks and a row. ENDED: nothing of it is left but what its client still reads.
    """

    PREPARING = auto()
    WAITING = auto()
    ALLOCATING = auto()
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
class LiveRequest:
    """One request.

    Attributes:
        arrival: counts requests; with the priority it is the order in which they are served.
        tokens: prompt and generated, as far as results are here.
        sequence_id: of this incarnation in the lease; a preempted request gets a new one.
        incarnation: tells this use of a slot from those before.
        num_steps_in_flight: sent steps that contain it and whose results are still to come.
        num_cache_tokens: token ids that the cache service knows of this sequence.
        free_after: the highest sent step of each session that contains this sequence.
    """

    checked: CheckedRequest
    arrival: int
    times: Times
    stream: EventStream = field(default_factory=EventStream)
    phase: Phase = Phase.PREPARING
    _spec: RequestSpec | None = None
    _answer: AnswerText | None = None
    tokens: list[int] = field(default_factory=list)
    num_cached_tokens: int | None = None
    num_preemptions: int = 0

    _row: Row | None = None
    sequence_id: SequenceId = SequenceId(0)
    incarnation: int = 0
    block_ids: list[BlockId] = field(default_factory=list)
    num_blocks_sent: int = 0
    is_at_executor: bool = False
    num_steps_in_flight: int = 0
    num_cache_tokens: int = 0
    num_committed_blocks: int = 0
    is_extending: bool = False
    was_extend_refused: bool = False
    free_after: dict[SessionKey, StepId] = field(default_factory=dict)

    @property
    def request_id(self) -> str:
        return self.checked.request_id

    @property
    def spec(self) -> RequestSpec:
        assert self._spec is not None, "only a submitted request has its specification"
        return self._spec

    @property
    def answer(self) -> AnswerText:
        assert self._answer is not None, "only a submitted request has its text"
        return self._answer

    @property
    def row(self) -> Row:
        assert self._row is not None, "only a running request has a row"
        return self._row

    @property
    def order(self) -> tuple[int, int]:
        """Who comes first: the smaller."""
        return (-self.checked.priority, self.arrival)

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.spec.num_prompt_tokens

    def submit(self, spec: RequestSpec, answer: AnswerText) -> None:
        """The prompt is tokenized: from now on it waits for its place."""
        self._spec, self._answer = spec, answer
        self.tokens = list(spec.prompt_ids)
        self.phase = Phase.WAITING

    def begin_sequence(self, sequence_id: SequenceId) -> None:
        """Ask for blocks under a fresh id."""
        self.phase = Phase.ALLOCATING
        self.sequence_id = sequence_id
        self.num_cache_tokens = len(self.tokens)

    def begin_row(self, row: Row, block_ids: list[BlockId]) -> None:
        """The blocks are there: it runs."""
        self.phase = Phase.RUNNING
        self._row, self.block_ids = row, block_ids
        self.num_committed_blocks = 0
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
        self._row = None
        self.block_ids = []
        self.free_after = {}

    def usage(self) -> Usage:
        generated = self.num_generated if self._spec else 0
        prompt = self._spec.num_prompt_tokens if self._spec else 0
        return Usage(prompt, self.num_cached_tokens or 0, generated)

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
