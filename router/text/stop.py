"""Stop strings in text that arrives in pieces. Not here: tokens, and why a request ended otherwise.

The match that ends first wins, of those the longest: what a reader would find who takes the text character by
character, so it does not depend on how the text was cut into tokens.
"""

from collections.abc import Sequence
from typing import NamedTuple


class _Match(NamedTuple):
    end: int
    start: int
    stop: str


class StopScanner:
    """Passes text on, but for a tail that may become a stop string: that is held until it cannot."""

    def __init__(self, stops: Sequence[str], *, include_stop: bool) -> None:
        self._stops = tuple(stops)
        self._include_stop = include_stop
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str, *, is_armed: bool = True) -> str:
        """Take more text and return what is sure to be sent. Nothing after a match.

        Args:
            is_armed: False while matches do not count yet; a match that ends in a later, armed piece does.
        """
        if self.matched is not None:
            return ""
        num_held = len(self._held)
        text = self._held + text
        match = self._find(text, num_held) if is_armed else None
        if match is not None:
            self.matched, self._held = match.stop, ""
            return text[: match.end if self._include_stop else match.start]
        num_to_hold = self._num_to_hold(text)
        self._held = text[len(text) - num_to_hold :]
        return text[: len(text) - num_to_hold]

    def finish(self) -> str:
        """No more text comes: what was held is text after all."""
        held, self._held = self._held, ""
        return held

    def _find(self, text: str, num_held: int) -> _Match | None:
        """The match that ends first, behind what was held: what ended before did not count then."""
        matches = []
        for stop in self._stops:
            start = text.find(stop, max(0, num_held - len(stop) + 1))
            if start >= 0:
                matches.append(_Match(start + len(stop), start, stop))
        return min(matches, default=None)

    def _num_to_hold(self, text: str) -> int:
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            tail = text[len(text) - length :]
            if any(len(stop) > length and stop.startswith(tail) for stop in self._stops):
                return length
        return 0
