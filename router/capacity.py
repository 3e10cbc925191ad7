"""Who holds blocks: asking for them at admission, at a fork and ahead of need, and giving them up when there are none.

The state of waiting for blocks lives here; the decisions themselves are pure functions in `admission`. Not here: steps,
tokens, clients.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from router import admission
from router.beams import BeamGroup
from router.ids import BlockId, StepId
from router.live import Choice, LiveRequest, Phase, num_held_blocks
from router.model import Model, blocks_for
from router.observer import Observer
from router.outbox import Allocated, Allocation, Commit, Extended, Extension, Fork, Forked, Outbox, Release, Snapshot
from router.quotas import Quotas
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
        _held_back: tenants whose next in the queue waits for its own tenant's blocks.
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
    _held_back: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._quotas = Quotas(self.model, self.roster)

    @property
    def num_held_blocks(self) -> int:
        """Blocks that running choices hold, a shared one once. From any thread; walks over all of them."""
        return num_held_blocks(list(self.roster.running.values()))

    def next_retry_after(self, now: float) -> float | None:
        """The next moment to try again. One that is past was tried, or waits for an event that wakes by itself."""
        retries = (self._retry_admission_at, self._retry_extension_at)
        return min((moment for moment in retries if moment is not None and moment > now), default=None)

    def forget_session(self) -> None:
        """No step is in flight any more."""
        self._hold_extensions_until = NO_STEP

    # ------------------------------------------------------------------------------------------------------- admission

    def admit(self, now: float) -> None:
        """Ask for blocks for those in front of the queue, as far as there are slots for all that is born of them.

        Who waits for blocks of its own tenant's quota stands in nobody else's way.
        """
        roster = self.roster
        self._quotas.recount()
        if not roster.running and not roster.allocating:
            self._is_closed = False
        if self._is_closed:
            return
        num_places = roster.num_free_slots - sum(choice.num_places for choice in roster.allocating.values())
        retry_at = self._retry_admission_at
        if num_places <= 0 or (retry_at is not None and (now < retry_at or roster.allocating)):
            return
        for choice in self._candidates():
            num_places -= choice.num_places
            if choice.num_steps_in_flight or num_places < 0:
                break
            self._allocate(choice)
            if retry_at is not None:
                break  # who was refused is tried alone: nobody passes it again and again

    def _candidates(self) -> Iterator[Choice]:
        """Who waits, in order, but for tenants at their quota: of those nobody passes the first that must wait."""
        self._held_back.clear()
        for choice in list(self.roster.waiting):
            tenant = choice.checked.tenant
            if tenant in self._held_back:
                continue
            if self._quotas.admits(choice):
                yield choice
            else:
                self._held_back.add(tenant)

    def take_refusal(self, choice: Choice, now: float) -> None:
        """There are no blocks for it now."""
        self.roster.refuse(choice)
        self._retry_admission_at = now + RETRY_BLOCKS_S

    def fork(self, parent: Choice, children: list[Choice], first: Sequence[Release] = ()) -> bool:
        """Ask for the children's share of the blocks that a choice has computed.

        Args:
            first: of `give_up`: they are released before.

        Returns:
            False: the tenant's quota has no room for their copies, and nothing was asked.
        """
        num_shared = parent.row.num_computed
        num_full, num_partial = divmod(num_shared, self.model.block_size)
        num_copies = len(children) if num_partial else 0
        self._quotas.recount()
        if self._quotas.room(parent, num_copies) < num_copies:
            return False
        for child in children:
            self.roster.begin_fork(child, num_shared)
            child.block_ids, child.num_asked_blocks = parent.block_ids[:num_full], 1 if num_partial else 0
        parent.num_committed_blocks = num_full
        child_ids = tuple(child.sequence_id for child in children)
        self.outbox.fork(Fork(parent.sequence_id, child_ids, _commit_of(parent), tuple(first)))
        return True

    def take_fork(self, child: Choice, block_ids: tuple[BlockId, ...], outcome: Forked) -> None:
        """A share is there: the child goes on behind it."""
        copies = {target: (source, target) for source, target in outcome.copies}
        slot = self.roster.take_slot(child)
        num_shared = child.num_cache_tokens
        capacity = len(block_ids) * self.model.block_size
        order, max_kv_tokens = child.order, child.spec.max_kv_tokens
        row = Row(slot, order, len(child.tokens), num_shared, num_shared, capacity, max_kv_tokens)
        row.is_beam = child.request.beams is not None
        child.begin_row(row, list(block_ids), copies.get(block_ids[-1]))
        child.num_committed_blocks = num_shared // self.model.block_size

    def take_allocation(self, choice: Choice, outcome: Allocated) -> None:
        """The blocks are there: a row begins behind what is cached."""
        self._retry_admission_at = None
        slot = self.roster.take_slot(choice)
        num_tokens, num_cached = len(choice.tokens), outcome.num_cached_tokens
        (cause, num_lost), choice.lost = choice.lost, ("", 0)
        self.observer.on_recomputed(cause, max(0, num_lost - num_cached))
        capacity = len(outcome.block_ids) * self.model.block_size
        row = Row(slot, choice.order, num_tokens, num_cached, num_cached, capacity, choice.spec.max_kv_tokens)
        row.is_beam = choice.request.beams is not None
        if choice.checked.scores_prompt:
            row.max_run_tokens = MAX_SCORED_RUN_TOKENS
        choice.begin_row(row, list(outcome.block_ids))
        choice.num_committed_blocks = num_cached // self.model.block_size

    def _allocate(self, choice: Choice) -> None:
        self.roster.begin_allocation(choice)
        block_size, checked = self.model.block_size, choice.checked
        most = blocks_for(choice.spec.max_kv_tokens, block_size) - blocks_for(len(choice.tokens), block_size)
        num_refused = len(self.roster.waiting) if self._retry_admission_at is not None else 0
        num_needed = blocks_for(len(choice.tokens), block_size)
        slack = max(0, min(most, self._slack(num_refused)))
        slack = min(slack, self._quotas.room(choice, num_needed + slack) - num_needed)
        choice.num_asked_blocks = num_needed + slack
        about = (checked.scope, slack, checked.bypass_cache, choice.request.tag)
        self.outbox.allocate(Allocation(choice.sequence_id, tuple(choice.tokens), *about))

    def _slack(self, num_waiting: int) -> int:
        at_most = sum(len(choice.block_ids) for choice in self.roster.running.values())  # a shared one for each holder
        return admission.slack_blocks(self.slack_blocks, at_most, self.model, num_waiting)

    # ---------------------------------------------------------------------------------------------------------- growth

    def extend(self, steps: SessionSteps, now: float) -> None:
        """Ask for blocks ahead of need, so that no decode step waits for them."""
        if self._retry_extension_at is not None and now < self._retry_extension_at:
            return
        self._retry_extension_at = None
        if steps.num_in_flight and steps.last_result < self._hold_extensions_until:
            return
        slack = self._slack(sum(choice.checked.tenant not in self._held_back for choice in self.roster.waiting))
        for choice in list(self.roster.running.values()):
            if choice.is_extending or choice.phase is not Phase.RUNNING:
                continue
            have, block_size = len(choice.block_ids), self.model.block_size
            grown = admission.growth(choice.row, have, slack, block_size, was_refused=choice.was_extend_refused)
            if grown is not None:
                self._ask(choice, grown, steps)

    def _ask(self, choice: Choice, grown: admission.Growth, steps: SessionSteps) -> None:
        have = len(choice.block_ids)
        room = self._make_room(choice, grown, steps)
        want_blocks = min(grown.want_blocks, have + room)
        if choice.phase is not Phase.RUNNING or want_blocks < grown.need_blocks:
            return
        if want_blocks == have:
            choice.was_extend_refused = True
            return
        choice.is_extending = True
        choice.num_asked_blocks = want_blocks - have
        self.outbox.extend(Extension(choice.sequence_id, have, grown.need_blocks, want_blocks))

    def _make_room(self, choice: Choice, grown: admission.Growth, steps: SessionSteps) -> int:
        """Blocks that its tenant's quota leaves it. Where they are too few, the newest of the tenant give way."""
        have, tenant = len(choice.block_ids), choice.checked.tenant
        while True:
            room = self._quotas.room(choice, grown.want_blocks - have)
            if have + room >= grown.need_blocks or choice.phase is not Phase.RUNNING:
                return room
            victim = self._quotas.choose_victim(tenant)
            if victim is None:
                return room  # others of the tenant wait for answers, which wake the engine
            self._quotas.close(tenant)
            self._give_way(victim, steps, "quota")

    def take_extension(self, choice: Choice, outcome: Extended) -> None:
        """More blocks; none is an answer too, to who asked ahead of need."""
        choice.num_asked_blocks = 0
        choice.block_ids += outcome.block_ids
        choice.row.capacity_tokens = len(choice.block_ids) * self.model.block_size
        choice.was_extend_refused = not outcome.block_ids

    def take_shortage(self, choice: Choice) -> None:
        """A row that cannot go on without a block got none."""
        choice.num_asked_blocks = 0
        self._is_short = True

    def preempt(self, steps: SessionSteps, now: float) -> None:
        """Out of blocks: the newest of the lowest priority gives up its own, and is computed again later."""
        if not self._is_short:
            return
        self._is_short = False
        victim = admission.choose_victim(choice.row for choice in self.roster.running.values())
        if victim is None:
            self._retry_extension_at = now + RETRY_BLOCKS_S
            return
        choice = self.roster.running[victim.slot]
        if choice.num_steps_in_flight:
            self._hold_extensions_until = steps.last_sent
        # Nobody comes in before somebody ended, or the same request would be preempted again and again.
        self._is_closed = True
        self._give_way(choice, steps, "pool")

    def _give_way(self, choice: Choice, steps: SessionSteps, cause: str) -> None:
        choice.request.num_preemptions += 1
        if choice.request.beams is not None:
            self._withdraw(choice.request, choice.request.beams, steps, "preemption")
        else:
            choice.lost = ("preemption", choice.row.num_computed)
            self._give_back(choice, steps)
            self.roster.preempt(choice)
        self._quotas.recount()
        self.observer.on_preempted(cause)

    # ----------------------------------------------------------------------------------------------------------- beams

    def give_up(self, lane: Choice, steps: SessionSteps | None) -> Release:
        """No beam is in a running lane any more. What is returned goes with a fork, or to `release_lanes`."""
        release = self._release_of(lane, steps)
        self.roster.park(lane)
        return release

    def release_lanes(self, releases: Iterable[Release]) -> None:
        """What lanes held that gave it up."""
        for release in releases:
            self.outbox.release(release)

    def break_off(self, request: LiveRequest, steps: SessionSteps | None, now: float, cause: str) -> None:
        """A fork of a search got no blocks: it gives up all it has, and waits as after a preemption."""
        if request.beams is not None:
            request.num_preemptions += 1
            self._withdraw(request, request.beams, steps, "preemption")
            if cause == "quota":
                self._quotas.close(request.checked.tenant)
            else:
                self._retry_admission_at = now + RETRY_BLOCKS_S
                self._is_closed = True
            self._quotas.recount()
            self.observer.on_preempted(cause)

    def _withdraw(self, request: LiveRequest, beams: BeamGroup, steps: SessionSteps | None, cause: str) -> None:
        """All lanes of a search are given up; the first waits, to compute what its beams begin with."""
        for lane in request.choices:
            if lane.phase in (Phase.RUNNING, Phase.FORKING):
                if lane.num_steps_in_flight and steps is not None:
                    self._hold_extensions_until = steps.last_sent
                self._give_back(lane, steps)
        self._gather(request, beams, cause)

    def _gather(self, request: LiveRequest, beams: BeamGroup, cause: str) -> None:
        """None of its lanes holds or is promised a block any more."""
        num_computed = 0
        for lane in request.choices:
            if lane.phase is Phase.RUNNING:
                num_computed = max(num_computed, lane.row.num_computed)
            if lane.phase in (Phase.RUNNING, Phase.FORKING):
                self.roster.park(lane)
        first = request.choices[0]
        first.tokens = [*request.spec.prompt_ids, *beams.gather()]
        first.lost = (cause, min(num_computed, len(first.tokens)))
        self.roster.enqueue(first)

    # ------------------------------------------------------------------------------------------------- commit, release

    def commit(self, choice: Choice) -> None:
        """Tell the cache service of blocks that became full: from now on others can find them."""
        if choice.phase is not Phase.RUNNING:
            return
        num_full = choice.row.num_computed // self.model.block_size
        if num_full > choice.num_committed_blocks:
            choice.num_committed_blocks = num_full
            self.outbox.commit(_commit_of(choice))

    def settle_copy(self, choice: Choice) -> None:
        """A step of a forked choice is done, so its copy is: the source need not be kept for it any longer."""
        if choice.copy is not None:
            choice.copy = None
            self.outbox.commit(_commit_of(choice))

    def snapshots(self) -> list[Snapshot]:
        """What all running choices hold, as far as results are here."""
        return [_snapshot_of(choice) for choice in self.roster.running.values()]

    def disown(self, choice: Choice, steps: SessionSteps | None) -> None:
        """Its blocks are not its own any more: it waits for others, and is computed again from its tokens."""
        if choice.request.beams is not None:
            self._withdraw(choice.request, choice.request.beams, steps, "cache_service_lost")
            return
        if choice.is_at_executor and steps is not None:
            steps.retire(choice.row.slot)
        choice.lost = ("cache_service_lost", choice.row.num_computed)
        self.roster.preempt(choice)

    def lose_all(self) -> None:
        """Nobody holds or is promised a block any more."""
        searches = {choice.request for choice in self.roster.running.values() if choice.request.beams is not None}
        for request in searches:
            assert request.beams is not None, "just looked"
            self._gather(request, request.beams, "cache_service_lost")
        for choice in list(self.roster.running.values()):
            self.disown(choice, None)
        for choice in [*self.roster.allocating.values(), *self.roster.forking.values()]:
            self.roster.refuse(choice)
        self._retry_admission_at = self._retry_extension_at = None
        self._is_closed = self._is_short = False
        self._quotas.clear()

    def release(self, choice: Choice, steps: SessionSteps | None) -> None:
        """A choice ends: its blocks go back, and who waited for blocks is tried again."""
        if choice.phase in (Phase.RUNNING, Phase.ALLOCATING, Phase.FORKING):
            self._give_back(choice, steps)
            self._retry_admission_at = self._retry_extension_at = None
            self._is_closed = False
            self._quotas.reopen(choice.checked.tenant)

    def _give_back(self, choice: Choice, steps: SessionSteps | None) -> None:
        self.outbox.release(self._release_of(choice, steps))

    def _release_of(self, choice: Choice, steps: SessionSteps | None) -> Release:
        """Blocks committed as far as computed, fenced as far as sent; the row leaves the executor."""
        commit = None
        if choice.phase is Phase.RUNNING:
            commit = _commit_of(choice)
            if choice.is_at_executor and steps is not None:
                steps.retire(choice.row.slot)
        return Release(choice.sequence_id, commit, tuple(choice.free_after.items()))


def _commit_of(choice: Choice) -> Commit:
    """All that is computed, with the ids that the cache service does not know yet."""
    num_computed, offset = choice.row.num_computed, choice.num_cache_tokens
    token_ids = tuple(choice.tokens[offset:num_computed])
    choice.num_cache_tokens = max(offset, num_computed)
    return Commit(choice.sequence_id, num_computed, offset, token_ids)


def _snapshot_of(choice: Choice) -> Snapshot:
    """Tokens as far as the commits that wait or are on their way may refer to."""
    num_computed = choice.row.num_computed
    request = choice.request
    if request.beams is None and any(other.phase is Phase.FORKING for other in request.choices):
        # The fork is still to be answered, and its children get what is computed: the prompt, and nothing behind it.
        num_computed = min(num_computed, choice.spec.num_prompt_tokens)
    return Snapshot(
        sequence_id=choice.sequence_id,
        token_ids=tuple(choice.tokens[: max(num_computed, choice.num_cache_tokens)]),
        num_computed_tokens=num_computed,
        block_ids=tuple(choice.block_ids),
        scope=choice.checked.scope,
        bypass_cache=choice.checked.bypass_cache,
        copy_source=choice.copy[0] if choice.copy is not None else None,
    )
