"""Who is the next executor: the router's choice in virtual time, under deaths, restarts and ends in order.

Executors are dead or alive by a plan; that two never run one lease's sequences is checked at each session, as the cache
service does.
"""

import asyncio
import itertools
import logging
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import pytest

from octavo.errors import Code, OctavoError
from router.backoff import Backoff
from router.model import Model, Standing
from router.pool import Pool
from tests.virtual_time import now_s, run_in_virtual_time

MODEL = Model("m", "", "", "f", "a", 100, 64, frozenset(), "cpu", 4, 40, "float32", "", "", "cpu", 8, 16, 2)
LOAD_S = 20.0


class Executor:
    """One executor of the pool, as the router sees it, and what is true of it."""

    def __init__(self, name: str, world: "World") -> None:
        self.name = name
        self.world = world
        self.model = MODEL
        self.answers = True
        self.is_alive = True
        self.is_draining = False

    async def describe(self) -> Standing:
        await asyncio.sleep(0.001)
        if not self.answers:
            raise OctavoError(Code.UNAVAILABLE, "UNAVAILABLE", "connection refused")
        return Standing(self.name, self.model, self.is_draining)

    async def open_session(self, executor_id: str, router_id: str, router_epoch: int) -> Any:
        assert executor_id == self.name
        await asyncio.sleep(0.002)
        if self.is_draining or not self.answers:
            raise OctavoError(Code.UNAVAILABLE, "DRAINING", "no new sessions")
        writer = self.world.writer
        if writer not in (None, self) and writer.is_alive:
            text = f"{writer.name} is not known dead"
            raise OctavoError(Code.UNAVAILABLE, "PREDECESSOR_ALIVE", text, retry_after_s=0.05)
        self.world.writer = self
        return self

    async def close(self) -> None: ...

    async def die(self, *, known_after_s: float = 0.0, back_after_s: float = LOAD_S) -> None:
        """Silent at once, known dead after some time, and there again, idle, after more."""
        self.answers = False
        await asyncio.sleep(known_after_s)
        self.is_alive = False
        await asyncio.sleep(back_after_s)
        self.is_alive = self.answers = True
        if self.world.writer is self:
            self.world.writer = None  # its epoch is over


class World:
    """A pool, who may write now, and the link's loop around it."""

    def __init__(self, *names: str) -> None:
        self.executors = {name: Executor(name, self) for name in names}
        self.pool = Pool("engine", [(name, executor) for name, executor in self.executors.items()])
        self.writer: Executor | None = None
        self.took: list[tuple[str, float]] = []  # who serves, and how long nobody did

    def __getitem__(self, name: str) -> Executor:
        return self.executors[name]

    @property
    def order(self) -> list[str]:
        return [name for name, _ in self.took]

    async def serve(self) -> None:
        """As `Link`: a session, until it is lost or handed over; then the next."""
        await self.pool.describe()
        lost_s = now_s()
        while True:
            serving = await self._open()
            self.took.append((serving.name, now_s() - lost_s))
            while serving.answers and not await self._is_handed_over(serving):  # noqa: ASYNC110 (virtual time)
                await asyncio.sleep(0.01)
            lost_s = now_s()

    async def _open(self) -> Executor:
        backoff = Backoff(0.1, 2.0)
        while True:
            pause_s = None
            try:
                return await self.pool.open_session(MODEL, "r", 1)  # type: ignore[return-value]
            except OctavoError as error:
                if error.code is not Code.UNAVAILABLE:
                    raise
                if error.reason == "PREDECESSOR_ALIVE":
                    pause_s = error.retry_after_s
            await asyncio.sleep(pause_s or backoff.next_s())

    async def _is_handed_over(self, serving: Executor) -> bool:
        if not (await self.pool.is_draining() and await self.pool.choose_successor()):
            return False
        await asyncio.sleep(0.02)  # the steps on their way
        if self.writer is serving and serving.answers:
            self.writer = None  # it says that its session is over
        return True


def run(world: World, plan: Callable[[World], Coroutine[Any, Any, Any]]) -> None:
    async def main() -> None:
        watching = asyncio.create_task(world.pool.watch())
        serving = asyncio.create_task(world.serve())
        await asyncio.sleep(5)
        await plan(world)
        await asyncio.sleep(3)
        assert not serving.done(), serving.exception()
        for task in (serving, watching):
            task.cancel()

    run_in_virtual_time(main())


def test_a_ready_spare_takes_over_at_once_and_the_dead_one_is_the_next_spare():
    async def plan(world: World) -> None:
        assert world.pool.num_ready_spares == 1
        await world["a"].die()
        await asyncio.sleep(2)
        assert world.pool.num_ready_spares == 1
        await world["b"].die()

    world = World("a", "b")
    run(world, plan)
    assert world.order == ["a", "b", "a"]
    assert all(waited_s < 0.05 for _, waited_s in world.took)


@pytest.mark.parametrize("known_after_s", [0.004, 0.3, 7.0])
def test_it_waits_for_the_death_and_not_much_longer(known_after_s):
    """A predecessor that nobody hears of any more may be alive, and a big one takes its time to die."""

    async def plan(world: World) -> None:
        await world["a"].die(known_after_s=known_after_s)

    world = World("a", "b")
    run(world, plan)
    assert world.order == ["a", "b"]
    assert known_after_s - 1e-6 < world.took[1][1] < known_after_s + 0.1


def test_a_spare_that_is_slower_than_the_restart_is_not_waited_for():
    async def plan(world: World) -> None:
        world["b"].answers = False  # it loads
        await world["a"].die(back_after_s=1.0)
        world["b"].answers = True

    world = World("a", "b")
    run(world, plan)
    assert world.order == ["a", "a"]
    assert 1.0 <= world.took[1][1] < 3.0


def test_the_spare_dies_too():
    """Whoever is back first goes on."""

    async def plan(world: World) -> None:
        await asyncio.gather(world["a"].die(), world["b"].die(back_after_s=LOAD_S / 2))

    world = World("a", "b")
    run(world, plan)
    assert world.order == ["a", "b"]
    assert LOAD_S / 2 <= world.took[1][1] < LOAD_S / 2 + 2.1


def test_two_deaths_in_a_row_take_two_spares():
    async def plan(world: World) -> None:
        async def second() -> None:
            await asyncio.sleep(0.5)
            await world["b"].die()

        await asyncio.gather(world["a"].die(), second())

    world = World("a", "b", "c")
    run(world, plan)
    assert world.order == ["a", "b", "c"]
    assert all(waited_s < 0.05 for _, waited_s in world.took)


def test_a_death_while_the_spare_takes_over():
    """At each moment of the takeover, as finely as the two calls have parts."""
    for moment_ms in range(12):

        async def plan(world: World, moment_s: float = moment_ms / 1000) -> None:
            async def second() -> None:
                await asyncio.sleep(moment_s)
                await world["b"].die()

            await asyncio.gather(world["a"].die(back_after_s=2.0), second())

        world = World("a", "b")
        run(world, plan)
        assert world.order[0] == "a"
        assert world.writer is not None
        assert world.writer.answers


@pytest.mark.parametrize("which", ["a", "b"])
def test_an_executor_dies_while_another_one_is_to_end(which):
    for moment_ms in range(0, 400, 31):

        async def plan(world: World, moment_s: float = moment_ms / 1000) -> None:
            async def death() -> None:
                await asyncio.sleep(moment_s)
                await world[which].die(known_after_s=0.01, back_after_s=2.0)
                world[which].is_draining = False

            world["a"].is_draining = True
            await asyncio.gather(death(), asyncio.sleep(5))

        world = World("a", "b")
        run(world, plan)
        assert world.writer is not None
        assert world.writer.answers
        assert world.order[-1] == world.writer.name


def test_one_that_is_to_end_goes_on_while_no_other_is_ready():
    async def plan(world: World) -> None:
        world["b"].answers = False
        world["a"].is_draining = True
        await asyncio.sleep(30)
        assert world.order == ["a"]
        world["b"].is_draining = world["b"].answers = True  # all are to end: as when the machine is shut down
        await asyncio.sleep(30)
        assert world.order == ["a"]
        world["b"].is_draining = False

    world = World("a", "b")
    run(world, plan)
    assert world.order == ["a", "b"]
    assert world.took[1][1] < 0.05


def test_a_spare_that_serves_something_else_is_named_and_passed_over(caplog):
    caplog.set_level(logging.INFO, "router")

    async def plan(world: World) -> None:
        assert world.pool.num_ready_spares == 1
        await world["a"].die()

    world = World("a", "stranger", "small", "b")
    world["stranger"].model = replace(MODEL, fingerprint="other")
    world["small"].model = replace(MODEL, max_rows=4)
    run(world, plan)
    assert world.order == ["a", "b"]
    assert caplog.text.count("cannot take over") == 2


def test_what_served_last_decides_whether_the_model_is_another():
    """A spare may be wrong; the executor that comes back with another model ends what ran on it."""

    async def refused(changed: str) -> OctavoError:
        world = World("a", "b")
        await world.pool.describe()
        world[changed].model = replace(MODEL, num_blocks=41)
        other = world["b" if changed == "a" else "a"]
        other.answers = False
        with pytest.raises(OctavoError) as caught:
            await world.pool.open_session(MODEL, "r", 1)
        return caught.value

    assert run_in_virtual_time(refused("a")).reason == "MODEL_CHANGED"
    assert run_in_virtual_time(refused("b")).code is Code.UNAVAILABLE


def test_a_life_begins_at_whoever_is_there():
    """After a roll-out, the first address may be empty."""

    async def served(up: dict[str, bool]) -> str:
        world = World(*up)
        for name, is_up in up.items():
            world[name].answers = is_up
        await world.pool.describe()
        return world.pool.serving

    for up in itertools.product([True, False], repeat=2):
        plan = dict(zip("ab", up, strict=True))
        if any(up):
            assert run_in_virtual_time(served(plan)) == ("a" if up[0] else "b")
        else:
            with pytest.raises(OctavoError):
                run_in_virtual_time(served(plan))
