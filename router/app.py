"""The router as one process: server, fleet, metrics, and an end in order. What each does is in its own module."""

import asyncio
import contextlib
import logging
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from octavo.metrics import MetricsServer, start_metrics_server
from octavo.rpc import MIB, ServerParts, start_server
from octavo.tls import public_tls
from octavo.tls_metrics import TlsCollector
from octavo.tracing import NO_TRACING, Tracing
from router.config import RouterConfig
from router.fleet import Fleet
from router.metrics import RouterMetrics
from router.servicer.accounting import AccountingInterceptor
from router.servicer.authentication import AuthenticationInterceptor
from router.servicer.servicer import SERVICE_NAME, InferenceServicer
from router.servicer.traces import RequestTraces
from router.tenants.gate import Gate
from router.text.tokenizer import load_tokenizer
from router.text.tokenizers import LoadTokenizer
from router.trace import StepTrace

log = logging.getLogger(__name__)

IDLE_POLL_S = 0.05
STOP_GRACE_S = 1.0


class Router:
    """Start it, let it serve, drain it.

    Attributes:
        port: TCP port of the public API; 0 for a Unix socket.

    Raises:
        ValueError: options of TLS or tenants that do not go together, or files of them that cannot be used.
    """

    def __init__(
        self, config: RouterConfig, load: LoadTokenizer = load_tokenizer, tracing: Tracing = NO_TRACING
    ) -> None:
        self._config = config
        self._tls = public_tls(config)
        self._threads = ThreadPoolExecutor(config.tokenizer_threads, thread_name_prefix="tokenizer")
        self._trace = _trace_of(config)
        self._tracing = tracing
        self.metrics = RouterMetrics(lambda: self.fleet.links, self._trace)
        router_id = config.router_id or f"{socket.gethostname()}:{config.listen}"
        self.fleet = Fleet(config, router_id, self.metrics, self._threads, self._show_ready, load)
        self.metrics.begin(link.name for link in self.fleet.links)
        self.metrics.registry.register(TlsCollector({"public": self._tls, "internal": self.fleet.tls}))
        self._gate = Gate(config, self.metrics.registry)
        traces = RequestTraces(tracing)
        self._servicer = InferenceServicer(self.fleet, config, self.metrics, self._gate, traces)
        self._server: ServerParts | None = None
        self._metrics_server: MetricsServer | None = None
        self._is_closed = False
        self._is_ending = False

    async def start(self) -> None:
        """Listen, and begin to connect. Health says NOT_SERVING until a model is served.

        Raises:
            OSError: an address is taken or not ours, or the trace cannot be written.
        """
        if self._trace is not None:
            self._trace.write()  # a path that cannot be written is said now
        keepalive_ms = int(self._config.keepalive_s * 1000)
        self._server = await start_server(
            self._config.listen,
            [(SERVICE_NAME, self._servicer.add_to)],
            enable_reflection=self._config.reflection,
            # A client that vanished without a word is found by pings, and its requests end.
            # gRPC has one ping on its way at a time, and any of them may be the one that is not answered.
            extra_options=(
                ("grpc.keepalive_time_ms", keepalive_ms),
                ("grpc.keepalive_timeout_ms", keepalive_ms // 3),
                ("grpc.http2.ping_timeout_ms", keepalive_ms // 3),
                ("grpc.max_receive_message_length", self._config.max_message_mib * MIB),
            ),
            interceptors=(
                AccountingInterceptor(self.metrics.on_call),
                AuthenticationInterceptor(self._gate.identify),
            ),
            tls=self._tls,
            health_listen=self._config.health_listen,
            max_concurrent_calls=self._config.max_concurrent_calls,
        )
        if self._config.metrics_listen:
            self._metrics_server = start_metrics_server(self.metrics.registry, self._config.metrics_listen)
        self._gate.start()
        self.fleet.start()
        log.info("listening on %s, metrics on port %d", self._config.listen, self.metrics_port)

    @property
    def port(self) -> int:
        return self._server.port if self._server else 0

    @property
    def health_port(self) -> int:
        """Of the address that answers for health alone; 0: none, or a Unix socket."""
        return self._server.health_port if self._server else 0

    @property
    def metrics_port(self) -> int:
        return self._metrics_server.port if self._metrics_server else 0

    async def drain(self) -> None:
        """Say NOT_SERVING, take calls a little longer, let live requests end within the grace, and close."""
        assert self._server is not None, "start comes first"
        self._is_ending = True
        await self._server.set_serving(False)
        if self.fleet.num_live:
            log.info("draining: %d requests", self.fleet.num_live)
        await asyncio.sleep(self._config.drain_accept_window_s)
        going = asyncio.create_task(self._server.take_no_more(self._config.drain_grace_s + STOP_GRACE_S))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._config.drain_grace_s):
                await self._wait_until_idle()
        going.cancel()
        await asyncio.gather(going, return_exceptions=True)
        await self.close()

    async def close(self) -> None:
        """End now: what still lives is refused with UNAVAILABLE, blocks go back, ports are free. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        self._gate.close()
        if self._server is not None:
            await self._server.set_serving(False)
        await self.fleet.close()
        if self._server is not None:
            await self._server.stop(STOP_GRACE_S)
        if self._metrics_server is not None:
            self._metrics_server.close()
        if self._trace is not None:
            self._trace.write()
        await asyncio.to_thread(self._tracing.close)
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _wait_until_idle(self) -> None:
        while self.fleet.num_live:  # noqa: ASYNC110 (a poll while the process ends needs no event of its own)
            await asyncio.sleep(IDLE_POLL_S)

    async def _show_ready(self, is_ready: bool) -> None:
        if self._server is not None:
            await self._server.set_serving(is_ready and not self._is_ending)


def _trace_of(config: RouterConfig) -> StepTrace | None:
    if not config.trace_file:
        return None
    return StepTrace(Path(config.trace_file), config.trace_steps, time.time() - time.monotonic())
