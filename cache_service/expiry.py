"""The look for expired leases, again and again.

Here belongs when to look, and what a process that itself stood still makes of it. Not here: what expiry does.
"""

import asyncio
import logging
from collections.abc import Callable

from cache_service.service import CacheService

log = logging.getLogger(__name__)


class Expiry:
    """Looks every `interval_s`; a look that comes late by more than that says that this process stood still."""

    def __init__(self, service: CacheService, interval_s: float, now: float) -> None:
        self._service = service
        self._interval_s = interval_s
        self._last_look = now

    def look(self, now: float) -> None:
        """End overdue leases. After a standstill deadlines move first: nobody could be heard meanwhile."""
        lateness_s = now - self._last_look - self._interval_s
        self._last_look = now
        if lateness_s > self._interval_s:
            log.warning("stood still for %.1f s; leases are given as much time more", lateness_s)
            self._service.postpone_expiry(lateness_s)
        self._service.expire_leases(now)

    async def run(self, clock: Callable[[], float]) -> None:
        """Until cancelled. An error is logged, and the next look comes all the same."""
        while True:
            await asyncio.sleep(self._interval_s)
            try:
                self.look(clock())
            except Exception:
                log.exception("a look for expired leases failed")
