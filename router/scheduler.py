"""What the next step computes: a pure function of the rows and a token budget.

No phases: each row catches up the tokens it sent to the tokens it has, and a decode is a chunk of one. Not here: who is
admitted or preempted (admission), and anything that talks to another process (engine).

    tokens of a row     0 ........ num_sent ........ num_tokens ........ max_kv_tokens
                        |-- sent ---|---- to run ----|  |
                                                        last of num_tokens may still be on its way: sampled in a step
                                                        whose result is not here yet
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from router.ids import Slot

UNBOUNDED = 1 << 62


@dataclass(slots=True)
class Row:
    """A running sequence as the scheduler sees it.

    Attributes:
        order: who comes first, the smaller: (-priority, arrival, index of the choice).
        num_tokens: prompt, generated, and sampled in steps whose results are still to come.
        num_sent: tokens whose computation was sent to the executor.
        num_computed: tokens whose KV is known to be in the blocks.
        capacity_tokens: what the row's blocks hold.
        max_kv_tokens: tokens that will ever need KV.
        max_run_tokens: most of them in one step.
        is_beam: it samples nothing: what comes next is chosen when the result is here.
    """

    slot: Slot
    order: tuple[int, ...]
    num_tokens: int
    num_sent: int
    num_computed: int
    capacity_tokens: int
    max_kv_tokens: int
    max_run_tokens: int = UNBOUNDED
    is_beam: bool = False

    @property
    def num_target(self) -> int:
        """How far the row can be computed now, were there room."""
        return min(self.num_tokens, self.max_kv_tokens)

    @property
    def num_runnable(self) -> int:
        """Tokens that a step could compute: they are there, and their blocks too."""
        return max(0, min(self.num_target, self.capacity_tokens) - self.num_sent)

    @property
    def is_decode(self) -> bool:
        return self.num_tokens - self.num_sent == 1


@dataclass(frozen=True, slots=True)
class Run:
    """A row's part in a step: `num_tokens` from `start` on; `samples` when a token joins it that the step draws."""

    slot: Slot
    start: int
    num_tokens: int
    samples: bool


def plan(rows: Iterable[Row], token_budget: int, prefill_budget: int = UNBOUNDED) -> tuple[Run, ...]:
    """Share one token budget: decodes first, first come first served within priority, prefill chunks in the rest.

    Args:
        rows: any order; not changed.
        token_budget: most tokens of the step.
        prefill_budget: most tokens of prefill chunks in a step that has decodes too: those wait for the whole step.

    Returns:
        Runs in batch order, at most one per row, none empty.
    """
    ready = sorted((row for row in rows if row.num_runnable), key=lambda row: row.order)
    decodes = [row for row in ready if row.is_decode]
    prefills = [row for row in ready if not row.is_decode]
    runs = _share(decodes, token_budget)
    token_budget -= num_planned_tokens(runs)
    return (*runs, *_share(prefills, min(token_budget, prefill_budget) if runs else token_budget))


def _share(rows: Iterable[Row], token_budget: int) -> tuple[Run, ...]:
    """In the order of the rows, as far as the budget goes."""
    runs: list[Run] = []
    for row in rows:
        num_tokens = min(row.num_runnable, token_budget, row.max_run_tokens)
        if not num_tokens:
            break
        token_budget -= num_tokens
        samples = not row.is_beam and row.num_sent + num_tokens == row.num_tokens
        runs.append(Run(row.slot, row.num_sent, num_tokens, samples))
    return tuple(runs)


def mark_sent(row: Row, run: Run) -> None:
    """Advance a row past a run that was sent; a token that the run samples counts from now on."""
    row.num_sent += run.num_tokens
    row.num_tokens += run.samples


def num_planned_tokens(runs: Sequence[Run]) -> int:
    return sum(run.num_tokens for run in runs)
