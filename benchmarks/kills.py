"""Kills each process of a running stack again and again under streams, and writes down what that costs its clients.

    python -m benchmarks.kills    # into results/kills.json and docs/failures.md

What a client waits for is the longest time between two tokens of its stream, from the kill until all streams go on.
Tokens computed again are counted by who survives, as what was computed beyond what the answers need. Nothing of it is a
test: that answers are whole is also checked here, but `make chaos` is for that.
"""

import argparse
import asyncio
import itertools
import os
import signal
import statistics
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from benchmarks import results_file, tables
from benchmarks.servers import Server, children, cpu_seconds, metric_sum, serving
from octavo import AsyncClient, RetryPolicy
from octavo.results import Delta, Generation

PATIENCE_S = 300.0
NUM_FRESH_TOKENS = 3  # of each stream, until it is under way, and again until it goes on
PROMPTS = (
    "Once upon a time there was a lighthouse keeper who",
    "The three most important rules of good bread are",
    "Dear committee, I write to you because",
    "In the year 2140 the last train to the coast",
)
OPTIONS: dict[str, Any] = {"max_tokens": 150, "ignore_eos": True, "temperature": 0.8, "top_k": 40}


@dataclass(frozen=True)
class Case:
    """One row of the table.

    Attributes:
        name: of the process as the launcher has it.
        survivor: whose count of computed tokens outlives the kills: `router` or `executor`.
    """

    title: str
    name: str
    survivor: str = "router"


# By the spares of the stack that they are done to, in this order: the router's own counts end with it.
CASES = {
    0: (Case("executor", "executor"), Case("cache service", "cache-service"), Case("router", "router", "executor")),
    1: (Case("executor, with a spare", "executor-"),),
}


@dataclass
class Stream:
    """One client: asks one request after another, and notes when tokens came."""

    client: AsyncClient
    number: int
    expected: Generation | None = None  # of an undisturbed run
    times: list[float] = field(default_factory=list)
    num_needed: int = 0  # tokens that had to be computed for its answers
    num_answers: int = 0
    faults: list[str] = field(default_factory=list)

    async def ask(self) -> Generation:
        """One answer, read token by token."""
        stream = self.client.stream(PROMPTS[self.number], seed=self.number, timeout_s=PATIENCE_S, **OPTIONS)
        async for event in stream:
            if isinstance(event, Delta):
                self.times.append(time.monotonic())
        return await stream.result()

    async def run(self, is_over: asyncio.Event) -> None:
        while not is_over.is_set():
            try:
                answer = await self.ask()
            except Exception as error:
                self.faults.append(f"stream {self.number} was lost: {error!r}")
                continue
            self.num_answers += 1
            usage = answer.usage
            self.num_needed += usage.prompt_tokens - usage.cached_tokens + usage.generated_tokens - 1
            if self.expected is None or answer.choices != self.expected.choices:
                self.faults.append(f"stream {self.number} has other tokens")

    def longest_wait_s(self, since: float) -> float:
        times = [since, *(moment for moment in self.times if moment > since)]
        return max(after - before for before, after in itertools.pairwise(times))


async def learn(address: str) -> list[Generation]:
    """What an undisturbed run answers; the prompts are cached from now on."""
    async with AsyncClient(address) as client:
        return await asyncio.gather(*(Stream(client, number).ask() for number in range(len(PROMPTS))))


@asynccontextmanager
async def streaming(address: str, expected: list[Generation]) -> AsyncIterator[list[Stream]]:
    """All streams, under way; they end their last answer when this is left."""
    async with AsyncClient(address, retry=RetryPolicy(PATIENCE_S, PATIENCE_S)) as client:
        streams = [Stream(client, number, answer) for number, answer in enumerate(expected)]
        is_over = asyncio.Event()
        tasks = [asyncio.create_task(stream.run(is_over)) for stream in streams]
        try:
            yield streams
            is_over.set()
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()


async def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("what was waited for did not come")
        await asyncio.sleep(0.05)


async def wait_for_tokens(streams: list[Stream]) -> None:
    """Of every stream, fresh ones."""
    before = [len(stream.times) for stream in streams]
    await wait_until(
        lambda: all(
            len(stream.times) >= count + NUM_FRESH_TOKENS for stream, count in zip(streams, before, strict=True)
        )
    )


def num_starts(server: Server, name: str) -> int:
    """How often processes of this name became ready."""
    lines = server.log.read_text(errors="replace").splitlines()
    return sum(line.startswith("octavo ") and f"| {name}" in line and " is ready after " in line for line in lines)


async def pid_to_kill(server: Server, case: Case) -> int:
    """Of several executors, the one that works."""
    module = case.name.rstrip("-").replace("-", "_")
    pids = [pid for pid, argv in children(server.launcher).items() if ["-m", module] == _module_of(argv)]
    before = {pid: cpu_seconds(pid) for pid in pids}
    if len(pids) > 1:
        await asyncio.sleep(0.5)
    return max(pids, key=lambda pid: cpu_seconds(pid) - before[pid])


def _module_of(argv: list[str]) -> list[str]:
    """The guard in front of a child's own command has options of its own, but no -m."""
    return argv[argv.index("-m") :][:2] if "-m" in argv else []


async def kill_once(server: Server, case: Case, streams: list[Stream]) -> tuple[list[float], float]:
    """The longest wait of each stream, and after how long the process was ready again; in seconds."""
    await wait_for_tokens(streams)
    pid, starts = await pid_to_kill(server, case), num_starts(server, case.name)
    killed = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    await wait_until(lambda: num_starts(server, case.name) > starts)
    ready_s = time.monotonic() - killed
    await wait_for_tokens(streams)
    waits_s = [stream.longest_wait_s(killed) for stream in streams]
    if "spare" in case.title:
        await wait_until(lambda: metric_sum(server.metrics, "octavo_spare_executors_ready") > 0)
    return waits_s, ready_s


def computed_tokens(server: Server, case: Case) -> float:
    """By the process that survives: of acknowledged steps where that is the router."""
    metrics = server.metrics if case.survivor == "router" else server.executor_metrics
    return metric_sum(metrics, "octavo_iteration_tokens_sum")


def in_flight_tokens(server: Server) -> float:
    """That were computed again because their steps were not acknowledged, as the router counts them."""
    return metric_sum(server.metrics, "octavo_recomputed_tokens_total")


async def measure(
    server: Server, case: Case, num_kills: int, limit_s: float, expected: list[Generation]
) -> dict[str, Any]:
    waits_s: list[float] = []
    ready_s: list[float] = []
    deadline = time.monotonic() + limit_s
    computed, in_flight = computed_tokens(server, case), in_flight_tokens(server)
    async with streaming(server.address, expected) as streams:
        while len(ready_s) < num_kills and time.monotonic() < deadline:
            waits, ready = await kill_once(server, case, streams)
            waits_s += waits
            ready_s.append(ready)
            print(f"{case.title}: {max(waits):.2f} s, ready after {ready:.2f} s", flush=True)
    again = int(computed_tokens(server, case) - computed - sum(stream.num_needed for stream in streams))
    faults = [fault for stream in streams for fault in stream.faults]
    for fault in faults:
        print(fault)
    by_router = case.survivor == "router"
    return {
        "process": case.title,
        "kills": len(ready_s),
        "streams": len(streams),
        "wait_p50_s": statistics.median(waits_s),
        "wait_max_s": max(waits_s),
        "ready_p50_s": statistics.median(ready_s),
        "recomputed_acknowledged_tokens": again if by_router else None,
        "recomputed_in_flight_tokens": int(in_flight_tokens(server) - in_flight) if by_router else None,
        "recomputed_tokens": None if by_router else again,
        "answers": sum(stream.num_answers for stream in streams),
        "lost": len(faults),
    }


def run(model: str, num_spares: int, cases: list[Case], num_kills: int, limit_s: float) -> Iterator[dict[str, Any]]:
    """The row of each case, all done to one stack."""
    options = [f"--max-restarts={num_kills + 1}", "--max-restart-pause-s=0.25", f"--spare-executors={num_spares}"]
    with serving(model, [*options, "--executor.threads=1"]) as server:
        expected = asyncio.run(learn(server.address))
        for case in cases:
            yield asyncio.run(measure(server, case, num_kills, limit_s, expected))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--limit-s", type=float, default=600.0, help="of each row; then it has fewer kills")
    parser.add_argument("--only", default="", help="rows whose title begins so")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for num_spares, cases in CASES.items():
        asked = [case for case in cases if case.title.startswith(options.only)]
        for row in run(options.model, num_spares, asked, options.kills, options.limit_s) if asked else ():
            rows.append(row)
            keep(options.model, rows)


def keep(model: str, rows: list[dict[str, Any]]) -> None:
    """All that there is so far: what comes after may fail."""
    results_file.write("kills", "benchmarks.kills", {"model": model, "rows": rows})
    tables.main()


if __name__ == "__main__":
    main()
