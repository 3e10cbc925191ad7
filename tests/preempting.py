"""Preemption at chosen points, as a shortage of blocks would have it: by the engine's own means."""

from typing import Any

from router.engine import Engine
from router.ids import StepId
from router.live import Choice, Phase


def preempt_at(engine: Engine, points: list[int]) -> list[int]:
    """Every choice gives up its blocks each time it has as many tokens. Returns where it happened."""
    done: list[int] = []
    original = engine._results._deliver_token

    def deliver(choice: Choice, *arguments: Any) -> Any:
        ending = original(choice, *arguments)
        if ending is None and choice.num_generated in points and choice.phase is Phase.RUNNING:
            wanted.append(choice)
        return ending

    wanted: list[Choice] = []
    turn = engine._capacity.preempt

    def preempt(steps: Any, now: float) -> None:
        turn(steps, now)
        for choice in wanted:
            if choice.phase is Phase.RUNNING:
                done.append(choice.num_generated)
                if choice.num_steps_in_flight:
                    engine._capacity._hold_extensions_until = StepId(steps.last_sent)
                engine._capacity._give_back(choice, steps)
                engine.roster.preempt(choice)
        wanted.clear()

    engine._results._deliver_token = deliver  # type: ignore[method-assign]
    engine._capacity.preempt = preempt  # type: ignore[method-assign]
    return done
