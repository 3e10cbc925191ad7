"""The parts of a running cache service, put together and taken apart.

Here belongs construction and its order. Not here: signals and exit codes (`__main__`), what any part does.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial

from cache_service.arena import create_arena, reclaim_stale
from cache_service.config import CacheServiceConfig
from cache_service.device_arena import create_device_arena
from cache_service.eviction import POLICIES, Eviction
from cache_service.expiry import Expiry
from cache_service.geometry import KvGeometry
from cache_service.inheritance import inherit
from cache_service.managed_arena import ArenaMemory
from cache_service.metrics import make_registry
from cache_service.process import Watched, watch_again, watch_process
from cache_service.service import CacheService
from cache_service.servicer import BlockManagerServicer, Clock, MakeArena, start_cache_server
from octavo.cuda_driver import load_driver, parse_ordinal
from octavo.metrics import start_metrics_server
from octavo.rpc import ServerParts
from octavo.tls import internal_tls
from octavo.tracing import NO_TRACING, Tracing, start_tracing

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Outside:
    """What reaches outside of this process, in one place so that tests can hold it."""

    make_arena: MakeArena
    inherit: Callable[[], Sequence[ArenaMemory]]  # what an earlier cache service left
    watch_process: Callable[[int], Watched]
    clock: Clock
    reclaim: Callable[[], object] = list  # takes away what nobody holds any more
    on_arena: Callable[[], object] = lambda: None  # told of each arena that was made or taken over
    tracing: Tracing = NO_TRACING


@dataclass(frozen=True, slots=True)
class RunningApp:
    """A cache service that takes calls."""

    service: CacheService
    server: ServerParts
    metrics_port: int  # 0: no metrics are served


def outside_of(config: CacheServiceConfig) -> Outside:
    """The real outside: POSIX shared memory, memory of GPUs, pidfds, the clocks of this machine, a collector of traces.

    Raises:
        ValueError: traces are asked for and cannot be sent.
    """
    directory, owner = config.shared_memory_dir, _name_of(config.listen)
    return Outside(
        make_arena=partial(_make_arena, directory, owner),
        inherit=partial(inherit, directory, owner),
        watch_process=watch_process,
        clock=Clock(),
        reclaim=partial(reclaim_stale, directory),
        tracing=start_tracing("cache-service", config.otel_traces),
    )


def _name_of(listen: str) -> str:
    """What the next one that takes this one's place goes by: the address. A port that is chosen anew names nobody."""
    return "" if listen.endswith(":0") else listen


def _make_arena(
    directory: str, owner: str, arena_id: str, model_fingerprint: str, geometry: KvGeometry, kv_bytes: int
) -> ArenaMemory:
    if parse_ordinal(arena_id) is not None:
        return create_device_arena(arena_id, model_fingerprint, geometry, kv_bytes, driver=load_driver())
    reclaim_stale(directory)  # segments whose last holder died since the start
    return create_arena(arena_id, model_fingerprint, geometry, kv_bytes, directory=directory, owner=owner)


@asynccontextmanager
async def running(
    config: CacheServiceConfig, outside: Outside, service: CacheService | None = None
) -> AsyncIterator[RunningApp]:
    """Serve `config.listen` and `config.metrics_listen` while the context lasts, then unlink every arena.

    What an earlier cache service left at this address is taken over first.

    Raises:
        OSError, ValueError: an address is taken, not ours, or none; or TLS files cannot be used.
    """
    tls = internal_tls(config)
    service = service or CacheService(eviction=Eviction(POLICIES[config.eviction], config.tenant_weights))
    servicer = BlockManagerServicer(
        *(service, config, outside.make_arena, outside.watch_process, outside.clock),
        *(outside.tracing, outside.on_arena),
    )
    _take_over(service, servicer, outside)
    outside.reclaim()
    registry = make_registry(service, tls)
    metrics = start_metrics_server(registry, config.metrics_listen) if config.metrics_listen else None
    try:
        try:
            server = await start_cache_server(
                config.listen,
                servicer,
                enable_reflection=config.reflection,
                tls=tls,
                health_listen=config.health_listen,
            )
        except BaseException:
            service.leave()  # executors still map what was taken over; another may serve it
            raise
        expiry = Expiry(service, config.expiry_interval_s, outside.clock.monotonic_s())
        looking = asyncio.create_task(expiry.run(outside.clock.monotonic_s))
        try:
            await server.set_serving(True)
            yield RunningApp(service, server, metrics.port if metrics else 0)
        finally:
            looking.cancel()
            with suppress(asyncio.CancelledError):
                await looking
            servicer.watching.end()
            await server.drain(config.drain_accept_window_s, config.drain_grace_s)
    finally:
        service.close()
        await asyncio.to_thread(outside.tracing.close)
        if metrics is not None:
            metrics.close()


def _take_over(service: CacheService, servicer: BlockManagerServicer, outside: Outside) -> None:
    memories = outside.inherit()
    if not memories:
        return
    processes: dict[int, Watched] = {}  # by their pids

    def watch(pid: int, started: int) -> Watched | None:
        process = watch_again(pid, started, outside.watch_process)
        if process is not None:
            processes[pid] = process
        return process

    for executor in service.take_over(memories, watch, outside.clock.monotonic_s()):
        servicer.watch(executor, processes[executor.pid])
    outside.on_arena()
