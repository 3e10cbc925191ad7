"""Roll-outs in virtual time: children, router and supervisor are the test's; what is done with them is not."""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import pytest

from octavo.child import ChildSpec
from octavo.rollout import Rollout
from octavo.rpc import IDLE
from octavo.supervisor import ChildFailedError
from tests.virtual_time import run_in_virtual_time

LOAD_S = 20.0


@dataclass(eq=False)
class Executor:
    """A child: a place in a pool, and the process that is there now."""

    spec: ChildSpec
    pid: int | None = None
    is_ready: bool = False
    is_leaving: bool = False
    has_session: bool = False
    signals: list[str] = field(default_factory=list)

    def signal(self, number: Any) -> None:
        assert self.is_ready, "a process that loads would die of it"
        self.signals.append(number.name)
        self.is_leaving = number.name == "SIGUSR1"


class Stack:
    """A supervisor of one pool, and the one router that serves from it."""

    def __init__(self, num_spares: int, *, knows_others: bool = True) -> None:
        specs = [
            ChildSpec(f"executor-{place}", (), f"at-{place}", "service", pool="pool", is_reserve=place > num_spares)
            for place in range(1 + max(1, num_spares))
        ]
        self.executors = [Executor(spec) for spec in specs]
        self.kept: set[Executor] = set()
        self.is_ready = True
        self.fails: Callable[[], bool] = lambda: False
        self.knows_others = knows_others
        self.num_moves = 0
        self.num_deaths = 0
        self.events: list[str] = []
        self._num_pids = 0
        for executor in self.executors:
            if not executor.spec.is_reserve:
                self._become_ready(executor)
                self.kept.add(executor)
        self.executors[0].has_session = True
        self.pids = {executor.pid for executor in self.kept}

    # ------------------------------------------------------------------------------------------------- the supervisor

    def pools(self) -> list[list[Executor]]:
        return [self.executors]

    def keeps(self, executor: Executor) -> bool:
        return executor in self.kept

    def run_beside(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task:
        return asyncio.create_task(work)

    async def launch(self, executor: Executor) -> None:
        assert executor.pid is None
        await asyncio.sleep(LOAD_S)
        if self.fails():
            raise ChildFailedError(f"{executor.spec.name} ended with exit code 2 before it was ready")
        self._become_ready(executor)
        self.kept.add(executor)
        self.events.append(f"{executor.spec.name} launched")

    async def retire(self, executor: Executor) -> None:
        assert not executor.has_session, "its requests would be cut"
        self.kept.remove(executor)
        executor.pid, executor.is_ready = None, False
        self.events.append(f"{executor.spec.name} retired")

    def _become_ready(self, executor: Executor) -> None:
        self._num_pids += 1
        executor.pid, executor.is_ready, executor.is_leaving = self._num_pids, True, False

    async def die(self, executor: Executor) -> None:
        """It dies, and is started again."""
        self.num_deaths += 1
        executor.pid, executor.is_ready = None, False
        await asyncio.sleep(LOAD_S)
        self._become_ready(executor)

    async def probe(self, address: str, service: str) -> bool:
        [executor] = [each for each in self.executors if each.spec.address == address]
        return executor.is_ready and (service != IDLE or not executor.has_session)

    # ----------------------------------------------------------------------------------------------------- the router

    async def route(self) -> None:
        """Goes on elsewhere when its executor wants to end, or is dead."""
        while True:
            await asyncio.sleep(0.25)
            [serving] = [executor for executor in self.executors if executor.has_session]
            if serving.is_ready and not serving.is_leaving:
                continue
            others = [each for each in self.executors if each.is_ready and not each.is_leaving and each is not serving]
            if others and self.knows_others:
                serving.has_session, others[0].has_session = False, True
                self.num_moves += 1

    @property
    def serving(self) -> str:
        [serving] = [executor for executor in self.executors if executor.has_session]
        return serving.spec.name

    def roll_out(self, meanwhile: Callable[["Stack"], Coroutine[Any, Any, Any]] | None = None) -> str | None:
        """To its end; returns why it failed. `meanwhile` runs beside it."""

        async def run() -> str | None:
            router = asyncio.create_task(self.route())
            beside = asyncio.create_task(meanwhile(self)) if meanwhile else None
            failure = await Rollout(self, self.probe).run(self.events.append)  # type: ignore[arg-type]
            if beside is not None:
                await beside
            router.cancel()
            return failure

        return run_in_virtual_time(run())

    def check(self, num_executors: int) -> None:
        """All that run are new, as many as before, and one of them serves."""
        assert len(self.kept) == num_executors
        assert not {executor.pid for executor in self.kept} & self.pids
        assert self.serving in {executor.spec.name for executor in self.kept}


def test_without_a_spare_another_executor_is_started_first():
    stack = Stack(0)
    assert stack.roll_out() is None
    stack.check(1)
    assert stack.events == [
        "roll-out: starting executor-1",
        "executor-1 launched",
        "executor-0 retired",
        "roll-out: executor-0 has ended, executor-1 runs",
    ]
    assert (stack.serving, stack.num_moves) == ("executor-1", 1)
    stack.pids = {executor.pid for executor in stack.kept}
    assert stack.roll_out() is None
    stack.check(1)
    assert stack.serving == "executor-0"


@pytest.mark.parametrize("num_spares", [1, 2])
def test_spares_are_replaced_first_and_requests_move_once(num_spares):
    """Never more executors than before, so that they find memory."""
    stack = Stack(num_spares)
    assert stack.roll_out() is None
    stack.check(1 + num_spares)
    assert stack.num_moves == 1
    assert [event for event in stack.events if "retired" in event][-1] == "executor-0 retired"


@pytest.mark.parametrize("num_spares", [0, 1])
def test_the_old_one_goes_on_when_the_new_one_does_not_come_up(num_spares):
    stack = Stack(num_spares)
    stack.fails = lambda: True
    failure = stack.roll_out()
    assert "the new executor did not come up; executor-0 runs" in failure
    assert "exit code 2" in failure
    assert (stack.serving, stack.num_moves, len(stack.kept)) == ("executor-0", 0, 1)
    assert not stack.executors[0].signals
    stack.fails = lambda: False  # mended: the next one has all executors again
    assert stack.roll_out() is None
    stack.check(1 + num_spares)


def test_the_old_one_goes_on_when_its_router_cannot_follow():
    stack = Stack(0, knows_others=False)
    failure = stack.roll_out()
    assert "executor-0 still has sessions after 30 s" in failure
    assert (stack.serving, {executor.spec.name for executor in stack.kept}) == ("executor-0", {"executor-0"})
    assert stack.executors[0].signals == ["SIGUSR1", "SIGUSR2"]
    assert not stack.executors[0].is_leaving


@pytest.mark.parametrize("at_s", [0.1, 10.0, LOAD_S + 0.05, LOAD_S + 0.3, 2 * LOAD_S + 0.1])
@pytest.mark.parametrize("num_spares", [0, 1])
@pytest.mark.parametrize("place", [0, 1])
def test_an_executor_that_dies_during_a_roll_out_is_no_reason_to_stop(num_spares, place, at_s):
    """Whoever it is and whenever: nothing is cut, and all that run in the end are new."""

    async def kill(stack: Stack) -> None:
        await asyncio.sleep(at_s)
        if stack.executors[place] in stack.kept:
            await stack.die(stack.executors[place])

    stack = Stack(num_spares)
    assert stack.roll_out(kill) is None
    stack.check(1 + num_spares)


def test_one_at_a_time_and_only_when_all_are_ready():
    stack = Stack(0)

    async def run() -> list[str | None]:
        router = asyncio.create_task(stack.route())
        rollout = Rollout(stack, stack.probe)  # type: ignore[arg-type]
        failures = await asyncio.gather(*(rollout.run(stack.events.append) for _ in range(2)))
        stack.is_ready = False
        failures.append(await rollout.run(stack.events.append))
        router.cancel()
        return failures

    first, second, third = run_in_virtual_time(run())
    assert first is None
    assert "another roll-out is going on" in second
    assert "not all processes are ready" in third
    stack.check(1)
