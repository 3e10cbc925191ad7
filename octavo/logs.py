"""Logging of a process: one line a record, to standard error, set up once by each `__main__`.

Here belongs the form of a log line. Not here: what is logged, and the prefix that the launcher puts before it.
"""

import logging
import os
import sys
import time

LEVELS = ("debug", "info", "warning", "error")
# Set by the launcher, whose prefix already names the process.
PREFIXED_VARIABLE = "OCTAVO_LOG_PREFIXED"
# An error can quote a request; a prompt of a million ids must not become a log line.
MAX_MESSAGE_CHARS = 4_000


# What a client chose, such as a request id, may stand in a message: it must not end the line, or steer a terminal.
_CONTROL_CHARACTERS = {code: f"\\x{code:02x}" for code in (*range(9), *range(10, 32), *range(127, 160))}


class LineFormatter(logging.Formatter):
    """`2026-01-31T12:00:00.123Z INFO router octavo.rpc: message`, in UTC, long messages cut in their middle."""

    default_time_format = "%Y-%m-%dT%H:%M:%S"
    default_msec_format = "%s.%03dZ"

    def __init__(self, process: str) -> None:
        name = "" if os.environ.get(PREFIXED_VARIABLE) else f"{process} "
        super().__init__(f"%(asctime)s %(levelname)s {name}%(name)s: %(message)s")
        self.converter = time.gmtime

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 (the name is logging's)
        record.message = _shorten(record.message).translate(_CONTROL_CHARACTERS)
        return super().formatMessage(record)


def _shorten(message: str) -> str:
    if len(message) <= MAX_MESSAGE_CHARS:
        return message
    half = MAX_MESSAGE_CHARS // 2
    return f"{message[:half]} ... ({len(message) - 2 * half} characters left out) ... {message[-half:]}"


def configure_logging(process: str, level: str) -> None:
    """Send every record of this process to standard error, and nothing twice.

    Args:
        process: the name in each line, `router`.
        level: one of `LEVELS`.

    Raises:
        ValueError: an unknown level.
    """
    if level not in LEVELS:
        raise ValueError(f"log level {level!r}: choose one of {', '.join(LEVELS)}")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LineFormatter(process))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.captureWarnings(True)
