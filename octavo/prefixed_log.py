"""One stream for the lines of many processes, each behind the name of its process."""

import sys
from typing import TextIO

_COLOURS = ("36", "33", "32", "35", "34", "31")  # of a terminal, one per process in turn


class PrefixedLog:
    """Writes `name | line`, names aligned, coloured where the stream is a terminal.

    Args:
        names: all that will write, in the order of their colours.
        stream: where to; None: standard error.
    """

    def __init__(self, names: list[str], stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        width = max(map(len, names))
        colours = self._stream.isatty()
        self._prefixes = {
            name: _prefix(f"{name:<{width}} | ", _COLOURS[index % len(_COLOURS)] if colours else None)
            for index, name in enumerate(names)
        }

    def write(self, name: str, line: str) -> None:
        """One line, at once."""
        try:
            self._stream.write(f"{self._prefixes[name]}{line}\n")
            self._stream.flush()
        except (BrokenPipeError, ValueError):  # nobody reads any more: that stops no one
            pass


def _prefix(text: str, colour: str | None) -> str:
    return f"\x1b[{colour}m{text}\x1b[0m" if colour else text
