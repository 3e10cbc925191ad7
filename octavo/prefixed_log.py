"""One stream for the lines of many processes, each behind the name of its process, or all of them JSON."""

import json
import sys
import time
from typing import TextIO

from octavo.logs import json_head

_COLOURS = ("36", "33", "32", "35", "34", "31")  # of a terminal, one per process in turn


class PrefixedLog:
    """Writes `name | line`, names aligned, coloured where the stream is a terminal.

    Args:
        names: all that will write, in the order of their colours.
        stream: where to; None: standard error.
        is_json: lines that are JSON objects stay as they are, all others become one.
    """

    def __init__(self, names: list[str], stream: TextIO | None = None, *, is_json: bool = False) -> None:
        self._stream = stream or sys.stderr
        self._is_json = is_json
        width = max(map(len, names))
        colours = self._stream.isatty()
        self._prefixes = {
            name: _prefix(f"{name:<{width}} | ", _COLOURS[index % len(_COLOURS)] if colours else None)
            for index, name in enumerate(names)
        }

    def write(self, name: str, line: str) -> None:
        """One line, at once."""
        try:
            whole = _as_json(name, line) if self._is_json else f"{self._prefixes[name]}{line}"
            self._stream.write(f"{whole}\n")
            self._stream.flush()
        except (BrokenPipeError, ValueError):  # nobody reads any more: that stops no one
            pass


def _as_json(name: str, line: str) -> str:
    is_object = line.startswith("{") and line.endswith("}")
    return line if is_object else json.dumps(json_head(name, "info", time.time()) | {"message": line})


def _prefix(text: str, colour: str | None) -> str:
    return f"\x1b[{colour}m{text}\x1b[0m" if colour else text
