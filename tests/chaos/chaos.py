"""Kills, stops and pauses the processes of `octavo serve` at random under streams of mixed requests, and judges them.

Every accepted request must end with exactly the tokens of an undisturbed run, or as its client asked: clients come back
by themselves. At the end every block must be free or cached, no lease but the router's left, and `/dev/shm` as before.
What is done follows from the seed; when it strikes depends on the machine.

    python -m tests.chaos.chaos --seconds 180 --seed 1
"""

import argparse
import asyncio
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from octavo import AsyncClient, RetryPolicy
from tests.chaos.crowd import Crowd
from tests.chaos.stack import ChaosStack

# A process has as long to start again; on a loaded machine that takes minutes.
PATIENCE_S = 360.0
NUM_REQUESTS = 40
SHARE_OF_SINGLE_BLOWS = 0.75
# (what, process, weight): killed and restarted; stopped for good, until the supervisor kills it; stopped for a moment.
ACTIONS = (
    ("kill", "executor", 4),
    ("kill", "cache-service", 4),
    ("kill", "router", 4),
    ("stop", "executor", 1),
    ("stop", "cache-service", 1),
    ("stop", "router", 1),
    ("pause", "executor", 2),
    ("pause", "cache-service", 2),
    ("pause", "router", 2),
)


@dataclass(frozen=True)
class Blow:
    """One thing that was done, and the longest time that each stream under way waited for a token until the next."""

    what: str
    process: str
    waits_s: tuple[float, ...]


class Tormentor:
    """Strikes the processes of a stack, and sees that each comes back before it is struck again.

    Args:
        dice: what is done.
    """

    def __init__(self, stack: ChaosStack, crowd: Crowd, dice: random.Random) -> None:
        self._stack = stack
        self._crowd = crowd
        self._dice = dice
        self._gone: dict[str, int] = {}  # process -> how often it was ready before

    async def strike(self) -> Blow:
        """One blow and the recovery from it; or the next comes into the recovery."""
        dice = self._dice
        what, name, _ = dice.choices(ACTIONS, [weight for _, _, weight in ACTIONS])[0]
        await self._wait_for(name)
        pid = dice.choice(self._stack.pids_of(name))
        print(f"{time.strftime('%H:%M:%S')} {what} {name}", flush=True)
        self._crowd.score.begin_blow()
        if what == "pause":
            os.kill(pid, signal.SIGSTOP)
            await asyncio.sleep(dice.uniform(0.2, 1.5))
            os.kill(pid, signal.SIGCONT)
        else:
            self._gone[name] = self._stack.num_starts(name)
            os.kill(pid, signal.SIGKILL if what == "kill" else signal.SIGSTOP)
        if dice.random() < SHARE_OF_SINGLE_BLOWS:
            await self.wait_for_all()
        await asyncio.sleep(dice.uniform(0.5, 4.0))
        return Blow(what, name, tuple(self._crowd.score.waits_s.values()))

    async def wait_for_all(self) -> None:
        """Until every process is there."""
        for name in list(self._gone):
            await self._wait_for(name)

    async def _wait_for(self, name: str) -> None:
        if name in self._gone:
            await self._stack.wait_for_start(name, self._gone.pop(name) + 1)


async def torment(tormentor: Tormentor, crowd: Crowd, seconds: float, num_streams: int) -> list[Blow]:
    """Blow after blow under all streams, which then end."""
    is_over = asyncio.Event()
    streams = [asyncio.create_task(crowd.ask_for_ever(number, is_over)) for number in range(num_streams)]
    await asyncio.sleep(5.0)  # they are under way
    blows, deadline = [], time.monotonic() + seconds
    try:
        while time.monotonic() < deadline:
            blows.append(await tormentor.strike())
        await tormentor.wait_for_all()
        is_over.set()
        await asyncio.wait_for(asyncio.gather(*streams), PATIENCE_S)
    finally:
        for stream in streams:
            stream.cancel()
    return blows


async def run(stack: ChaosStack, seconds: float, seed: int, num_streams: int) -> tuple[Crowd, list[Blow]]:
    stack.start()
    try:
        await stack.wait_until_ready()
        async with AsyncClient(stack.address, retry=RetryPolicy(PATIENCE_S, PATIENCE_S)) as client:
            crowd = Crowd(client, seed, NUM_REQUESTS, timeout_s=2 * PATIENCE_S)
            await crowd.learn()
            blows = await torment(Tormentor(stack, crowd, random.Random(seed)), crowd, seconds, num_streams)
            crowd.score.wrong += filter(None, [await stack.settle()])
    finally:
        fault = stack.end()
    crowd.score.wrong += filter(None, [fault])
    return crowd, blows


def report(crowd: Crowd, blows: list[Blow]) -> None:
    score = crowd.score
    endings = ", ".join(f"{count} {ending}" for ending, count in score.endings.most_common())
    print(f"\nanswers: {endings}; {score.num_calls} calls; {len(score.wrong)} faults\n")
    print("| what | times | streams | longest wait for a token, p50 s | max s |\n|---|---|---|---|---|")
    for what, name, _ in ACTIONS:
        struck = [blow for blow in blows if (blow.what, blow.process) == (what, name)]
        waits = [wait for blow in struck for wait in blow.waits_s]
        if waits:
            print(
                f"| {what} {name} | {len(struck)} | {len(waits)} | {statistics.median(waits):.2f} | {max(waits):.2f} |"
            )
    for fault in score.wrong[:20]:
        print(fault)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=180.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--spares", type=int, default=0, help="spare executors")
    options = parser.parse_args()
    seed = options.seed
    print(f"seed {seed}, {options.streams} streams, {options.seconds:g} s", flush=True)
    with tempfile.TemporaryDirectory(prefix="oct-") as folder:
        log = Path(tempfile.gettempdir()) / f"octavo-chaos-{seed}.log"
        is_good = False
        try:
            stack = ChaosStack(Path(folder), PATIENCE_S, options.spares)
            crowd, blows = asyncio.run(run(stack, options.seconds, seed, options.streams))
            report(crowd, blows)
            is_good = not crowd.score.wrong
        finally:
            if not is_good:
                shutil.copy(Path(folder) / "log", log)
                print(f"the log is {log}")
    return not is_good


if __name__ == "__main__":
    sys.exit(main())
