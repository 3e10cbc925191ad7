"""Starts processes together, restarts what may be restarted, and stops everything stage by stage, last stage first.

It knows nothing of models, blocks or gRPC: whether a child is ready is asked through a function.
"""

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar

from octavo.child import Child, RestartPolicy, describe_status

T = TypeVar("T")
HealthProbe = Callable[[str, str], Awaitable[bool]]  # (address, service) -> is it serving

_PROBE_INTERVAL_S = 0.1
_PROGRESS_INTERVAL_S = 5.0
_ANSWER_INTERVAL_S = 1.0
_MOST_SILENCE_A_TRY_S = 6.0  # of one try to get an answer


class ChildFailedError(Exception):
    """A child ended that may not end, or too often, or was not ready in time; the message is for people."""


class RestartHistory:
    """When a child was restarted, and how long to wait before the next time. Pure: the time is an argument."""

    def __init__(self, policy: RestartPolicy) -> None:
        self._policy = policy
        self._times_s: deque[float] = deque()

    def next_delay_s(self, now_s: float) -> float | None:
        """Records a restart at `now_s`; the seconds to wait before it, or None when there were too many."""
        while self._times_s and now_s - self._times_s[0] > self._policy.window_s:
            self._times_s.popleft()
        if len(self._times_s) >= self._policy.max_restarts:
            return None
        delay_s = self._policy.first_delay_s * 2.0 ** len(self._times_s)
        self._times_s.append(now_s)
        return min(delay_s, self._policy.max_delay_s)


class Supervisor:
    """Runs the children until told to stop or until one fails for good.

    Args:
        stages: who needs whom: a stage may need those before it, and so stops before them. All start together, since
            each waits by itself for what it needs, and loads what it can meanwhile.
        is_serving: asked until it says yes.
        say: for the supervisor's own lines.
        answers: whether a child answers at all. One that is slow does; one that is stopped, or hangs, does not.
    """

    def __init__(
        self,
        stages: Sequence[Sequence[Child]],
        is_serving: HealthProbe,
        say: Callable[[str], None],
        answers: HealthProbe,
    ) -> None:
        self._stages = stages
        self._is_serving = is_serving
        self._answers = answers
        self._say = say
        self._stop_requested = asyncio.Event()
        self._ending: list[asyncio.Future[None]] = []
        self._starting_since_s: dict[str, float] = {}  # by name: who is not ready yet
        self._keepers: dict[Child, asyncio.Task[None]] = {}  # of each child that is to run
        self._group: asyncio.TaskGroup | None = None  # of all keepers, once all are ready

    def request_stop(self) -> None:
        """The first time: stop in order. Again: end everything at once. Called in the event loop."""
        if not self._stop_requested.is_set():
            self._say("stopping; once more to end at once")
            self._stop_requested.set()
        elif not self._ending:
            self._say("ending every process at once")
            self._ending = [asyncio.ensure_future(child.end_at_once()) for stage in self._stages for child in stage]

    async def run(self, on_ready: Callable[[], Awaitable[None]]) -> int:
        """Start everything, call `on_ready`, keep it running, stop it.

        Args:
            on_ready: awaited once when all are ready; when it returns, serving goes on.

        Returns:
            The exit code: 0 after a stop that was asked for, 1 after a failure.

        Raises:
            Whatever `on_ready` raises, after everything was stopped.
        """
        work = asyncio.create_task(self._work(on_ready))
        stop = asyncio.create_task(self._stop_requested.wait())
        try:
            await asyncio.wait({work, stop}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
            return 0
        except ChildFailedError as failure:
            self._say(str(failure))
        finally:
            await _cancel(work, stop)
            await self._stop_all()
        return 1

    async def _work(self, on_ready: Callable[[], Awaitable[None]]) -> None:
        try:
            await self._start_and_keep(on_ready)
        except BaseExceptionGroup as group:
            raise _first_leaf(group) from None  # what else failed, failed because of it

    async def _start_and_keep(self, on_ready: Callable[[], Awaitable[None]]) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._tell_progress())
            children = [child for stage in self._stages for child in stage if not child.spec.is_reserve]
            ready = [asyncio.Event() for _ in children]
            for child, is_ready in zip(children, ready, strict=True):
                self._keepers[child] = group.create_task(self._run_child(child, is_ready))
            for is_ready in ready:
                await is_ready.wait()
            self._group = group
            await on_ready()

    @property
    def is_ready(self) -> bool:
        """Whether all were ready once, and none is about to end."""
        return self._group is not None and not self._stop_requested.is_set()

    def pools(self) -> list[list[Child]]:
        """Children that can take each other's place, those that do not run among them."""
        pools: dict[str, list[Child]] = {}
        for child in (child for stage in self._stages for child in stage if child.spec.pool):
            pools.setdefault(child.spec.pool, []).append(child)
        return list(pools.values())

    def keeps(self, child: Child) -> bool:
        """Whether a child is to run: it is started again when it dies."""
        return child in self._keepers

    def run_beside(self, work: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
        """Run something that ends with all children at the latest, and whose errors end them. Once all were ready."""
        assert self._group is not None
        return self._group.create_task(work)

    async def launch(self, child: Child) -> None:
        """Start one more child, and keep it running from the moment when it is ready. Only when all others were.

        Raises:
            ChildFailedError: it did not become ready, and does not run.
        """
        assert self._group is not None
        try:
            await self._start(child)
        except ChildFailedError:
            await child.stop()
            raise
        self._keepers[child] = self._group.create_task(self._keep_running(child))

    async def retire(self, child: Child) -> None:
        """Stop a child in order, for good."""
        await _cancel(self._keepers.pop(child))
        await child.stop()

    async def _run_child(self, child: Child, is_ready: asyncio.Event) -> None:
        await self._start(child)
        is_ready.set()
        await self._keep_running(child)

    async def _start(self, child: Child) -> None:
        began_s = time.monotonic()
        self._say(f"starting {child.spec.name}")
        await child.start()
        end = asyncio.create_task(child.wait())
        self._starting_since_s[child.spec.name] = began_s
        try:
            await self._wait_until_ready(child, end, began_s)
        finally:
            del self._starting_since_s[child.spec.name]
            await _cancel(end)
        self._say(f"{child.spec.name} is ready after {time.monotonic() - began_s:.1f} s")

    async def _wait_until_ready(self, child: Child, end: asyncio.Task[int], began_s: float) -> None:
        while not await self._is_serving(child.spec.address, child.spec.health_service):
            await asyncio.wait({end}, timeout=_PROBE_INTERVAL_S)
            if end.done():
                raise ChildFailedError(_last_words(child, f"{describe_status(end.result())} before it was ready"))
            if time.monotonic() - began_s > child.spec.start_timeout_s:
                raise ChildFailedError(_last_words(child, f"was not ready after {child.spec.start_timeout_s:g} s"))

    async def _tell_progress(self) -> None:
        while True:
            await asyncio.sleep(_PROGRESS_INTERVAL_S)
            if self._starting_since_s:
                waited_s = time.monotonic() - min(self._starting_since_s.values())
                self._say(f"waiting for {' and '.join(self._starting_since_s)}, {waited_s:.0f} s so far")

    async def _keep_running(self, child: Child) -> None:
        history = RestartHistory(child.spec.restart) if child.spec.restart else None
        while True:
            silence = asyncio.create_task(self._kill_when_silent(child))
            try:
                status = await child.wait()  # ended and reaped: known dead
            finally:
                await _cancel(silence)
            delay_s = history.next_delay_s(time.monotonic()) if history else None
            if delay_s is None:
                often = " too often" if history else ""
                raise ChildFailedError(_last_words(child, f"{describe_status(status)}{often}"))
            self._say(f"{child.spec.name} {describe_status(status)}; starting it again in {delay_s:g} s")
            await asyncio.sleep(delay_s)
            try:
                await self._start(child)
            except ChildFailedError as failure:
                self._say(str(failure))
                child.kill()

    async def _kill_when_silent(self, child: Child) -> None:
        """Time counts as far as this process itself was there to ask: for a sleep of the machine nobody is to blame."""
        silent_s = 0.0
        while child.spec.silence_limit_s:
            began_s = time.monotonic()
            await asyncio.sleep(_ANSWER_INTERVAL_S)
            if await self._answers(child.spec.address, child.spec.health_service):
                silent_s = 0.0
                continue
            silent_s += min(time.monotonic() - began_s, _MOST_SILENCE_A_TRY_S)
            if silent_s >= child.spec.silence_limit_s:
                self._say(f"{child.spec.name} has not answered for {silent_s:.0f} s: killing it")
                child.kill()
                return

    async def _stop_all(self) -> None:
        for stage in reversed(self._stages):
            await asyncio.gather(*(child.stop() for child in stage))


def _last_words(child: Child, what: str) -> str:
    lines = "".join(f"\n    {line}" for line in child.tail)
    return f"{child.spec.name} {what}" + (f"; its last lines:{lines}" if lines else "; it wrote nothing")


def _first_leaf(error: BaseException) -> BaseException:
    return _first_leaf(error.exceptions[0]) if isinstance(error, BaseExceptionGroup) else error


async def _cancel(*tasks: asyncio.Task) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
