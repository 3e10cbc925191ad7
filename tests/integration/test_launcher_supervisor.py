"""The supervisor over real processes that are tiny scripts: order, deaths, restarts, last words."""

import asyncio
import os
import signal
import time
from pathlib import Path

import pytest

from octavo.child import Child
from octavo.supervisor import Supervisor
from tests.integration.launcher_fakes import QUICK_RESTART, child_spec, events_of, file_exists, pids_of


class Stack:
    """A supervisor over specs, and what it said."""

    def __init__(self, *stages) -> None:
        self.lines: list[str] = []
        environment = dict(os.environ)
        children = [[Child(spec, environment, self.lines.append) for spec in stage] for stage in stages]
        self.supervisor = Supervisor(children, file_exists, self.lines.append, is_not_stopped)

    async def run(self, when_ready=None) -> int:
        async def on_ready() -> None:
            if when_ready is not None:
                await when_ready()

        async with asyncio.timeout(20):
            return await self.supervisor.run(on_ready)

    async def stop_when_ready(self) -> None:
        self.supervisor.request_stop()

    @property
    def said(self) -> str:
        return "\n".join(self.lines)


async def is_not_stopped(address: str, service: str) -> bool:
    """The second probe: a slow child answers, a stopped one does not."""
    name, folder = Path(address).stem, Path(address).parent
    stat = Path(f"/proc/{pids_of(folder)[name]}/stat").read_text()  # noqa: ASYNC240 (memory, not a disk)
    state = stat.rpartition(")")[2].split()[0]
    return state not in "Tt"


UNUSED_PID = 2**22 + 1  # above the largest that Linux gives


async def _a_moment() -> None:
    await asyncio.sleep(0.02)


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def test_starts_together_and_stops_in_reverse(tmp_path):
    stack = Stack(
        [child_spec(tmp_path, "cache")],
        [child_spec(tmp_path, "a"), child_spec(tmp_path, "b")],
        [child_spec(tmp_path, "r")],
    )
    assert await stack.run(stack.stop_when_ready) == 0
    events = events_of(tmp_path)
    names = ("cache", "a", "b", "r")
    assert set(events[:8]) == {f"{name} {event}" for name in names for event in ("start", "ready")}
    assert events[8] == "r term"
    assert set(events[9:11]) == {"a term", "b term"}
    assert events[11:] == ["cache term"]
    assert "first words of cache" in stack.said


async def test_child_that_waits_for_a_later_one_is_started_with_it(tmp_path):
    """A child is not held back until those before it are ready: it loads meanwhile."""
    stack = Stack([child_spec(tmp_path, "loading", "never")], [child_spec(tmp_path, "r")])

    async def stop_when_r_is_ready() -> None:
        while not {"loading start", "r ready"} <= set(events_of(tmp_path)):
            await _a_moment()
        stack.supervisor.request_stop()

    stopping = asyncio.create_task(stop_when_r_is_ready())
    assert await stack.run() == 0
    await stopping
    assert events_of(tmp_path)[-2:] == ["r term", "loading term"]


async def test_child_that_dies_at_start_ends_everything_with_its_last_words(tmp_path):
    stack = Stack([child_spec(tmp_path, "cache")], [child_spec(tmp_path, "executor", "refuse")])
    assert await stack.run() == 1
    assert "executor ended with exit code 3 before it was ready; its last lines:" in stack.said
    assert "    no such model" in stack.said
    assert not is_running(pids_of(tmp_path).get("cache", 0) or UNUSED_PID)


async def test_child_that_dies_while_another_loads_is_started_again(tmp_path):
    stack = Stack([child_spec(tmp_path, "cache", restart=QUICK_RESTART)], [child_spec(tmp_path, "loading", "never")])

    async def kill_one_and_wait() -> None:
        while "cache is ready" not in stack.said:
            await _a_moment()
        killed = pids_of(tmp_path, "ready")["cache"]
        os.kill(killed, 9)
        while pids_of(tmp_path, "ready")["cache"] == killed:
            await _a_moment()
        stack.supervisor.request_stop()

    killing = asyncio.create_task(kill_one_and_wait())
    assert await stack.run() == 0
    await killing
    assert "cache was killed by SIGKILL; starting it again" in stack.said


async def test_child_that_is_never_ready_is_given_up(tmp_path):
    stack = Stack([child_spec(tmp_path, "slow", "never", start_timeout_s=2.5)])
    assert await stack.run() == 1
    assert "slow was not ready after 2.5 s" in stack.said
    assert not is_running(pids_of(tmp_path)["slow"])


async def test_killed_executor_is_reaped_and_started_again(tmp_path):
    stack = Stack([child_spec(tmp_path, "cache")], [child_spec(tmp_path, "executor", restart=QUICK_RESTART)])
    killed: list[int] = []

    async def kill_one_and_wait() -> None:
        killed.append(pids_of(tmp_path, "ready")["executor"])
        os.kill(killed[0], 9)
        while pids_of(tmp_path, "ready")["executor"] == killed[0]:
            await _a_moment()
        assert not is_running(killed[0])  # not even a zombie: known dead before its successor started
        stack.supervisor.request_stop()

    assert await stack.run(kill_one_and_wait) == 0
    assert "executor was killed by SIGKILL; starting it again" in stack.said
    assert events_of(tmp_path).count("executor start") == 2


async def test_stopped_executor_is_killed_reaped_and_started_again(tmp_path, monkeypatch):
    """Stopped by a signal it is silent; only when it is dead, and not before, another takes its place."""
    monkeypatch.setattr("octavo.supervisor._ANSWER_INTERVAL_S", 0.02)
    spec = child_spec(tmp_path, "executor", restart=QUICK_RESTART, silence_limit_s=0.3)
    stack = Stack([child_spec(tmp_path, "cache", silence_limit_s=0.3)], [spec])

    async def stop_one_and_wait() -> None:
        stopped = pids_of(tmp_path, "ready")["executor"]
        os.kill(stopped, signal.SIGSTOP)
        while pids_of(tmp_path)["executor"] == stopped:
            await _a_moment()
        assert not is_running(stopped)
        stack.supervisor.request_stop()

    assert await stack.run(stop_one_and_wait) == 0
    assert "executor has not answered for " in stack.said
    assert "executor was killed by SIGKILL; starting it again" in stack.said
    assert events_of(tmp_path).count("cache start") == 1


async def test_child_that_keeps_dying_is_given_up(tmp_path):
    stack = Stack([child_spec(tmp_path, "cache")], [child_spec(tmp_path, "executor", "short", restart=QUICK_RESTART)])
    assert await stack.run() == 1
    assert "executor ended with exit code 4 too often" in stack.said
    assert events_of(tmp_path).count("executor start") == 1 + QUICK_RESTART.max_restarts
    assert events_of(tmp_path)[-1] == "cache term"


async def test_death_of_a_child_without_restarts_ends_everything(tmp_path):
    stack = Stack([child_spec(tmp_path, "cache")], [child_spec(tmp_path, "executor")])

    async def kill_cache() -> None:
        os.kill(pids_of(tmp_path)["cache"], 9)

    assert await stack.run(kill_cache) == 1
    assert "cache was killed by SIGKILL; its last lines:" in stack.said
    assert events_of(tmp_path)[-1] == "executor term"


async def test_child_that_ignores_the_signal_is_killed_after_its_grace(tmp_path):
    stack = Stack([child_spec(tmp_path, "stubborn", "stubborn", stop_grace_s=0.3)])
    began_s = time.monotonic()
    assert await stack.run(stack.stop_when_ready) == 0
    assert time.monotonic() - began_s < 10
    assert "did not end within 0.3 s of SIGTERM: killed" in stack.said
    assert not is_running(pids_of(tmp_path)["stubborn"])


async def test_second_request_kills_at_once(tmp_path):
    stack = Stack([child_spec(tmp_path, "stubborn", "stubborn", stop_grace_s=60)])

    async def stop_twice() -> None:
        stack.supervisor.request_stop()
        asyncio.get_running_loop().call_later(0.3, stack.supervisor.request_stop)

    assert await stack.run(stop_twice) == 0
    assert "ending every process at once" in stack.said


async def test_stop_while_starting(tmp_path):
    """Field failure 37: SIGTERM during model load."""
    stack = Stack([child_spec(tmp_path, "cache")], [child_spec(tmp_path, "loading", "never")])
    asyncio.get_running_loop().call_later(0.7, stack.supervisor.request_stop)
    assert await stack.run() == 0
    assert events_of(tmp_path)[-2:] == ["loading term", "cache term"]


async def test_error_of_the_caller_stops_everything_and_comes_out(tmp_path):
    stack = Stack([child_spec(tmp_path, "cache")])

    async def fail() -> None:
        raise LookupError("the first question failed")

    with pytest.raises(LookupError, match="first question"):
        await stack.run(fail)
    assert events_of(tmp_path)[-1] == "cache term"


async def test_grandchild_ends_with_its_parent_and_delays_nothing(tmp_path):
    stack = Stack([child_spec(tmp_path, "parent", "parent")])
    began_s = time.monotonic()
    assert await stack.run(stack.stop_when_ready) == 0
    assert time.monotonic() - began_s < 10
    grandchild = pids_of(tmp_path, "grandchild")["parent"]
    while is_running(grandchild) and time.monotonic() - began_s < 10:
        await _a_moment()  # init has to reap it
    assert not is_running(grandchild)
