"""The link to the cache service over time: it may restart, and then it must still be the owner of our arena.

The executor's mapping outlives the cache service's process. After a lost connection the executor registers again
under its epoch; if the answer is the arena that is mapped here, all goes on, and if not, this process is of no use
any more and must be replaced by one that maps the new arena.
"""

import logging
from collections.abc import Callable

from executor.clients.cache import ArenaGrant, CacheClient
from executor.ids import SessionId
from executor.sessions import Opening
from octavo.errors import Code, OctavoError

log = logging.getLogger(__name__)

_LOST_REASONS = ("STALE_EPOCH",)


class CacheLink:
    """A `SessionAuthority` that registers again by itself."""

    def __init__(
        self,
        client: CacheClient,
        grant: ArenaGrant,
        on_replaced: Callable[[str], None],
        lost_reason: Callable[[], str | None] = lambda: None,
    ) -> None:
        """on_replaced: told why, once the arena of this process is gone for good; lost_reason: why its memory is."""
        self._client = client
        self._grant = grant
        self._on_replaced = on_replaced
        self._lost_reason = lost_reason
        self._lost = False

    async def open_session(self, session_id: SessionId, opening: Opening) -> None:
        """See `SessionAuthority`."""
        await self._client.open_session(session_id, opening)

    async def close_session(self, session_id: SessionId) -> None:
        """See `SessionAuthority`."""
        await self._client.close_session(session_id)

    async def orphaned_sessions(self) -> frozenset[SessionId]:
        """See `SessionAuthority`. Called regularly: this is where a lost link is seen and mended."""
        reason = self._lost_reason()
        if reason is not None:
            self._on_replaced(reason)
        try:
            if self._lost:
                await self._register_again()
            return await self._client.orphaned_sessions()
        except OctavoError as error:
            if not self._lost and (error.code is Code.UNAVAILABLE or error.reason in _LOST_REASONS):
                log.warning("the cache service is lost (%s); steps go on, fresh sessions wait", error.message)
                self._lost = True
            raise

    async def _register_again(self) -> None:
        try:
            grant = await self._client.register(timeout_s=0)
        except OctavoError as error:
            if error.code is not Code.UNAVAILABLE:
                self._on_replaced(f"the cache service refuses this executor: {error.message}")
            raise
        if (grant.memory_id, grant.executor_epoch) != (self._grant.memory_id, self._grant.executor_epoch):
            self._on_replaced(f"the cache service has another arena now, {grant.memory_id}")
            return
        log.info("the cache service is back, with the same arena")
        self._lost = False
