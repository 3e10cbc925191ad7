"""Fences: blocks that nobody owns but that a step in flight may still write or read.

A fence stands around the blocks of one release until every session step it waits for is acknowledged, or that session
is over (closed, or its executor dead). Here belongs who waits for what. Not here: the states of blocks, leases, and
whether an executor lives.
"""

import heapq
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from cache_service.block import BlockId


class SessionKey(NamedTuple):
    """One router's ordered steps on one executor process."""

    executor_id: str
    executor_epoch: int
    session_id: int


class SessionStep(NamedTuple):
    session: SessionKey
    step_id: int


# No acknowledgement reaches it: a fence that waits for it falls with the session alone.
END_OF_SESSION: Final = 2**64


class Fence:
    """The blocks of one release, in the order they were released, and how many steps it still waits for."""

    __slots__ = ("blocks", "num_waiting")

    def __init__(self, blocks: Sequence[BlockId], num_waiting: int) -> None:
        self.blocks = tuple(blocks)
        self.num_waiting = num_waiting


class _Session:
    __slots__ = ("acknowledged", "waiting")

    def __init__(self) -> None:
        self.acknowledged = 0
        self.waiting: list[tuple[int, int, Fence]] = []  # heap of (step, order of arrival, fence)


class FenceBook:
    """All fences of one arena, by the session steps they wait for. O(log n) per fence raised or lifted."""

    def __init__(self) -> None:
        self._sessions: dict[SessionKey, _Session] = {}
        self._num_raised = 0

    def open_session(self, session: SessionKey) -> None:
        """From now on steps of this session can be waited for. Idempotent."""
        self._sessions.setdefault(session, _Session())

    def close_session(self, session: SessionKey) -> list[Fence]:
        """No step of this session runs any more. Returns the fences that fall by that. Idempotent."""
        ended = self._sessions.pop(session, None)
        return self._lift(fence for _, _, fence in sorted(ended.waiting)) if ended else []

    def acknowledge(self, session: SessionKey, step_id: int) -> list[Fence]:
        """Every step of this session up to `step_id` has ended. Returns the fences that fall by that.

        A step lower than the last changes nothing, as does a session that is not open.
        """
        known = self._sessions.get(session)
        if known is None or step_id <= known.acknowledged:
            return []
        known.acknowledged = step_id
        passed: list[Fence] = []
        while known.waiting and known.waiting[0][0] <= step_id:
            passed.append(heapq.heappop(known.waiting)[2])
        return self._lift(passed)

    def outstanding(self, steps: Iterable[SessionStep]) -> list[SessionStep]:
        """Those of `steps` that may still run: not acknowledged, in a session that is open."""
        found: list[SessionStep] = []
        for step in steps:
            known = self._sessions.get(step.session)
            if known is not None and step.step_id > known.acknowledged:
                found.append(step)
        return found

    def raise_fence(self, blocks: Sequence[BlockId], outstanding: Sequence[SessionStep]) -> Fence:
        """Fence `blocks` until all `outstanding` steps (at least one, all of them `outstanding()`) have ended."""
        fence = Fence(blocks, len(outstanding))
        for session, step_id in outstanding:
            self._num_raised += 1
            heapq.heappush(self._sessions[session].waiting, (step_id, self._num_raised, fence))
        return fence

    @staticmethod
    def _lift(passed: Iterable[Fence]) -> list[Fence]:
        lifted: list[Fence] = []
        for fence in passed:
            fence.num_waiting -= 1
            if not fence.num_waiting:
                lifted.append(fence)
        return lifted

    @property
    def num_sessions(self) -> int:
        return len(self._sessions)

    def standing(self) -> list[Fence]:
        """Every fence that stands. For the self-check and tests."""
        fences = {id(fence): fence for known in self._sessions.values() for _, _, fence in known.waiting}
        return list(fences.values())

    def violations(self) -> list[str]:
        """What is wrong with the book; empty when it is sound."""
        found: list[str] = []
        num_waiting: dict[int, int] = {}
        for session, known in self._sessions.items():
            for step_id, _, fence in known.waiting:
                num_waiting[id(fence)] = num_waiting.get(id(fence), 0) + 1
                if step_id <= known.acknowledged:
                    found.append(f"a fence waits for step {step_id} of {session}, which is acknowledged")
        for fence in self.standing():
            if fence.num_waiting != num_waiting[id(fence)]:
                found.append(f"a fence counts {fence.num_waiting} steps and waits for {num_waiting[id(fence)]}")
        return found
