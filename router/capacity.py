"""Who holds blocks: asking for them at admission and ahead of need, and giving them up when there are none.

The state of waiting for blocks lives here; the decisions themselves are pure functions in `admission`. Not here: steps,
tokens, clients.
"""

from dataclasses import dataclass

from router import admission
from router.ids import StepId
from router.live import LiveRequest, Phase
from router.model import Model, blocks_for
from router.observer import Observer
from router.outbox import Allocated, Allocation, Commit, Extended, Extension, Outbox, Release
from router.roster import Roster
from router.scheduler import Row
from router.steps import SessionSteps

# Blocks can come free at others' hands (other routers, fences that lift), which nobody tells us.
RETRY_BLOCKS_S = 0.02
NO_STEP = StepId(0)
# A scored token keeps a row of logits until the end of its step: 256 of a vocabulary of 128 K are 134 MB.
MAX_SCORED_RUN_TOKENS = 256


@dataclass
class Capacity:
    """Blocks for the requests of a roster. Moments are in the engine's clock (seconds).

    Attributes:
        _retry_admission_at: who was refused blocks is tried again then, or when a request ended. None: nobody was.
        _is_closed: nobody is admitted after a preemption before a running request ended.
        _hold_extensions_until: blocks of a preempted request are fenced until this step's result is here.
    """

    model: Model
    slack_blocks: int
    roster: Roster
    outbox: Outbox
    observer: Observer
    _retry_admission_at: float | None = None
    _retry_extension_at: float | None = None
    _is_closed: bool = False
    _is_short: bool = False
    _hold_extensions_until: StepId = NO_STEP

    @property
    def used_blocks(self) -> int:
        """Blocks that running requests hold; a shared one counts for each."""
        return sum(len(live.block_ids) for live in list(self.roster.running.values()))

    def next_retry_after(self, now: float) -> float | None:
        """The next moment to try again. One that is past was tried, or waits for an event that wakes by itself."""
        retries = (self._retry_admission_at, self._retry_extension_at)
        return min((moment for moment in retries if moment is not None and moment > now), default=None)

    def forget_session(self) -> None:
        """No step is in flight any more."""
        self._hold_extensions_until = NO_STEP

    # ------------------------------------------------------------------------------------------------------- admission

    def admit(self, now: float) -> None:
        """Ask for blocks for those in front of the queue, as far as there are slots."""
        roster = self.roster
        if not roster.running and not roster.allocating:
            self._is_closed = False
        if self._is_closed:
            return
        num_places = max(0, roster.num_free_slots - len(roster.allocating))
        if self._retry_admission_at is not None:
            if now < self._retry_admission_at or roster.allocating:
                return
            num_places = min(1, num_places)  # who was refused is tried alone: nobody passes it again and again
        for live in roster.waiting[:num_places]:
            if live.num_steps_in_flight:
                break
            self._allocate(live)

    def take_refusal(self, live: LiveRequest, now: float) -> None:
        """There are no blocks for it now."""
        self.roster.refuse_allocation(live)
        self._retry_admission_at = now + RETRY_BLOCKS_S

    def take_allocation(self, live: LiveRequest, outcome: Allocated) -> None:
        """The blocks are there: a row begins behind what is cached."""
        self._retry_admission_at = None
        slot = self.roster.take_slot(live)
        num_tokens, num_cached = len(live.tokens), outcome.num_cached_tokens
        capacity = len(outcome.block_ids) * self.model.block_size
        row = Row(slot, live.order, num_tokens, num_cached, num_cached, capacity, live.spec.max_kv_tokens)
        if live.checked.output.prompt_logprobs:
            row.max_run_tokens = MAX_SCORED_RUN_TOKENS
        live.begin_row(row, list(outcome.block_ids))
        live.num_committed_blocks = num_cached // self.model.block_size

    def _allocate(self, live: LiveRequest) -> None:
        self.roster.begin_allocation(live)
        block_size, checked = self.model.block_size, live.checked
        most = blocks_for(live.spec.max_kv_tokens, block_size) - blocks_for(len(live.tokens), block_size)
        num_refused = len(self.roster.waiting) if self._retry_admission_at is not None else 0
        slack = max(0, min(most, self._slack(num_refused)))
        allocation = Allocation(live.sequence_id, tuple(live.tokens), checked.salt, slack, checked.bypass_cache)
        self.outbox.allocate(allocation)

    def _slack(self, num_waiting: int) -> int:
        return admission.slack_blocks(self.slack_blocks, self.used_blocks, self.model, num_waiting)

    # ---------------------------------------------------------------------------------------------------------- growth

    def extend(self, steps: SessionSteps, now: float) -> None:
        """Ask for blocks ahead of need, so that no decode step waits for them."""
        if self._retry_extension_at is not None and now < self._retry_extension_at:
            return
        self._retry_extension_at = None
        if steps.num_in_flight and steps.last_result < self._hold_extensions_until:
            return
        slack = self._slack(len(self.roster.waiting))
        for live in self.roster.running.values():
            if live.is_extending:
                continue
            have, block_size = len(live.block_ids), self.model.block_size
            grown = admission.growth(live.row, have, slack, block_size, was_refused=live.was_extend_refused)
            if grown is not None:
                live.is_extending = True
                self.outbox.extend(Extension(live.sequence_id, have, grown.need_blocks, grown.want_blocks))

    def take_extension(self, live: LiveRequest, outcome: Extended) -> None:
        """More blocks; none is an answer too, to who asked ahead of need."""
        live.block_ids += outcome.block_ids
        live.row.capacity_tokens = len(live.block_ids) * self.model.block_size
        live.was_extend_refused = not outcome.block_ids

    def take_shortage(self) -> None:
        """A row that cannot go on without a block got none."""
        self._is_short = True

    def preempt(self, steps: SessionSteps, now: float) -> None:
        """Out of blocks: the newest of the lowest priority gives up its own, and is computed again later."""
        if not self._is_short:
            return
        self._is_short = False
        victim = admission.choose_victim(live.row for live in self.roster.running.values())
        if victim is None:
            self._retry_extension_at = now + RETRY_BLOCKS_S
            return
        live = self.roster.running[victim.slot]
        live.num_preemptions += 1
        if live.num_steps_in_flight:
            self._hold_extensions_until = steps.last_sent
        self._give_back(live, steps)
        self.roster.preempt(live)
        # Nobody comes in before somebody ended, or the same request would be preempted again and again.
        self._is_closed = True
        self.observer.on_preempted()

    # ------------------------------------------------------------------------------------------------- commit, release

    def commit(self, live: LiveRequest) -> None:
        """Tell the cache service of blocks that became full: from now on others can find them."""
        if live.phase is not Phase.RUNNING:
            return
        num_full = live.row.num_computed // self.model.block_size
        if num_full > live.num_committed_blocks:
            live.num_committed_blocks = num_full
            self.outbox.commit(_commit_of(live))

    def release(self, live: LiveRequest, steps: SessionSteps | None) -> None:
        """A request ends: its blocks go back, and who waited for blocks is tried again."""
        if live.phase in (Phase.RUNNING, Phase.ALLOCATING):
            self._give_back(live, steps)
            self._retry_admission_at = self._retry_extension_at = None
            self._is_closed = False

    def _give_back(self, live: LiveRequest, steps: SessionSteps | None) -> None:
        """Blocks committed as far as computed, fenced as far as sent; the row leaves the executor."""
        commit = None
        if live.phase is Phase.RUNNING:
            commit = _commit_of(live)
            if live.is_at_executor and steps is not None:
                steps.retire(live.row.slot)
        self.outbox.release(Release(live.sequence_id, commit, tuple(live.free_after.items())))


def _commit_of(live: LiveRequest) -> Commit:
    """All that is computed, with the ids that the cache service does not know yet."""
    num_computed, offset = live.row.num_computed, live.num_cache_tokens
    token_ids = tuple(live.tokens[offset:num_computed])
    live.num_cache_tokens = max(offset, num_computed)
    return Commit(live.sequence_id, num_computed, offset, token_ids)
