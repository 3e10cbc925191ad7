"""Whether a process of this machine still runs, without ever mistaking a new process for an old one.

A pidfd stays with its process when the number is given to another, and turns readable when the process has ended and
its memory is unmapped. Not here: what follows from a death (registry, service).
"""

import asyncio
import logging
import os
import select
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from octavo.errors import FieldViolation, OctavoError, invalid_argument

log = logging.getLogger(__name__)


class Watched(Protocol):
    """A process that is watched in an event loop."""

    @property
    def started(self) -> int:
        """When it began, in ticks since the machine did: with its pid, the name of one process. 0: not to be seen."""

    def is_alive(self) -> bool:
        """False only when it is certain that the process runs no more."""

    def when_dead(self, loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
        """Call back once, in the loop, when the process has ended; at once if it has."""

    def close(self) -> None:
        """Stop watching. Idempotent."""


def watch_process(pid: int) -> Watched:
    """Watch a process by the pid that it has here; 0: it cannot be seen from here."""
    if pid:
        return WatchedProcess(pid)
    log.warning("an executor gives no pid: its epoch cannot end before this cache service does")
    return UnseenProcess()


def watch_again(pid: int, started: int, watch: Callable[[int], Watched] = watch_process) -> Watched | None:
    """The very process that had this pid and began then; None where it is dead, whoever has its number now."""
    try:
        process = watch(pid)
    except OctavoError:
        return None
    if process.started == started and process.is_alive():
        return process
    process.close()
    return None


class WatchedProcess:
    """A process known by its pidfd."""

    def __init__(self, pid: int) -> None:
        try:
            self._descriptor = os.pidfd_open(pid)
            self.started = _start_of(pid)
        except ProcessLookupError as error:
            raise invalid_argument(
                FieldViolation("pid", f"is {pid}, but no such process is to be seen from here; 0 where it cannot be")
            ) from error
        self._loop: asyncio.AbstractEventLoop | None = None

    def is_alive(self) -> bool:
        """False once the process has ended, also as a zombie that waits to be reaped."""
        if self._descriptor < 0:
            return False
        poll = select.poll()
        poll.register(self._descriptor, select.POLLIN)
        return not poll.poll(0)

    def when_dead(self, loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
        """Call back once, in the loop, when the process has ended; at once if it has."""
        self._loop = loop
        loop.add_reader(self._descriptor, self._ended, callback)

    def _ended(self, callback: Callable[[], None]) -> None:
        self._stop_reading()
        callback()

    def _stop_reading(self) -> None:
        if self._loop is not None:
            self._loop.remove_reader(self._descriptor)
            self._loop = None

    def close(self) -> None:
        """Stop watching. Idempotent."""
        if self._descriptor < 0:
            return
        self._stop_reading()
        os.close(self._descriptor)
        self._descriptor = -1


def _start_of(pid: int) -> int:
    """Field 22 of /proc/pid/stat; 0 for one that has just ended. Field 2, a name, may hold anything and ends in `)`."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except OSError:
        return 0


class UnseenProcess:
    """A process in another namespace: nothing can prove that it is dead, so it counts as alive for ever."""

    started = 0

    def is_alive(self) -> bool:
        return True

    def when_dead(self, loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
        """Never calls back."""

    def close(self) -> None:
        """Nothing is watched."""
