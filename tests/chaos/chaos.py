"""Kills, stops and pauses the processes of `octavo serve` at random under streams of mixed requests, and judges them.

Every accepted request must end with exactly the tokens of an undisturbed run. At the end every block must be free or
cached, and `/dev/shm` as before. What is done follows from the seed; when it strikes depends on the machine.

    python -m tests.chaos.chaos --seconds 180 --seed 1
"""

import argparse
import asyncio
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from octavo import AsyncClient
from octavo.errors import OctavoError
from octavo.results import Delta, Started
from octavo.rpc import open_channel
from octavo.v1 import cache_pb2, cache_pb2_grpc
from tests.tiny_models import save_tiny_llama

START_S, RECOVERY_S, END_S = 300.0, 180.0, 120.0
SILENCE_LIMIT_S = 5.0
NOT_ACCEPTED = ("NO_EXECUTOR", "QUEUE_FULL", "UNAVAILABLE")
MODULES = {"executor": "executor", "cache-service": "cache_service", "router": "router"}
# (what, process, weight): killed and restarted; stopped for good, until the supervisor kills it; stopped for a moment.
ACTIONS = (
    ("kill", "executor", 4),
    ("kill", "cache-service", 4),
    ("stop", "executor", 1),
    ("stop", "cache-service", 1),
    ("pause", "executor", 2),
    ("pause", "cache-service", 2),
    ("pause", "router", 1),
)


@dataclass
class Stack:
    """A running `octavo serve` on private sockets."""

    folder: Path
    process: "subprocess.Popen[bytes] | None" = None

    @property
    def address(self) -> str:
        return f"unix:{self.folder}/router.sock"

    @property
    def cache_address(self) -> str:
        return f"unix:{self.folder}/cache.sock"

    @property
    def memory(self) -> Path:
        return Path("/dev/shm") / f"octavo-chaos-{self.folder.name}"

    def start(self) -> None:
        self.memory.mkdir()
        command = [sys.executable, "-m", "octavo.cli", "serve", f"--model={save_tiny_llama(self.folder / 'tiny')}"]
        command += [f"--router.listen={self.address}", "--router.metrics-listen=", "--router.drain-accept-window-s=0"]
        command += [f"--cache-service.listen={self.cache_address}", "--cache-service.metrics-listen="]
        command += [f"--cache-service.shared-memory-dir={self.memory}", "--executor.metrics-listen="]
        command += ["--executor.threads=1", "--executor.kv-memory-mib=8", "--executor.max-rows=64"]
        command += ["--max-restarts=1000000", f"--silence-limit-s={SILENCE_LIMIT_S}"]
        # On a loaded machine an executor may need longer to start than requests wait by default.
        command += [f"--router.recovery-grace-s={RECOVERY_S * 2}"]
        environment = {**os.environ, "XDG_RUNTIME_DIR": str(self.folder)}
        with (self.folder / "log").open("wb") as log:
            self.process = subprocess.Popen(command, stderr=log, env=environment)

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text("utf-8", "replace")

    async def wait_for(self, text: str, times: int, within_s: float) -> None:
        deadline = time.monotonic() + within_s
        while self.log.count(text) < times:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{text!r} was not said {times} times:\n{self.log[-4000:]}")
            await asyncio.sleep(0.1)

    def pid_of(self, name: str) -> int:
        """Of the child of this name, which is there."""
        assert self.process is not None
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        module = f"\0-m\0{MODULES[name]}\0".encode()
        [pid] = [int(pid) for pid in children if module in Path(f"/proc/{pid}/cmdline").read_bytes()]
        return pid


@dataclass
class Blow:
    """One thing that was done."""

    what: str
    process: str
    at: float
    # Stream -> longest time without a token from here to the next blow, of those that were under way.
    gaps_s: dict[int, float] = field(default_factory=dict)


@dataclass
class Score:
    blows: list[Blow] = field(default_factory=list)
    num_whole: int = 0
    num_not_accepted: int = 0
    wrong: list[str] = field(default_factory=list)


def requests_of(seed: int, count: int) -> list[dict[str, Any]]:
    """Mixed requests: greedy and sampled, long and short prompts, several answers, with and without the cache."""
    dice = random.Random(seed)
    requests = []
    for index in range(count):
        length = dice.choice((3, 17, 40, 120))
        request: dict[str, Any] = {"prompt": [1, *(dice.randrange(5, 261) for _ in range(length))]}
        request |= {"max_tokens": dice.choice((20, 60, 150)), "ignore_eos": True, "temperature": 0.0}
        if index % 3 == 1:
            request |= {"temperature": 0.8, "seed": index, "top_k": 20}
        if index % 5 == 2:
            request |= {"n": 2, "temperature": 0.7, "seed": index}
        if index % 7 == 3:
            request["presence_penalty"] = 0.5
        if index % 4 == 0:
            request["bypass_cache"] = True
        requests.append(request)
    return requests


async def ask(client: AsyncClient, request: dict[str, Any], score: Score, stream_id: int) -> dict[int, list[int]]:
    """The tokens of each answer. Raises OctavoError; with `was_accepted` where the request had started."""
    options, began, tokens, is_accepted = dict(request), time.monotonic(), {}, False
    last_token_at = began
    prompt = options.pop("prompt")
    try:
        async for event in client.stream(prompt, timeout_s=RECOVERY_S * 2, **options):
            is_accepted = is_accepted or isinstance(event, Started)
            if isinstance(event, Delta):
                tokens.setdefault(event.index, []).extend(event.token_ids)
                now = time.monotonic()
                for blow in score.blows[-1:]:
                    if began < blow.at:
                        gap_s = now - max(last_token_at, blow.at)
                        blow.gaps_s[stream_id] = max(gap_s, blow.gaps_s.get(stream_id, 0.0))
                last_token_at = now
    except OctavoError as error:
        error.metadata["was_accepted"] = "yes" if is_accepted else ""
        raise
    return tokens


async def stream_for_ever(
    client: AsyncClient, requests: list[dict[str, Any]], expected: list[Any], score: Score, dice: random.Random
) -> None:
    """One stream after another, each compared with the undisturbed answer."""
    while True:
        which = dice.randrange(len(requests))
        try:
            tokens = await ask(client, requests[which], score, dice.getrandbits(60))
        except OctavoError as error:
            if error.metadata["was_accepted"] or error.reason not in NOT_ACCEPTED:
                score.wrong.append(f"request {which} was lost: {error!r}")
            score.num_not_accepted += 1
            await asyncio.sleep(error.retry_after_s or 0.5)
            continue
        if tokens == expected[which]:
            score.num_whole += 1
        else:
            score.wrong.append(f"request {which} differs: {tokens} instead of {expected[which]}")


async def strike(stack: Stack, score: Score, dice: random.Random) -> None:
    """One blow, and the recovery from it."""
    what, name, _ = dice.choices(ACTIONS, [weight for _, _, weight in ACTIONS])[0]
    pid, ready = stack.pid_of(name), f"octavo        | {name} is ready after"
    num_ready = stack.log.count(ready)
    print(f"{time.strftime('%H:%M:%S')} {what} {name}", flush=True)
    score.blows.append(Blow(what, name, time.monotonic()))
    os.kill(pid, signal.SIGKILL if what == "kill" else signal.SIGSTOP)
    if what == "pause":
        await asyncio.sleep(dice.uniform(0.2, 1.5))
        os.kill(pid, signal.SIGCONT)
    else:
        await stack.wait_for(ready, num_ready + 1, RECOVERY_S)
    await asyncio.sleep(dice.uniform(0.5, 4.0))


async def settle(stack: Stack) -> str:
    """What is wrong when nothing runs any more; empty: nothing."""
    async with open_channel(stack.cache_address) as channel:
        stub = cache_pb2_grpc.BlockManagerServiceStub(channel)
        for _ in range(100):
            [arena] = (await stub.GetStats(cache_pb2.GetStatsRequest(self_check=True), timeout=10)).arenas
            if arena.free_blocks + arena.cached_blocks + 1 == arena.total_blocks:
                return "" if not (arena.violations or arena.num_sequences) else str(arena)
            await asyncio.sleep(0.1)
    return f"blocks are left behind: {arena}"


async def run(seconds: float, seed: int, num_streams: int, folder: Path) -> Score:
    stack, score, dice = Stack(folder), Score(), random.Random(seed)
    stack.start()
    try:
        await stack.wait_for("octavo        | ready: gRPC at", 1, START_S)
        async with AsyncClient(stack.address) as client:
            requests = requests_of(seed, 40)
            expected = [await ask(client, request, Score(), 0) for request in requests]
            streams = [
                asyncio.create_task(stream_for_ever(client, requests, expected, score, random.Random(seed + 1 + i)))
                for i in range(num_streams)
            ]
            await asyncio.sleep(5.0)  # streams are under way
            deadline = time.monotonic() + seconds
            while time.monotonic() < deadline:
                await strike(stack, score, dice)
            await asyncio.sleep(2.0)
            for stream in streams:
                stream.cancel()
            await asyncio.gather(*streams, return_exceptions=True)
            unsettled = await settle(stack)
            if unsettled:
                score.wrong.append(unsettled)
    finally:
        assert stack.process is not None
        stack.process.send_signal(signal.SIGTERM)
        code = stack.process.wait(END_S)
        left = [path.name for path in stack.memory.iterdir()]
        shutil.rmtree(stack.memory)
    if code or left:
        score.wrong.append(f"it ended with {code} and left {left}")
    return score


def report(score: Score) -> None:
    print(f"\n{score.num_whole} answers whole, {score.num_not_accepted} requests refused and sent again,", end=" ")
    print(f"{len(score.wrong)} faults\n")
    print("| what | times | streams | longest wait for a token, p50 s | max s |\n|---|---|---|---|---|")
    for what, name, _ in ACTIONS:
        blows = [blow for blow in score.blows if (blow.what, blow.process) == (what, name)]
        gaps = [gap for blow in blows for gap in blow.gaps_s.values()]
        if gaps:
            numbers = f"{statistics.median(gaps):.2f} | {max(gaps):.2f}"
            print(f"| {what} {name} | {len(blows)} | {len(gaps)} | {numbers} |")
    for fault in score.wrong[:20]:
        print(fault)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=180.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--streams", type=int, default=32)
    options = parser.parse_args()
    print(f"seed {options.seed}, {options.streams} streams, {options.seconds:g} s", flush=True)
    with tempfile.TemporaryDirectory(prefix="oct-") as folder:
        score = asyncio.run(run(options.seconds, options.seed, options.streams, Path(folder)))
        report(score)
        if score.wrong:
            log = Path(tempfile.gettempdir()) / f"octavo-chaos-{options.seed}.log"
            shutil.copy(Path(folder) / "log", log)
            print(f"the log is {log}")
    return bool(score.wrong)


if __name__ == "__main__":
    sys.exit(main())
