"""A trace of the last steps in the format that Chrome and Perfetto open: who did what while the executor computed.

A process for each engine, and in it a lane for each part of a step. Plan, send and deliver follow each other in the
router's one loop; execute overlaps them where two steps are in flight. Bounded: only the last steps are kept. Not here:
what is counted (metrics).
"""

import json
import os
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from router.observer import StepTimes

LANES = ("plan", "send", "execute", "deliver")


class StepTrace:
    """Keeps the times of steps, and writes them as Chrome trace events.

    Args:
        path: of the file.
        max_steps: how many are kept, the newest.
        unix_offset_s: wall clock minus the engine's clock, in seconds.
    """

    def __init__(self, path: Path, max_steps: int, unix_offset_s: float) -> None:
        self._path = path
        self._steps: deque[tuple[str, StepTimes]] = deque(maxlen=max_steps)
        self._unix_offset_s = unix_offset_s

    def add(self, engine: str, times: StepTimes) -> None:
        """A step of an engine was delivered."""
        self._steps.append((engine, times))

    def write(self) -> None:
        """Replace the file by the steps that are kept. Raises OSError."""
        beside = self._path.with_name(f"{self._path.name}.{os.getpid()}")
        beside.write_text(json.dumps({"traceEvents": self.events(), "displayTimeUnit": "ms"}))
        beside.replace(self._path)

    def events(self) -> list[dict[str, Any]]:
        """Names, then a complete event ("X") for each part of each step, in microseconds since 1970."""
        processes = {name: number for number, name in enumerate(sorted({name for name, _ in self._steps}), 1)}
        events = [
            event for name, process in processes.items() for event in (_process_name(process, name), *_lanes(process))
        ]
        return events + [event for name, step in self._steps for event in self._events_of(processes[name], step)]

    def _events_of(self, process: int, step: StepTimes) -> Iterator[dict[str, Any]]:
        executed = self._execution(step)
        spans = (
            (step.plan_began, step.send_began),
            (step.send_began, step.sent),
            (executed, executed + step.execute_s),
            (step.deliver_began, step.delivered),
        )
        arguments = {
            "session": step.session_id,
            "step": step.step_id,
            "rows": step.num_rows,
            "tokens": step.num_tokens,
        }
        for lane, (name, (began, ended)) in enumerate(zip(LANES, spans, strict=True), 1):
            yield {
                "ph": "X",
                "name": f"{name} {step.step_id}",
                "cat": name,
                "pid": process,
                "tid": lane,
                "ts": (began + self._unix_offset_s) * 1e6,
                "dur": (ended - began) * 1e6,
                "args": arguments,
            }

    def _execution(self, step: StepTimes) -> float:
        """When the executor began, in the engine's clock. Clocks of two machines may differ by more than a step takes:
        then it is taken to have ended when its result arrived."""
        began = step.execute_began_unix_s - self._unix_offset_s
        if step.send_began <= began <= step.received - step.execute_s:
            return began
        return step.received - step.execute_s


def _process_name(process: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": "process_name", "pid": process, "args": {"name": name}}


def _lanes(process: int) -> list[dict[str, Any]]:
    return [
        {"ph": "M", "name": "thread_name", "pid": process, "tid": lane, "args": {"name": name}}
        for lane, name in enumerate(LANES, 1)
    ]
