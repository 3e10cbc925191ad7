"""The executors of one engine: the one that serves, and those that are attached and wait to take its place.

All of them map the same blocks, so who takes over goes on where the one before ended. Every loss takes the same path:
the first that lets a session be opened, be it a spare, one that was started again, or the same one. That no two may
write into one block is the cache service's to say. Here belongs who is asked, and in which order. Not here: what a
session carries (engine), and how long is waited (link).
"""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from octavo.errors import Code, OctavoError
from router import refusals
from router.clients.executor import Session
from router.model import Model, Standing

log = logging.getLogger(__name__)

WATCH_INTERVAL_S = 1.0


class Executor(Protocol):
    """What the pool asks of one. Raises OctavoError: UNAVAILABLE where it is not reached or not ready."""

    async def describe(self) -> Standing: ...

    async def open_session(self, executor_id: str, router_id: str, router_epoch: int) -> Session: ...

    async def close(self) -> None: ...


@dataclass(slots=True, eq=False)
class _Member:
    """One executor, and what is known of it.

    Attributes:
        name: its id, as far as it was heard of; before, its address.
        is_ready: whether it was found ready to take over, and has not been found otherwise since.
        told: what the log says of it already.
    """

    client: Executor
    name: str
    is_ready: bool = False
    told: str = ""


class Pool:
    """Who serves, and who could.

    Args:
        engine: its name, for the log.
        executors: (address, client) in order of preference, one at least.
    """

    def __init__(self, engine: str, executors: Sequence[tuple[str, Executor]]) -> None:
        self._engine = engine
        self._members = [_Member(client, address) for address, client in executors]
        self._serving = self._members[0]
        self._model: Model | None = None

    @property
    def num_ready_spares(self) -> int:
        """Executors that are attached, loaded and idle, as last seen."""
        return sum(member.is_ready for member in self._members if member is not self._serving)

    @property
    def serving(self) -> str:
        """Name of the one that serves, or served last."""
        return self._serving.name

    async def close(self) -> None:
        """Close all connections."""
        await asyncio.gather(*(member.client.close() for member in self._members))

    async def describe(self) -> Model:
        """What the engine serves now: the model of the first executor that answers; of one that ends, if no other does.

        Raises:
            OctavoError: none is reached, or none is ready; what the one that is asked first says.
        """
        refusal, leaving = None, None
        for member in self._in_order():
            try:
                standing = await member.client.describe()
            except OctavoError as error:
                refusal = refusal or error
                continue
            member.name = standing.executor_id
            if not standing.is_draining:
                return self._serve(member, standing.model)
            leaving = leaving or (member, standing.model)
        if leaving is not None:
            return self._serve(*leaving)
        assert refusal is not None
        raise refusal

    def _serve(self, member: _Member, model: Model) -> Model:
        self._serving, self._model = member, model
        return model

    async def open_session(self, model: Model, router_id: str, router_epoch: int) -> Session:
        """A session on the first executor that gives one, with which rows of `model` can go on.

        Raises:
            OctavoError: none does, for now: UNAVAILABLE. FAILED_PRECONDITION: the lease is over, or what served last is
                another model or pool now, or refuses this router.
        """
        refusals_by_member: dict[_Member, OctavoError] = {}
        for member in self._in_order():
            try:
                session = await self._open_at(member, model, router_id, router_epoch)
            except OctavoError as error:
                if error.reason == "LEASE_EXPIRED":
                    raise
                refusals_by_member[member] = error
                continue
            self._serving = member
            member.is_ready = False
            return session
        # Of a spare that is refused while its predecessor dies, it is known how soon to ask again.
        waits = (error for error in refusals_by_member.values() if error.reason == "PREDECESSOR_ALIVE")
        raise next(waits, refusals_by_member[self._serving])

    async def _open_at(self, member: _Member, model: Model, router_id: str, router_epoch: int) -> Session:
        standing = await member.client.describe()
        member.name = standing.executor_id
        if not standing.model.can_go_on_for(model):
            raise refusals.model_changed(standing.model.name)
        return await member.client.open_session(standing.executor_id, router_id, router_epoch)

    def _in_order(self) -> list[_Member]:
        """Whoever served last, then those that were found ready, then the rest."""
        return sorted(self._members, key=lambda member: (member is not self._serving, not member.is_ready))

    async def is_draining(self) -> bool:
        """Whether the executor that serves still wants to end. One that takes no more calls does: it is about to."""
        try:
            return (await self._serving.client.describe()).is_draining
        except OctavoError:
            return True

    async def choose_successor(self) -> bool:
        """Whether another executor is ready to go on; then that one is the next."""
        await self._look_at_spares()
        for member in self._in_order():
            if member.is_ready:
                log.info("engine %s goes on at executor %s: %s is to end", self._engine, member.name, self.serving)
                self._serving = member
                return True
        return False

    async def watch(self) -> None:
        """For ever: see who is ready. A connection that is there already need not be made when it is needed."""
        while True:
            await self._look_at_spares()
            await asyncio.sleep(WATCH_INTERVAL_S)

    async def _look_at_spares(self) -> None:
        await asyncio.gather(*(self._look_at(member) for member in self._members if member is not self._serving))

    async def _look_at(self, member: _Member) -> None:
        try:
            standing = await member.client.describe()
        except OctavoError as error:
            self._tell(member, False, "is gone" if error.code is Code.UNAVAILABLE else error.message)
            return
        member.name = standing.executor_id
        if standing.is_draining:
            self._tell(member, False, "is to end")
        elif self._model is not None and not standing.model.can_go_on_for(self._model):
            self._tell(member, False, f"cannot take over: it serves {standing.model.name!r}, another model or pool")
        elif member is not self._serving:
            self._tell(member, True, "is ready to take over")

    def _tell(self, member: _Member, is_ready: bool, what: str) -> None:
        """Log what is new. One that was never there, as that of the next roll-out, is no news."""
        is_news = what != member.told and (member.told or is_ready or what != "is gone")
        member.is_ready = is_ready
        if is_news:
            member.told = what
            log.info("engine %s: executor %s %s", self._engine, member.name, what)
