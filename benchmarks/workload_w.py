"""Workload W through the public API: random prompts of 128 token ids, exactly 128 generated, greedy, C streams at once.

Starts the three processes as `octavo serve` does and loads them from this one. Prints a table and writes the same as
JSON. For each C: output tokens per second (prefill included), time to first token and between tokens, and where the CPU
time of a step goes, process by process, this client's included.

    python -m benchmarks.workload_w --model demo --streams 1 8 32 --json benchmarks/results/workload_w.json
"""

import argparse
import asyncio
import json
import os
import platform
import random
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.servers import Server, count_steps, cpu_seconds, serving
from octavo import AsyncClient
from octavo.results import Delta

PROMPT_TOKENS = 128
GENERATED_TOKENS = 128
TOKEN_IDS = range(1000, 40000)


@dataclass(frozen=True)
class StreamTimes:
    """One answer as its client saw it, in seconds."""

    first_token_s: float
    gaps_s: list[float]


@dataclass(frozen=True)
class Row:
    """A line of the table."""

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
    cpu_ms_per_step: dict[str, float]  # process -> CPU milliseconds


# --------------------------------------------------------------------------------------------------------------- load


async def stream_one(client: AsyncClient, prompt: list[int]) -> StreamTimes:
    """One answer, timed."""
    began = last = time.perf_counter()
    first, gaps, tokens = 0.0, [], 0
    stream = client.stream(prompt, temperature=0, max_tokens=GENERATED_TOKENS, ignore_eos=True, bypass_cache=True)
    async for event in stream:
        if isinstance(event, Delta) and event.token_ids:
            now = time.perf_counter()
            if tokens:
                gaps.append(now - last)
            else:
                first = now - began
            last, tokens = now, tokens + len(event.token_ids)
    assert tokens == GENERATED_TOKENS, f"{tokens} tokens came"
    return StreamTimes(first, gaps)


async def load(address: str, streams: int, requests: int, seed: int) -> tuple[float, list[StreamTimes]]:
    """Wall seconds, and the times of all answers, at most `streams` of them at once."""
    rng, gate = random.Random(seed), asyncio.Semaphore(streams)
    prompts = [[rng.choice(TOKEN_IDS) for _ in range(PROMPT_TOKENS)] for _ in range(requests)]
    async with AsyncClient(address) as client:

        async def gated(prompt: list[int]) -> StreamTimes:
            async with gate:
                return await stream_one(client, prompt)

        began = time.perf_counter()
        times = await asyncio.gather(*map(gated, prompts))
        return time.perf_counter() - began, list(times)


def percentile(values: list[float], share: float) -> float:
    """The value that `share` of all values do not exceed; 0 of none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def measure(server: Server, streams: int, requests: int, seed: int) -> Row:
    """One line of the table."""
    pids = {"client": os.getpid(), **server.pids}
    cpu_before = {name: cpu_seconds(pid) for name, pid in pids.items()}
    steps_before = count_steps(server)
    wall_s, times = asyncio.run(load(server.address, streams, requests, seed))
    steps = count_steps(server) - steps_before
    firsts = [each.first_token_s * 1e3 for each in times]
    gaps = [gap * 1e3 for each in times for gap in each.gaps_s]
    cpu = {name: (cpu_seconds(pid) - cpu_before[name]) * 1e3 / steps for name, pid in pids.items()}
    return Row(
        streams=streams,
        requests=requests,
        wall_s=round(wall_s, 2),
        output_tokens_per_s=round(requests * GENERATED_TOKENS / wall_s, 1),
        first_token_p50_ms=round(percentile(firsts, 0.5), 1),
        first_token_p99_ms=round(percentile(firsts, 0.99), 1),
        between_tokens_p50_ms=round(percentile(gaps, 0.5), 2),
        between_tokens_p99_ms=round(percentile(gaps, 0.99), 2),
        steps=steps,
        wall_ms_per_step=round(wall_s * 1e3 / steps, 2),
        cpu_ms_per_step={name: round(value, 2) for name, value in cpu.items()},
    )


def median_row(rows: list[Row]) -> Row:
    """The run whose throughput is the median."""
    middle = statistics.median_low(row.output_tokens_per_s for row in rows)
    return next(row for row in rows if row.output_tokens_per_s == middle)


def print_table(rows: list[Row]) -> None:
    """The rows as Markdown."""
    names = list(rows[0].cpu_ms_per_step)
    print(
        "| streams | tok/s | first token p50 / p99 ms | between tokens p50 / p99 ms | step ms | CPU ms a step: ", end=""
    )
    print(", ".join(names), "|\n|---|---|---|---|---|---|")
    for row in rows:
        cpu = ", ".join(f"{row.cpu_ms_per_step[name]:.2f}" for name in names)
        first = f"{row.first_token_p50_ms} / {row.first_token_p99_ms}"
        between = f"{row.between_tokens_p50_ms} / {row.between_tokens_p99_ms}"
        print(f"| {row.streams} | {row.output_tokens_per_s} | {first} | {between} | {row.wall_ms_per_step} | {cpu} |")


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--runs", type=int, default=3, help="times each line is measured; the median is shown")
    parser.add_argument("--json", type=Path, help="where the JSON goes")
    parser.add_argument("options", nargs="*", help="more options of octavo serve, behind --")
    arguments = parser.parse_args()
    rows = []
    with serving(arguments.model, arguments.options) as server:
        asyncio.run(load(server.address, 2, 2, seed=0))  # warm-up
        for streams in arguments.streams:
            runs = [measure(server, streams, max(2, streams), seed) for seed in range(1, arguments.runs + 1)]
            rows.append(median_row(runs))
            print_table(rows[-1:])
    print_table(rows)
    if arguments.json:
        document = {
            "command": ["python", "-m", "benchmarks.workload_w", *sys.argv[1:]],
            "machine": {"processor": _processor(), "cpus": os.cpu_count(), "load_average": os.getloadavg()},
            "rows": [asdict(row) for row in rows],
        }
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
