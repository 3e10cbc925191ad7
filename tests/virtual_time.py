"""An event loop whose clock goes on at once when nothing is left to do: minutes of waiting take no time, in order."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """For code that waits for its own timers alone: no sockets, no threads, no processes."""

    def __init__(self) -> None:
        super().__init__()
        self._now_s = 1000.0

    def time(self) -> float:
        return self._now_s

    def _run_once(self) -> None:
        moments = [timer.when() for timer in self._scheduled if not timer.cancelled()]  # type: ignore[attr-defined]
        if not self._ready and moments:  # type: ignore[attr-defined]
            self._now_s = max(self._now_s, min(moments))
        super()._run_once()  # type: ignore[misc]


def run_in_virtual_time(work: Coroutine[Any, Any, T]) -> T:
    """As `asyncio.run`."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(work)


def now_s() -> float:
    """Seconds of the loop's clock."""
    return asyncio.get_running_loop().time()
