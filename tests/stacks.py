"""A whole router stack in one process: real cache service, scripted executor, real router; and its settle check."""

import asyncio
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import grpc
from prometheus_client import generate_latest

from cache_service.app import RunningApp, outside_of, running
from cache_service.config import CacheServiceConfig
from octavo.rpc import is_serving, open_channel
from octavo.tracing import NO_TRACING, Tracing
from octavo.v1 import cache_pb2, cache_pb2_grpc, inference_pb2, inference_pb2_grpc
from router.app import Router
from router.config import RouterConfig
from router.engine import Engine
from router.link import Link
from tests.fakes import FakeExecutor, Hooks, Script, counting

SETTLE_S = 5.0
CALL_S = 180.0  # a test whose processes start anew waits for them in the middle of a call
ROUTER_OPTIONS: dict[str, Any] = {
    "listen": "127.0.0.1:0",
    "metrics_listen": "",
    "router_id": "router-under-test",
    "drain_accept_window_s": 0,
    "lease_ttl_s": 2,
    "slack_blocks": 1,
}


@dataclass
class FakeProcess:
    """The process behind the fake executor, as the cache service watches it: dead when the test says so."""

    is_dead: bool = False
    started: int = 1
    callbacks: list[Callable[[], None]] = field(default_factory=list)

    def is_alive(self) -> bool:
        return not self.is_dead

    def when_dead(self, loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
        self.callbacks.append(callback)

    def close(self) -> None: ...

    def die(self) -> None:
        self.is_dead = True
        for callback in self.callbacks:
            callback()


@dataclass(kw_only=True)
class Front:
    """A router, and calls that tests make over and over."""

    router: Router
    stub: inference_pb2_grpc.InferenceServiceStub

    async def generate(self, prompt: str = "hi?", **fields: Any) -> inference_pb2.GenerateResponse:
        return await self.stub.Generate(request(prompt, **fields), timeout=CALL_S)

    async def stream(self, prompt: str = "hi?", **fields: Any) -> list[inference_pb2.GenerateStreamResponse]:
        message = request(prompt, kind=inference_pb2.GenerateStreamRequest, **fields)
        return [response async for response in self.stub.GenerateStream(message, timeout=CALL_S)]

    def metric(self, name: str, **labels: str) -> float:
        """Sum of the samples of this name that have these labels."""
        found = 0.0
        for family in self.router.metrics.registry.collect():
            for sample in family.samples:
                if sample.name == name and labels.items() <= sample.labels.items():
                    found += sample.value
        return found


@dataclass(kw_only=True)
class Stack(Front):
    """All parts of a fleet of one."""

    executor: FakeExecutor
    process: FakeProcess
    cache: cache_pb2_grpc.BlockManagerServiceStub
    channel: grpc.aio.Channel
    cache_app: RunningApp
    spares: list[FakeExecutor] = field(default_factory=list)
    spare_processes: dict[int, FakeProcess] = field(default_factory=dict)

    @property
    def engine(self) -> Engine:
        backend = self.link.backend
        assert backend is not None
        return backend.engine

    @property
    def link(self) -> Link:
        """To the only engine."""
        (link,) = self.router.fleet.links
        return link

    async def arena(self) -> cache_pb2.ArenaStats:
        response = await self.cache.GetStats(cache_pb2.GetStatsRequest(self_check=True))
        return response.arenas[0]

    async def settle(self) -> cache_pb2.ArenaStats:
        """All requests ended: every table is empty, every block free or cached, every gauge 0, within the bound."""
        assert await until(lambda: self._is_settled()), await self._unsettled()
        stats = await self.arena()
        assert not stats.violations, stats.violations
        assert b"octavo_num_requests_running" in generate_latest(self.router.metrics.registry)
        for gauge in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_ratio"):
            assert self.metric(f"octavo_{gauge}") == 0, gauge
        return stats

    async def _is_settled(self) -> bool:
        stats = await self.arena()
        is_whole = stats.free_blocks + stats.cached_blocks + stats.reserved_blocks == stats.total_blocks
        roster = self.engine.roster
        router_is_empty = not (len(roster) or roster.running or roster.waiting or roster.allocating)
        return is_whole and not stats.num_sequences and router_is_empty and not self.executor.rows

    async def _unsettled(self) -> str:
        stats = await self.arena()
        return f"not settled: {len(self.engine.roster)} live, {len(self.executor.rows)} rows, {stats}"


def request(prompt: str = "hi?", kind: Any = inference_pb2.GenerateRequest, **fields: Any) -> Any:
    """A request; keyword groups become messages: `stopping={"max_tokens": 3}`. `token_ids` and `chat` replace text."""
    if not {"token_ids", "chat"} & fields.keys():
        fields["text"] = prompt
    return kind(**fields)


async def until(condition: Callable[[], bool | Awaitable[bool]], within_s: float = SETTLE_S) -> bool:
    """Whether the condition comes true within the time."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        result = condition()
        if await result if isinstance(result, Awaitable) else result:
            return True
        await asyncio.sleep(0.01)
    return False


@asynccontextmanager
async def running_cache_service(
    process: FakeProcess, tracing: Tracing = NO_TRACING, spare_processes: dict[int, FakeProcess] | None = None
) -> AsyncIterator[RunningApp]:
    """A real cache service.

    Args:
        spare_processes: by the pids that executors give; all others are `process`.
    """
    config = CacheServiceConfig(listen="127.0.0.1:0", metrics_listen="", drain_grace_s=0, min_lease_ttl_s=0.2)
    watched = spare_processes or {}
    outside = replace(outside_of(config), watch_process=lambda pid: watched.get(pid, process), tracing=tracing)
    async with running(config, outside) as app:
        yield app


class CacheProcess:
    """A cache service in a process of its own, which can be killed and started again at its address."""

    def __init__(self, folder: Path) -> None:
        self.address = f"unix:{folder}/cache.sock"
        self._socket = folder / "cache.sock"
        self._command = [sys.executable, "-m", "cache_service", f"--listen={self.address}", "--metrics-listen="]
        self._command += [f"--shared-memory-dir={folder}", "--min-lease-ttl-s=0.2", "--expiry-interval-s=0.1"]
        self._process: subprocess.Popen[bytes] | None = None

    async def start(self) -> None:
        self._socket.unlink(missing_ok=True)
        self._process = subprocess.Popen(self._command, stderr=subprocess.DEVNULL)  # noqa: ASYNC220 (it returns at once)
        assert await until(lambda: is_serving(self.address, "octavo.v1.BlockManagerService"), 60)

    def kill(self) -> None:
        """SIGKILL, and reaped."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def end(self) -> None:
        """In order: its memory goes with it."""
        assert self._process is not None
        self._process.terminate()
        assert self._process.wait(30) == 0


@asynccontextmanager
async def running_stack(
    tokenizer_source: str,
    script: Script = counting,
    *,
    config: dict[str, Any] | None = None,
    cache: CacheProcess | None = None,
    tracing: Tracing = NO_TRACING,
    num_spares: int = 0,
    **executor_options: Any,
) -> AsyncIterator[Stack]:
    """All three processes in this one, ready to serve.

    Args:
        config: fields of `RouterConfig` that differ from the test's own.
        cache: a cache service that runs already, instead of one in this process.
        tracing: of router and cache service.
        num_spares: executors more, on the same arena; their process ids are 1, 2, 3, ...
        executor_options: fields of `FakeExecutor`.
    """
    process = FakeProcess()
    processes = {place + 1: FakeProcess(started=place + 2) for place in range(num_spares)}
    async with nullcontext() if cache else running_cache_service(process, tracing, processes) as cache_app:
        cache_address = cache.address if cache else f"127.0.0.1:{cache_app.server.port}"
        executor = FakeExecutor(script, tokenizer_source, cache_address, **executor_options)
        await executor.start()
        spares = [
            replace(executor, executor_id=f"spare-{pid}", pid=pid, hooks=Hooks(), steps=[], rows={})
            for pid in processes
        ]
        for spare in spares:
            await spare.start()
        addresses = tuple(spare.address for spare in spares)
        options = {"cache_service": cache_address, "executor": executor.address, "spare_executors": addresses}
        router = Router(RouterConfig(**(ROUTER_OPTIONS | options | (config or {}))), tracing=tracing)
        await router.start()
        channel, cache_channel = open_channel(f"127.0.0.1:{router.port}"), open_channel(cache_address)
        stack = Stack(
            router=router,
            stub=inference_pb2_grpc.InferenceServiceStub(channel),
            executor=executor,
            process=process,
            cache=cache_pb2_grpc.BlockManagerServiceStub(cache_channel),
            channel=channel,
            cache_app=cache_app,
            spares=spares,
            spare_processes=processes,
        )
        try:
            assert await until(lambda: router.fleet.is_ready, 120), "the router did not become ready"
            yield stack
        finally:
            await channel.close()
            with suppress(grpc.aio.AioRpcError):
                await router.close()
            await cache_channel.close()
            for each in (stack.executor, *stack.spares):
                await each.stop()
