"""What the engine tells whoever counts and measures. The engine knows nothing of metrics, and they cannot stop it."""

from typing import Protocol

from router.request import Timing, Usage


class Observer(Protocol):
    """Hears of every event that is counted. Durations in seconds."""

    def on_admitted(self, num_queried_tokens: int, num_hit_tokens: int) -> None:
        """First admission of a request: how many prompt tokens were looked up, and how many were cached."""

    def on_first_token(self, elapsed_s: float) -> None: ...

    def on_next_token(self, gap_s: float) -> None: ...

    def on_preempted(self) -> None: ...

    def on_planned(self, plan_s: float, num_tokens: int) -> None: ...

    def on_delivered(self, deliver_s: float, execute_s: float) -> None: ...

    def on_ended(self, outcome: str, usage: Usage, timing: Timing, elapsed_s: float) -> None:
        """The end of a request; `outcome` is the finish reason in small letters, `abort` or `error`."""

    def on_rejected(self, reason: str) -> None:
        """A request that was refused before it was queued."""
