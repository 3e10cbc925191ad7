"""How long to wait before the next try. Pure: whoever waits does the waiting."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class Backoff:
    """Twice as long each time, up to a bound. Seconds."""

    first_s: float
    max_s: float
    _next_s: float = field(init=False)

    def __post_init__(self) -> None:
        self.reset()

    def next_s(self) -> float:
        """The wait before this try; the one after it is longer."""
        wait_s, self._next_s = self._next_s, min(2 * self._next_s, self.max_s)
        return wait_s

    def reset(self) -> None:
        """It succeeded: the next row of tries begins anew."""
        self._next_s = self.first_s
