"""Two steps in flight: the router works while the executor computes, and nothing is computed that nobody gets."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from octavo.v1 import inference_pb2
from router.config import RouterConfig
from router.trace import LANES
from tests.fakes import EOS, saying
from tests.stacks import running_stack

STEP_S = 0.01
depths = pytest.mark.parametrize("max_steps_in_flight", [1, 2])


async def compute(_: Any) -> None:
    await asyncio.sleep(STEP_S)


def spans_of(path: Path) -> dict[str, dict[int, tuple[float, float]]]:
    """Part -> step -> (begin, end) in microseconds."""
    spans: dict[str, dict[int, tuple[float, float]]] = {}
    for event in json.loads(path.read_text())["traceEvents"]:
        if event["ph"] == "X":
            part = spans.setdefault(event["cat"], {})
            part[event["args"]["step"]] = (event["ts"], event["ts"] + event["dur"])
    return spans


def inside(inner: tuple[float, float], outer: tuple[float, float]) -> bool:
    return outer[0] <= inner[0] and inner[1] <= outer[1]


async def traced(source: str, path: Path, depth: int, **config: Any) -> dict[str, dict[int, tuple[float, float]]]:
    options = {"max_steps_in_flight": depth, "trace_file": str(path), **config}
    async with running_stack(source, config=options) as stack:
        stack.executor.hooks.before_step = compute
        jobs = [stack.generate(letter * 5, stopping={"max_tokens": 20, "ignore_eos": True}) for letter in "abcd"]
        await asyncio.gather(*jobs)
    return spans_of(path)


def test_two_is_the_default() -> None:
    assert RouterConfig().max_steps_in_flight == 2


async def test_the_trace_shows_the_router_at_work_while_the_executor_computes(source: str, tmp_path: Path) -> None:
    """Delivering step N, planning and sending N+2 lie inside the execution of N+1."""
    spans = await traced(source, tmp_path / "trace.json", 2)
    steps = sorted(spans["execute"])[3:-3]  # full pipeline
    assert len(steps) >= 10
    hidden = [
        inside(spans["deliver"][step], spans["execute"][step + 1])
        and inside(spans["plan"][step + 2], spans["execute"][step + 1])
        and inside(spans["send"][step + 2], spans["execute"][step + 1])
        for step in steps
    ]
    assert sum(hidden) >= 0.8 * len(steps), spans


async def test_with_one_step_in_flight_nothing_overlaps(source: str, tmp_path: Path) -> None:
    """What the trace of two in flight shows is no artefact of the trace."""
    spans = await traced(source, tmp_path / "trace.json", 1)
    for step, span in spans["execute"].items():
        for part in ("plan", "send", "deliver"):
            for other, work in spans[part].items():
                assert not inside(work, span), f"{part} {other} inside execute {step}"


async def test_the_trace_keeps_the_newest_steps_only(source: str, tmp_path: Path) -> None:
    spans = await traced(source, tmp_path / "trace.json", 2, trace_steps=5)
    assert {part: len(steps) for part, steps in spans.items()} == dict.fromkeys(LANES, 5)
    assert min(spans["plan"]) > 10


@depths
async def test_no_row_is_planned_past_its_last_token(source: str, max_steps_in_flight: int) -> None:
    """A known end costs no step: every row computes exactly prompt + max_tokens - 1 tokens."""
    async with running_stack(source, config={"max_steps_in_flight": max_steps_in_flight}) as stack:
        stack.executor.hooks.before_step = compute
        lengths = {"a": 1, "b": 2, "c": 7, "d": 12}
        jobs = [
            stack.generate(letter * 5, stopping={"max_tokens": number, "ignore_eos": True})
            for letter, number in lengths.items()
        ]
        await asyncio.gather(*jobs)
        await stack.settle()
        computed = sum(sum(step.num_tokens) for step in stack.executor.steps)
        assert computed == sum(5 + number - 1 for number in lengths.values())


@depths
async def test_a_row_that_ended_unforeseen_is_discarded(source: str, max_steps_in_flight: int) -> None:
    """At depth two an end of sequence is seen a step late: that step's token is not delivered, counted, committed."""
    async with running_stack(
        source, saying("yes", then=EOS), config={"max_steps_in_flight": max_steps_in_flight}
    ) as stack:
        stack.executor.hooks.before_step = compute
        response = await stack.generate("really?", stopping={"max_tokens": 50})
        assert response.choices[0].text == "yes"
        assert response.choices[0].finish_reason == inference_pb2.FINISH_REASON_EOS
        assert response.usage.generated_tokens == 4
        assert stack.metric("octavo_generation_tokens_total") == 4
        stats = await stack.settle()
        computed = sum(sum(step.num_tokens) for step in stack.executor.steps)
        assert computed - (7 + 3) == max_steps_in_flight - 1
        assert stats.cached_blocks == (7 + 3) // 4, "the discarded token makes no block findable"
