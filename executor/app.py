"""The parts of an executor, put together in order: model, proof, registration, arena, sessions, server.

Here belong construction, its order and its log. Not here: signals and exit codes (`__main__`), what any part does.
"""

import asyncio
import importlib.metadata
import logging
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial

import torch
from prometheus_client import CollectorRegistry

from executor.arena import Arena, KvGeometry, map_arena
from executor.cache_link import CacheLink
from executor.clients.cache import ArenaGrant, CacheClient, Registration
from executor.config import ExecutorConfig
from executor.cuda.arena import map_cuda_arena
from executor.cuda.place import make_runner
from executor.ids import SessionId
from executor.loading import LoadedModel, load
from executor.logits.constraint import ConstraintMaker
from executor.metrics import ExecutorMetrics, MeteredRunner, StateCollector
from executor.model.vocabulary import load_vocabulary
from executor.pending import StepRunner
from executor.servicer import MAX_STEPS_IN_FLIGHT, ExecutorServicer, start_executor_server
from executor.servicer_messages import ExecutorDescription
from executor.session import Session
from executor.session_host import SessionHost
from executor.sessions import SessionStore
from executor.step_check import StepLimits
from octavo.errors import Code, OctavoError
from octavo.metrics import start_metrics_server
from octavo.rpc import IDLE, ServerParts
from octavo.tls import TlsSource
from octavo.tls_metrics import TlsCollector
from octavo.tracing import NO_TRACING, Tracing

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RunningExecutor:
    """An executor that takes steps."""

    server: ServerParts
    description: ExecutorDescription
    metrics_port: int  # 0: no metrics are served
    host: SessionHost


@asynccontextmanager
async def running(
    config: ExecutorConfig,
    on_fatal: Callable[[str], None],
    tls: TlsSource | None = None,
    tracing: Tracing = NO_TRACING,
    on_loaded: Callable[[], None] = lambda: None,
) -> AsyncIterator[RunningExecutor]:
    """Serve while the context lasts, then drain.

    Args:
        on_fatal: told why this process can be of no use any more; it should leave the context.
        tls: of the calls that routers make, and of those to the cache service.
        on_loaded: called when the model is there, before anything is served.

    Raises:
        OctavoError: the model, the attention or the arena cannot be used, or the cache service did not answer in time.
        OSError, ValueError: an address is taken, not ours, or none.
    """
    servicer = ExecutorServicer(tracing)
    server = await start_executor_server(
        config.listen,
        servicer,
        enable_reflection=config.reflection,
        tls=tls,
        health_listen=config.health_listen,
    )
    try:
        loaded = await asyncio.to_thread(load, config)
        on_loaded()
        registration = _registration(config, loaded)
        client = CacheClient(config.cache_service, registration, tls, config.internal_tls_server_name)
        try:
            async with _serving(config, loaded, client, servicer, server, on_fatal, tls) as executor:
                yield executor
        finally:
            await client.close()
    finally:
        await server.stop(0)
        await asyncio.to_thread(tracing.close)


@asynccontextmanager
async def _serving(
    config: ExecutorConfig,
    loaded: LoadedModel,
    client: CacheClient,
    servicer: ExecutorServicer,
    server: ServerParts,
    on_fatal: Callable[[str], None],
    tls: TlsSource | None,
) -> AsyncIterator[RunningExecutor]:
    grant = await client.register(config.register_timeout_s)
    arena = _map(grant, loaded.geometry, config.device)
    description = _describe(config, loaded, grant)
    registry = CollectorRegistry()
    metrics = ExecutorMetrics(registry, loaded.description.name)
    loop = asyncio.get_running_loop()
    runner = await asyncio.to_thread(
        make_runner,
        loaded.model,
        arena,
        loaded.attention,
        config,
        loaded.description.max_context_tokens,
        lambda why: loop.call_soon_threadsafe(on_fatal, why),
    )
    store = _make_store(config, loaded, MeteredRunner(runner, metrics), arena.num_blocks)
    registry.register(TlsCollector({"internal": tls}))
    registry.register(StateCollector(_info(description), lambda: store.num_sessions, lambda: store.num_rows))
    link = CacheLink(client, grant, on_fatal, arena.lost_reason)
    host = SessionHost(store, link, on_idle=partial(server.set_health, IDLE))
    metrics_server = start_metrics_server(registry, config.metrics_listen) if config.metrics_listen else None
    house = asyncio.create_task(host.keep_house())
    house.add_done_callback(lambda task: _report_end(task, on_fatal))
    try:
        servicer.begin(host, description)
        await server.set_serving(True)
        _log_choices(config, description)
        yield RunningExecutor(server, description, metrics_server.port if metrics_server else 0, host)
    finally:
        await server.set_serving(False)
        await host.drain()
        await server.drain(config.drain_accept_window_s, config.drain_grace_s)
        house.cancel()
        with suppress(asyncio.CancelledError):
            await house
        await host.shut_down()
        if metrics_server is not None:
            metrics_server.close()
        arena.close()


def _report_end(house: "asyncio.Task[None]", on_fatal: Callable[[str], None]) -> None:
    if not house.cancelled():
        on_fatal(f"housekeeping failed: {house.exception()!r}")


def _registration(config: ExecutorConfig, loaded: LoadedModel) -> Registration:
    return Registration(
        executor_id=config.executor_id,
        pid=os.getpid(),
        arena_id=config.device,
        model_fingerprint=loaded.description.fingerprint,
        geometry=loaded.geometry,
        kv_bytes=config.kv_memory_mib << 20,
        metrics_address="" if config.metrics_listen.endswith(":0") else config.metrics_listen,  # 0: not known yet
    )


def _map(grant: ArenaGrant, geometry: KvGeometry, device: str) -> Arena:
    if grant.geometry != geometry:
        raise OctavoError(
            Code.FAILED_PRECONDITION, "GEOMETRY_MISMATCH", "the cache service granted an arena of another geometry"
        )
    if grant.cuda is not None:
        return map_cuda_arena(grant.cuda, grant.layout, grant.geometry, torch.device(device).index)
    return map_arena(grant.path, grant.size_bytes, grant.layout, grant.geometry)


def _make_store(config: ExecutorConfig, loaded: LoadedModel, runner: StepRunner, num_blocks: int) -> SessionStore:
    limits = StepLimits(
        block_size=config.block_size,
        num_blocks=num_blocks,
        vocabulary_size=loaded.description.vocabulary_size,
        max_context_tokens=loaded.description.max_context_tokens,
        max_tokens_per_step=config.max_tokens_per_step,
    )

    constraints = ConstraintMaker(lambda: load_vocabulary(loaded.description))

    def make_session(session_id: SessionId) -> Session:
        return Session(session_id, config.max_rows, limits, runner, constraints.make)

    return SessionStore(make_session, config.session_timeout_s)


def _describe(config: ExecutorConfig, loaded: LoadedModel, grant: ArenaGrant) -> ExecutorDescription:
    return ExecutorDescription(
        executor_id=config.executor_id,
        executor_epoch=grant.executor_epoch,
        model=loaded.description,
        arena_id=config.device,
        block_size=config.block_size,
        num_blocks=grant.layout.num_blocks,
        kv_dtype=loaded.geometry.dtype,
        device=config.device,
        attention=loaded.attention.name,
        weights_dtype=loaded.weights,
        max_rows=config.max_rows,
        max_tokens_per_step=config.max_tokens_per_step,
        max_steps_in_flight=MAX_STEPS_IN_FLIGHT,
        version=importlib.metadata.version("octavo"),
    )


def _info(description: ExecutorDescription) -> dict[str, str]:
    return {
        "executor": description.executor_id,
        "model_name": description.model.name,
        "device": description.device,
        "attention": description.attention,
        "weights_dtype": description.weights_dtype,
        "kv_dtype": description.kv_dtype,
        "version": description.version,
    }


def _log_choices(config: ExecutorConfig, description: ExecutorDescription) -> None:
    tokens = (description.num_blocks - 1) * description.block_size
    log.info(
        "executor %s serves %s on %s: device %s, attention %s, weights %s, KV %s, %d threads; "
        "%d blocks of %d tokens (%d tokens in all), context %d tokens, %d rows, %d tokens a step",
        description.executor_id,
        description.model.name,
        config.listen,
        description.device,
        description.attention,
        description.weights_dtype,
        description.kv_dtype,
        torch.get_num_threads(),
        description.num_blocks,
        description.block_size,
        tokens,
        description.model.max_context_tokens,
        description.max_rows,
        description.max_tokens_per_step,
    )
