"""`octavo serve` on a tiny model and private sockets, for blows from outside."""

import asyncio
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from octavo.rpc import open_channel
from octavo.v1 import cache_pb2, cache_pb2_grpc
from tests.tiny_models import save_tiny_llama

START_S, END_S, SETTLE_S = 300.0, 120.0, 60.0
SILENCE_LIMIT_S = 8.0  # shorter than by default, so that more happens; an answer of a loaded machine takes a while too
MODULES = {"executor": "executor", "cache-service": "cache_service", "router": "router"}


@dataclass
class ChaosStack:
    """A running stack and where everything of it is.

    Args:
        patience_s: how long requests wait for a process that is gone.
        num_spares: executors more than the one that serves.
    """

    folder: Path
    patience_s: float
    num_spares: int = 0
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

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text("utf-8", "replace")

    def start(self) -> None:
        self.memory.mkdir()
        command = [sys.executable, "-m", "octavo.cli", "serve", f"--model={save_tiny_llama(self.folder / 'tiny')}"]
        command += [f"--router.listen={self.address}", "--router.metrics-listen=", "--router.drain-accept-window-s=0"]
        command += [f"--cache-service.listen={self.cache_address}", "--cache-service.metrics-listen="]
        command += [f"--cache-service.shared-memory-dir={self.memory}", "--executor.metrics-listen="]
        command += ["--executor.threads=1", "--executor.kv-memory-mib=8", "--executor.max-rows=64"]
        command += ["--max-restarts=1000000", "--max-restart-pause-s=1", f"--silence-limit-s={SILENCE_LIMIT_S}"]
        command += [f"--router.recovery-grace-s={self.patience_s}", f"--spare-executors={self.num_spares}"]
        environment = {**os.environ, "XDG_RUNTIME_DIR": str(self.folder)}
        with (self.folder / "log").open("wb") as log:
            self.process = subprocess.Popen(command, stderr=log, env=environment)

    async def wait_until_ready(self) -> None:
        await self._wait_for(r"ready: gRPC at", 1, START_S)

    def num_starts(self, name: str) -> int:
        """How often a process of this name became ready."""
        return self._count(_ready(name))

    async def wait_for_start(self, name: str, number: int) -> None:
        await self._wait_for(_ready(name), number, self.patience_s)

    def pids_of(self, name: str) -> list[int]:
        """Of the children of this name: of executors there may be several."""
        assert self.process is not None
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        module = f"\0-m\0{MODULES[name]}\0".encode()
        return [int(pid) for pid in children if module in Path(f"/proc/{pid}/cmdline").read_bytes()]

    def _count(self, line: str) -> int:
        """How often the launcher said a line that begins so."""
        return len(re.findall(rf"^octavo +\| {line}", self.log, re.MULTILINE))

    async def _wait_for(self, line: str, times: int, within_s: float) -> None:
        assert self.process is not None
        deadline = time.monotonic() + within_s
        while self._count(line) < times:
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise TimeoutError(f"{line!r} was not said {times} times:\n{self.log[-4000:]}")
            await asyncio.sleep(0.1)

    async def settle(self) -> str:
        """What is wrong when nothing runs any more; empty: nothing. Waits for what is on its way."""
        wrong, deadline = "", time.monotonic() + SETTLE_S
        async with open_channel(self.cache_address) as channel:
            stub = cache_pb2_grpc.BlockManagerServiceStub(channel)
            while time.monotonic() < deadline:
                stats = await stub.GetStats(cache_pb2.GetStatsRequest(self_check=True), timeout=30)
                wrong = _unsettled(stats)
                if not wrong:
                    return ""
                await asyncio.sleep(0.1)
        return wrong

    def end(self) -> str:
        """In order; what is wrong with the end, or empty."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(END_S)
        left = [path.name for path in self.memory.iterdir()]
        shutil.rmtree(self.memory)
        return f"it ended with {code} and left {left}" if code or left else ""


def _ready(name: str) -> str:
    return rf"{name}(-\d+)? is ready after"


def _unsettled(stats: cache_pb2.GetStatsResponse) -> str:
    [arena] = stats.arenas
    is_whole = arena.free_blocks + arena.cached_blocks + arena.reserved_blocks == arena.total_blocks
    if is_whole and not (arena.num_sequences or arena.violations) and stats.num_leases == 1:
        return ""
    return f"not settled: {stats}"
