"""Loads a server through the public API, and says what its clients saw and where its time went.

Times are those of this client, which runs on the same machine and is counted. Not here: what is asked (`loads`).
"""

import asyncio
import os
import time
from dataclasses import dataclass

from benchmarks.loads import Ask, Load
from benchmarks.servers import Server, cpu_seconds, step_parts
from octavo import AsyncClient
from octavo.results import Delta


@dataclass(frozen=True)
class StreamTimes:
    """One answer as its client saw it, in seconds."""

    first_token_s: float
    gaps_s: list[float]
    num_tokens: int


@dataclass(frozen=True)
class Figures:
    """What one load gave; field names become columns and keys of the JSON."""

    load: str
    streams: int
    requests: int
    wall_s: float
    output_tokens_per_s: float
    first_token_p50_ms: float
    first_token_p99_ms: float
    between_tokens_p50_ms: float
    between_tokens_p99_ms: float
    steps: int
    wall_ms_per_step: float
    part_ms_per_step: dict[str, float]  # plan and deliver in the router, execute in the executor
    cpu_ms_per_step: dict[str, float]  # process -> CPU milliseconds


async def stream_one(client: AsyncClient, ask: Ask, use_cache: bool) -> StreamTimes:
    """One answer, timed."""
    began = last = time.perf_counter()
    first, gaps, tokens = 0.0, [], 0
    options = {"temperature": 0, "max_tokens": ask.num_generated, "ignore_eos": True, "bypass_cache": not use_cache}
    async for event in client.stream(ask.prompt, **options):  # type: ignore[arg-type]
        if isinstance(event, Delta) and event.token_ids:
            now = time.perf_counter()
            if tokens:
                gaps.append(now - last)
            else:
                first = now - began
            last, tokens = now, tokens + len(event.token_ids)
    assert tokens == ask.num_generated, f"{tokens} tokens came of {ask.num_generated}"
    return StreamTimes(first, gaps, tokens)


async def run_load(address: str, load: Load) -> tuple[float, list[StreamTimes]]:
    """Wall seconds, and the times of all answers."""
    gate = asyncio.Semaphore(load.max_streams)
    async with AsyncClient(address, timeout_s=600) as client:
        began = time.perf_counter()

        async def one(ask: Ask) -> StreamTimes:
            await asyncio.sleep(ask.at_s - (time.perf_counter() - began))
            async with gate:
                return await stream_one(client, ask, load.use_cache)

        times = await asyncio.gather(*map(one, load.asks))
        return time.perf_counter() - began, list(times)


def percentile(values: list[float], share: float) -> float:
    """The value that `share` of all values do not exceed; 0 of none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def measure(server: Server, load: Load) -> Figures:
    """Run it once."""
    pids = {"client": os.getpid(), **server.pids}
    cpu_before, parts_before = {name: cpu_seconds(pid) for name, pid in pids.items()}, step_parts(server)
    wall_s, times = asyncio.run(run_load(server.address, load))
    parts = {name: after - parts_before.get(name, 0.0) for name, after in step_parts(server).items()}
    steps = max(1, round(parts.pop("steps")))
    firsts = [each.first_token_s * 1e3 for each in times]
    gaps = [gap * 1e3 for each in times for gap in each.gaps_s]
    cpu = {name: (cpu_seconds(pid) - cpu_before[name]) * 1e3 / steps for name, pid in pids.items()}
    return Figures(
        load=load.name,
        streams=load.max_streams,
        requests=len(times),
        wall_s=round(wall_s, 2),
        output_tokens_per_s=round(sum(each.num_tokens for each in times) / wall_s, 1),
        first_token_p50_ms=round(percentile(firsts, 0.5), 1),
        first_token_p99_ms=round(percentile(firsts, 0.99), 1),
        between_tokens_p50_ms=round(percentile(gaps, 0.5), 2),
        between_tokens_p99_ms=round(percentile(gaps, 0.99), 2),
        steps=steps,
        wall_ms_per_step=round(wall_s * 1e3 / steps, 2),
        part_ms_per_step={name: round(seconds * 1e3 / steps, 2) for name, seconds in parts.items()},
        cpu_ms_per_step={name: round(value, 2) for name, value in cpu.items()},
    )
