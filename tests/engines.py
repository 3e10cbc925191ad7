"""Real processes for tests: cache service and executor with a real model, and routers in front of them.

The engine runs as `octavo engine` does for a user. A router costs little once `transformers` is imported, so tests run
theirs in their own process, as many variants as they like on one engine.
"""

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo import AsyncClient
from octavo.rpc import is_serving, open_channel
from octavo.tracing import NO_TRACING, Tracing
from octavo.v1 import cache_pb2, cache_pb2_grpc
from router.app import Router
from router.config import RouterConfig

START_S = 120.0
STOP_S = 30.0


@dataclass(frozen=True)
class RunningEngine:
    """Addresses of a running engine."""

    cache_service: str
    executor: str
    process: subprocess.Popen[bytes]

    def child(self, module: str) -> int:
        """The process id of the one that runs `python -m module`."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        found = [pid for pid in children if f"\0-m\0{module}\0".encode() in Path(f"/proc/{pid}/cmdline").read_bytes()]
        assert len(found) == 1, children
        return int(found[0])

    async def stats(self) -> cache_pb2.ArenaStats:
        """Blocks by state, with the self-check's findings."""
        async with open_channel(self.cache_service) as channel:
            stub = cache_pb2_grpc.BlockManagerServiceStub(channel)
            response = await stub.GetStats(cache_pb2.GetStatsRequest(self_check=True))
            return response.arenas[0]

    async def assert_settled(self, within_s: float = 5.0) -> None:
        """Everything ended: all blocks are free or cached, no sequence is left, the self-check finds nothing."""
        deadline = time.monotonic() + within_s
        while True:
            stats = await self.stats()
            assert not stats.violations, stats.violations
            if stats.free_blocks + stats.cached_blocks + stats.reserved_blocks == stats.total_blocks:
                assert stats.num_sequences == 0
                return
            assert time.monotonic() < deadline, f"not settled: {stats}"
            await asyncio.sleep(0.05)


@contextmanager
def running_engine(model: str, *options: str, **variables: str) -> Iterator[RunningEngine]:
    """`octavo engine` on private sockets, serving when this yields, and gone with all it owned afterwards.

    Args:
        options: more of its command line, as `--executor.kv-memory-mib=64`.
        variables: of its environment, beside those of this process.
    """
    with tempfile.TemporaryDirectory(prefix="octavo-test-") as folder:
        cache, executor = f"unix:{folder}/cache.sock", f"unix:{folder}/executor.sock"
        log = Path(folder) / "log"
        command = [sys.executable, "-m", "octavo.cli", "engine", f"--model={model}", *options]
        command += [f"--cache-service.listen={cache}", "--cache-service.metrics-listen="]
        command += [f"--executor.listen={executor}", "--executor.metrics-listen="]
        # As a user's shell has it: the tests' own switch of Triton is not for the processes that are tested.
        environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | variables
        with log.open("wb") as output:
            process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
        try:
            _wait_until_serving(executor, process, log)
            yield RunningEngine(cache, executor, process)
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                code = process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                os.kill(process.pid, signal.SIGKILL)
                raise
        assert code == 0, log.read_text()


def _wait_until_serving(executor: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_S
    while not asyncio.run(is_serving(executor, "octavo.v1.ExecutorService")):
        assert process.poll() is None, f"the engine ended:\n{log.read_text()}"
        assert time.monotonic() < deadline, f"the engine does not serve:\n{log.read_text()}"
        time.sleep(0.1)


@asynccontextmanager
async def running_router(engine: RunningEngine, **options: Any) -> AsyncIterator[AsyncClient]:
    """A router of this process in front of an engine, and a client of it; both closed afterwards, and settled.

    Args:
        options: fields of `RouterConfig`.
    """
    async with (
        router_in_front_of(engine, **options) as router,
        AsyncClient(f"127.0.0.1:{router.port}", timeout_s=300) as client,
    ):
        yield client


@asynccontextmanager
async def router_in_front_of(
    engine: RunningEngine, tracing: Tracing = NO_TRACING, **options: Any
) -> AsyncIterator[Router]:
    """A router of this process that is ready; closed afterwards, and the engine settled."""
    fixed = {"listen": "127.0.0.1:0", "metrics_listen": "127.0.0.1:0", "drain_accept_window_s": 0}
    router = Router(
        RouterConfig(cache_service=engine.cache_service, executor=engine.executor, **(fixed | options)), tracing=tracing
    )
    await router.start()
    try:
        async with asyncio.timeout(START_S):
            while not router.fleet.is_ready:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        yield router
        await engine.assert_settled()
    finally:
        await router.close()
