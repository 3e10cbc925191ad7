"""What the engine tells whoever counts and measures. The engine knows nothing of metrics, and they cannot stop it."""

from dataclasses import dataclass
from typing import Protocol

from router.request import Timing, Usage


@dataclass(frozen=True, slots=True)
class StepTimes:
    """One step from its plan to its delivery. Moments are in the engine's clock (seconds).

    Attributes:
        sent: its message waits for the connection.
        received: its result reached the engine's loop.
        execute_began_unix_s: by the executor's wall clock.
    """

    session_id: int
    step_id: int
    num_rows: int
    num_tokens: int
    plan_began: float
    send_began: float
    sent: float
    received: float
    deliver_began: float
    delivered: float
    execute_began_unix_s: float
    execute_s: float


class Observer(Protocol):
    """Hears of every event that is counted. Durations in seconds."""

    def on_admitted(self, num_queried_tokens: int, num_hit_tokens: int) -> None:
        """First admission of a request: how many prompt tokens were looked up, and how many were cached."""

    def on_first_token(self, elapsed_s: float) -> None:
        """The first token of a request, since its arrival."""

    def on_token(self, gap_s: float | None) -> None:
        """Every token, since the one before it of the same choice; None: there is none."""

    def on_preempted(self, cause: str) -> None:
        """A choice gave up its blocks: the `pool` has none, or its tenant's `quota`."""

    def on_recomputed(self, cause: str, num_tokens: int) -> None:
        """Tokens whose computation was sent before, and is sent again; `cause` is a word. 0 is nothing."""

    def on_takeover(self, elapsed_s: float) -> None:
        """A session took the place of one that was lost so long ago."""

    def on_step(self, times: StepTimes) -> None:
        """A step was delivered."""

    def on_ended(self, outcome: str, usage: Usage, timing: Timing, elapsed_s: float) -> None:
        """The end of a request; `outcome` is the finish reason in small letters, `abort` or `error`."""

    def on_fault(self) -> None:
        """An exception that nobody expected ended a request, or all of the engine's."""


class Observers(Protocol):
    """Who observes each engine."""

    def on_fault(self, engine: str) -> None:
        """The router itself failed on an engine."""

    def of(self, engine: str, model_name: str) -> Observer:
        """The observer of an engine while it serves a model."""
