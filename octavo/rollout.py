"""A roll-out: new processes take the places of a pool's executors, one after the other, and what runs moves with them.

An executor that is asked to hand over tells its routers, which go on at another one of the pool behind their last step;
once it holds no session it is ended, and nobody misses it. Until then it serves as before, so whatever fails on the way
leaves things as they are. Not here: how processes run (supervisor), and who asks for this (control).
"""

import asyncio
import signal
from collections.abc import Callable, Sequence

from octavo.child import Child
from octavo.rpc import IDLE
from octavo.supervisor import ChildFailedError, HealthProbe, Supervisor

Say = Callable[[str], None]

MOVE_TIMEOUT_S = 30.0  # until no router has a session any more
_PROBE_INTERVAL_S = 0.1
_IDLE_TIMEOUT_S = 10.0  # an executor looks once a second, on a busy machine less often
_HAND_OVER, _STAY = signal.SIGUSR1, signal.SIGUSR2


class RolloutError(Exception):
    """It cannot be done, or not to its end; the message is for people, and says what runs now."""


class Rollout:
    """Replaces the executors of all pools. One at a time.

    Args:
        probe: whether a name of a child's health is SERVING.
    """

    def __init__(self, supervisor: Supervisor, probe: HealthProbe, move_timeout_s: float = MOVE_TIMEOUT_S) -> None:
        self._supervisor = supervisor
        self._probe = probe
        self._move_timeout_s = move_timeout_s
        self._is_going_on = False

    async def run(self, say: Say) -> str | None:
        """Until every executor that runs now was replaced. Returns why it was refused or given up, or None."""
        if self._is_going_on:
            return "another roll-out is going on; wait for its end"
        if not self._supervisor.is_ready:
            return "not all processes are ready yet, or they are about to end; nothing was changed"
        self._is_going_on = True
        try:
            return await self._supervisor.run_beside(self._attempt(say))
        finally:
            self._is_going_on = False

    async def _attempt(self, say: Say) -> str | None:
        pools = self._supervisor.pools()
        if not pools:
            return "there is no executor here"
        try:
            for pool in pools:
                await _PoolRollout(self._supervisor, self._probe, self._move_timeout_s, pool, say).run()
        except RolloutError as error:
            return str(error)
        except Exception as error:  # a defect here must not end what serves
            return f"it failed, which is a defect of Octavo: {error!r}"
        return None


class _PoolRollout:
    """Of one pool: its places, some of which are free."""

    def __init__(
        self, supervisor: Supervisor, probe: HealthProbe, move_timeout_s: float, pool: Sequence[Child], say: Say
    ) -> None:
        self._supervisor = supervisor
        self._probe = probe
        self._move_timeout_s = move_timeout_s
        self._pool = pool
        self._say = say
        self._num_wanted = sum(not child.spec.is_reserve for child in pool)
        self._old = {child.pid for child in self._running() if child.pid is not None}

    def _running(self) -> list[Child]:
        return [child for child in self._pool if self._supervisor.keeps(child)]

    def _to_replace(self) -> list[Child]:
        """Those that are the same process as at the beginning: one that died meanwhile was replaced by that."""
        return [child for child in self._running() if child.pid in self._old]

    async def run(self) -> None:
        """Raises RolloutError."""
        if not self._old:
            raise RolloutError("no executor runs now; one that is started again is a new process anyway")
        try:
            await self._replace_all()
        except RolloutError:
            await self._end_surplus()
            raise
        await self._end_surplus()

    async def _replace_all(self) -> None:
        while waiting := self._to_replace():
            await self._have_successor()
            leaving = await self._first_idle(waiting)
            await self._end(leaving)
            if len(self._running()) < self._num_wanted:
                await self._launch(leaving)

    async def _end_surplus(self) -> None:
        """One was started beside the others, and none was ended: whoever is idle has nothing to do here any more."""
        while len(self._running()) > self._num_wanted:
            for child in self._running():
                await self._wait_until_ready(child)
            await self._end(await self._first_idle(self._running()))

    async def _have_successor(self) -> None:
        """See that there is another executor than the ones to be replaced, or a spare that is replaced first."""
        fresh = [child for child in self._running() if child.pid not in self._old]
        free = [child for child in self._pool if child not in self._running()]
        if fresh:
            await self._wait_until_ready(fresh[0])
        elif free:
            await self._launch(free[0])

    async def _wait_until_ready(self, child: Child) -> None:
        deadline = _now() + child.spec.start_timeout_s
        while not await self._probe(child.spec.address, child.spec.health_service):
            if _now() > deadline or not self._supervisor.keeps(child):
                raise RolloutError(f"{child.spec.name} does not become ready; {self._who_serves()}")
            await asyncio.sleep(_PROBE_INTERVAL_S)

    async def _launch(self, child: Child) -> None:
        self._say(f"roll-out: starting {child.spec.name}")
        try:
            await self._supervisor.launch(child)
        except ChildFailedError as failure:
            raise RolloutError(f"the new executor did not come up; {self._who_serves()}. {failure}") from None

    async def _first_idle(self, children: Sequence[Child]) -> Child:
        """The first that holds no session; the first, if none says so for a while."""
        deadline = _now() + _IDLE_TIMEOUT_S
        while True:
            for child in children:
                if await self._probe(child.spec.address, IDLE):
                    return child
            if len(children) == 1 or _now() > deadline:
                return children[0]
            await asyncio.sleep(_PROBE_INTERVAL_S)

    async def _end(self, child: Child) -> None:
        """End one that nobody needs: what runs there moves first."""
        await self._wait_until_ready(child)
        pid, name = child.pid, child.spec.name
        child.signal(_HAND_OVER)
        deadline = _now() + self._move_timeout_s
        while not await self._probe(child.spec.address, IDLE):
            if child.pid != pid or not self._supervisor.keeps(child):
                self._say(f"roll-out: {name} ended by itself meanwhile")
                return
            if _now() > deadline:
                child.signal(_STAY)
                raise RolloutError(
                    f"{name} still has sessions after {self._move_timeout_s:g} s: a router knows no other executor of "
                    f"this engine, or does not answer; name them all to it (spare_executors). {self._who_serves()}"
                )
            await asyncio.sleep(_PROBE_INTERVAL_S)
        await self._supervisor.retire(child)
        self._say(f"roll-out: {name} has ended, {self._who_serves()}")

    def _who_serves(self) -> str:
        names = [child.spec.name for child in self._running()]
        return f"{' and '.join(names)} run{'s' if len(names) == 1 else ''}" if names else "no executor runs"


def _now() -> float:
    return asyncio.get_running_loop().time()
