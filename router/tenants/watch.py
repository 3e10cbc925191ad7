"""The tenants of now: the file is looked at every second, and a broken one changes nothing. Not here: its form."""

import asyncio
import logging
import os
from collections.abc import Callable
from typing import Protocol

from router.tenants.directory import Directory
from router.tenants.file import read_directory

log = logging.getLogger(__name__)

LOOK_INTERVAL_S = 1.0


class ReloadObserver(Protocol):
    """Hears of changes."""

    def on_reload(self, is_good: bool) -> None:
        """The file has changed; whether it can be used."""


class TenantsFile:
    """Keeps the directory of a file.

    Attributes:
        directory: all tenants, as the file said when it was good last.
        is_good: whether the file as it is now could be used.

    Raises:
        ValueError: the file cannot be used now.
    """

    def __init__(self, path: str, observer: ReloadObserver, stat: Callable[[str], os.stat_result] = os.stat) -> None:
        self._path = path
        self._observer = observer
        self._stat = stat
        self._stamp = self._stamp_now()
        self.directory: Directory = read_directory(path)
        self.is_good = True

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(LOOK_INTERVAL_S)
            await self.look()

    async def look(self) -> None:
        """Read the file where it has changed; in a thread, since thousands of tenants take a while."""
        stamp = self._stamp_now()
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self.directory = await asyncio.to_thread(read_directory, self._path)
        except ValueError as error:
            self.is_good = False
            log.error("the changed tenants are not used, those of before stay: %s", error)
        else:
            self.is_good = True
            log.info("%d tenants from %s", len(self.directory.tenants), self._path)
        self._observer.on_reload(self.is_good)

    def _stamp_now(self) -> tuple[int, int, int] | None:
        """Differs when the file was written or replaced, also through the links of a mounted Secret; None: gone."""
        try:
            status = self._stat(self._path)
        except OSError:
            return None
        return status.st_mtime_ns, status.st_size, status.st_ino
