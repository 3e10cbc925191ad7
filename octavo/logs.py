"""Logging of a process: one line a record, to standard error, set up once by each `__main__`.

Here belongs the form of a log line, for people or as JSON. Not here: what is logged, and the prefix that the launcher
puts before it.
"""

import json
import logging
import os
import sys
import time
from collections.abc import Mapping

LEVELS = ("debug", "info", "warning", "error")
FORMATS = ("console", "json")
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


class JsonFormatter(logging.Formatter):
    """An object a line: `time`, `level`, `process`, `pid`, `logger`, `message`, and the fields of the record.

    A record is given fields by `fields(...)`; a traceback is in `exception`.
    """

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        about = json_head(self._process, record.levelname, record.created)
        about |= {"pid": record.process, "logger": record.name, "message": _shorten(record.getMessage())}
        about |= getattr(record, _FIELDS, {})
        if record.exc_info:
            about["exception"] = self.formatException(record.exc_info)
        return json.dumps(about, default=str)


def json_head(process: str, level: str, unix_s: float) -> dict[str, object]:
    """What every line begins with, whoever writes it."""
    moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(unix_s)) + f".{int(unix_s % 1 * 1000):03d}Z"
    return {"time": moment, "level": level.lower(), "process": process}


_FIELDS = "octavo_fields"


def fields(**values: object) -> Mapping[str, object]:
    """For `extra=` of a logging call: what JSON lines have beside the message, which says the same to people."""
    return {_FIELDS: values}


def configure_logging(process: str, level: str, log_format: str = "console") -> None:
    """Send every record of this process to standard error, and nothing twice.

    Args:
        process: the name in each line, `router`.
        level: one of `LEVELS`.
        log_format: one of `FORMATS`.

    Raises:
        ValueError: an unknown level or format.
    """
    if log_format not in FORMATS:
        raise ValueError(f"log format {log_format!r}: choose one of {', '.join(FORMATS)}")
    if level not in LEVELS:
        raise ValueError(f"log level {level!r}: choose one of {', '.join(LEVELS)}")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(process) if log_format == "json" else LineFormatter(process))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.captureWarnings(True)
