"""Which failed calls are sent again, when, and for how long. Pure: time and chance are arguments.

Not here: what a stream that broke asks for when it comes back (`octavo.continuation`), and the waiting (the clients).
"""

from dataclasses import dataclass

from octavo.errors import Code, OctavoError

# gRPC's own refusal of a message for its size, which no second try makes smaller; it has no code of its own.
_TOO_LARGE = "larger than max"
_JITTER = 0.25  # of what a server asks for, on top: so that those it refused together do not come back together


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How a client meets refusals and broken connections.

    A call is sent again after UNAVAILABLE, and after RESOURCE_EXHAUSTED unless its message is too large; always with
    the same `request_id`. A pause is what the server asks for and a little more; else `first_pause_s`, twice as long
    each time up to `max_pause_s`, less up to half of it by chance.

    Attributes:
        refused_for_s: since its first failure, for a call of which nothing has come; 0: it is not sent again.
        broken_for_s: since its first failure after the last event, for a stream that had begun; 0: it ends.
    """

    refused_for_s: float = 30.0
    broken_for_s: float = 300.0
    first_pause_s: float = 0.2
    max_pause_s: float = 2.0

    def __post_init__(self) -> None:
        for name in ("refused_for_s", "broken_for_s"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name}={getattr(self, name)}: choose seconds, 0 for never")
        if not 0 < self.first_pause_s <= self.max_pause_s:
            raise ValueError(f"pauses from {self.first_pause_s} s to {self.max_pause_s} s: choose 0 < first <= max")


class Attempts:
    """The attempts of one call: how long it has been failing, and when it must end.

    Args:
        policy: None: there is one attempt.
        timeout_s: of all attempts and pauses together; None: none.
        now: in seconds, as all times here.
    """

    def __init__(self, policy: RetryPolicy | None, timeout_s: float | None, now: float) -> None:
        self._policy = policy
        self._deadline = None if timeout_s is None else now + timeout_s
        self._failing_since: float | None = None
        self._num_failures = 0
        self._has_begun = False

    def progress(self) -> None:
        """Something new of the answer came."""
        self._has_begun = True
        self._failing_since = None
        self._num_failures = 0

    def timeout_s(self, now: float) -> float | None:
        """What is left for the next attempt. Raises OctavoError, DEADLINE_EXCEEDED, where nothing is."""
        if self._deadline is None:
            return None
        if now >= self._deadline:
            raise OctavoError(Code.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED", "the deadline passed between two attempts")
        return self._deadline - now

    def pause_after(self, error: OctavoError, now: float, chance: float) -> float:
        """Seconds to wait before the next attempt, at most up to the deadline.

        Args:
            error: what ended the last one.
            chance: from [0, 1).

        Raises:
            OctavoError: the error, where there is to be no other attempt.
        """
        if self._policy is None or not _may_pass(error):
            raise error
        if self._failing_since is None:
            self._failing_since = now
        limit_s = self._policy.broken_for_s if self._has_begun else self._policy.refused_for_s
        pause_s = self._pause_s(self._policy, error, chance)
        if now + pause_s > self._failing_since + limit_s:
            raise error
        self._num_failures += 1
        return pause_s if self._deadline is None else min(pause_s, max(0.0, self._deadline - now))

    def _pause_s(self, policy: RetryPolicy, error: OctavoError, chance: float) -> float:
        if error.retry_after_s is not None:
            return error.retry_after_s * (1 + _JITTER * chance)
        doublings = min(self._num_failures, 32)
        return min(policy.max_pause_s, policy.first_pause_s * 2.0**doublings) * (1 - chance / 2)


def _may_pass(error: OctavoError) -> bool:
    """Whether the same call can have another end."""
    if error.code is Code.RESOURCE_EXHAUSTED:
        return error.retry_after_s is not None or _TOO_LARGE not in error.message
    return error.code is Code.UNAVAILABLE
