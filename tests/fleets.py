"""Several scripted engines, each with a real cache service of its own, behind one real router, all in one process."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import grpc

from octavo.rpc import open_channel
from octavo.v1 import cache_pb2, cache_pb2_grpc, inference_pb2_grpc
from router.app import Router
from router.config import EngineAddress, RouterConfig
from tests.fakes import FakeExecutor, Hooks, Script, counting
from tests.stacks import ROUTER_OPTIONS, FakeProcess, Front, running_cache_service, until


@dataclass
class FakeEngine:
    """An executor and its cache service."""

    executor: FakeExecutor
    process: FakeProcess
    cache_address: str
    cache: cache_pb2_grpc.BlockManagerServiceStub

    @property
    def num_prompts(self) -> int:
        """Rows that began at their first token or behind a cached prefix."""
        return sum(len(step.started_rows) for step in self.executor.steps)

    async def vanish(self) -> None:
        """The executor's process dies: no step ends from now on."""
        self.executor.hooks.before_step = _never
        await self.executor.stop()
        self.process.die()

    async def come_back(self) -> None:
        """Its successor listens at the same address, on the same memory."""
        self.process.is_dead = False
        self.executor = replace(self.executor, listen=self.executor.address, hooks=Hooks(), steps=[], rows={})
        await self.executor.start()

    async def is_settled(self) -> bool:
        """All blocks are free or cached; the self-check finds nothing."""
        stats = (await self.cache.GetStats(cache_pb2.GetStatsRequest(self_check=True))).arenas[0]
        assert not stats.violations, stats.violations
        is_whole = stats.free_blocks + stats.cached_blocks + stats.reserved_blocks == stats.total_blocks
        return is_whole and not stats.num_sequences and not self.executor.rows


@dataclass(kw_only=True)
class FleetStack(Front):
    """A router and all its engines, by name."""

    engines: dict[str, FakeEngine]
    channel: grpc.aio.Channel

    def is_up(self, name: str) -> bool:
        return self.metric("octavo_engine_up", engine=name) == 1

    async def settle(self) -> None:
        """All requests ended, everywhere, within the bound."""
        for name, engine in self.engines.items():
            assert await until(engine.is_settled), f"{name} is not settled"
        assert await until(lambda: self.router.fleet.num_live == 0)
        for gauge in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_ratio"):
            assert self.metric(f"octavo_{gauge}") == 0, gauge


@asynccontextmanager
async def running_engine(source: str, script: Script = counting, **executor_options: Any) -> AsyncIterator[FakeEngine]:
    """One engine without a router."""
    process = FakeProcess()
    async with running_cache_service(process) as cache_app:
        address = f"127.0.0.1:{cache_app.server.port}"
        executor = FakeExecutor(script, source, address, **executor_options)
        await executor.start()
        async with open_channel(address) as channel:
            engine = FakeEngine(executor, process, address, cache_pb2_grpc.BlockManagerServiceStub(channel))
            try:
                yield engine
            finally:
                await engine.executor.stop()


@asynccontextmanager
async def running_fleet(
    source: str,
    engines: dict[str, dict[str, Any]],
    *,
    config: dict[str, Any] | None = None,
    elsewhere: tuple[EngineAddress, ...] = (),
) -> AsyncIterator[FleetStack]:
    """A router in front of engines, all of them serving.

    Args:
        engines: name -> fields of `FakeExecutor`.
        config: fields of `RouterConfig` that differ from the test's own.
        elsewhere: more engines that the router is told of.
    """
    async with AsyncExitStack() as exits:
        running = {
            name: await exits.enter_async_context(running_engine(source, **options))
            for name, options in engines.items()
        }
        addresses = tuple(
            EngineAddress(name=name, cache_service=engine.cache_address, executor=engine.executor.address)
            for name, engine in running.items()
        )
        router = Router(RouterConfig(**(ROUTER_OPTIONS | {"engines": (*addresses, *elsewhere)} | (config or {}))))
        await router.start()
        exits.push_async_callback(_close, router)
        channel = await exits.enter_async_context(open_channel(f"127.0.0.1:{router.port}"))
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        fleet = FleetStack(router=router, stub=stub, engines=running, channel=channel)
        assert await until(lambda: all(map(fleet.is_up, running)), 120), "not every engine became ready"
        yield fleet


async def _never(step: Any) -> None:
    await asyncio.Event().wait()


async def _close(router: Router) -> None:
    with suppress(grpc.aio.AioRpcError):
        await router.close()
