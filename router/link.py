"""The connections that keep an engine fed: executor session and cache lease, opened, watched, and opened again.

life      one model, one lease: ends when the lease is lost or the executor serves something else
session   within a life: an executor that died and came back is sent all rows again, and streams go on
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Executor as ThreadExecutor
from dataclasses import dataclass
from typing import Any

from octavo.errors import Code, OctavoError
from router.backend import Backend
from router.clients.cache import CacheClient, Lease, LeaseMutations
from router.clients.executor import ExecutorClient, Session
from router.config import RouterConfig
from router.engine import Engine, EngineLimits
from router.model import Model
from router.observer import Observer
from router.outbox import Outbox
from router.text.tokenizer import Tokenizer, load_tokenizer

log = logging.getLogger(__name__)

FIRST_BACKOFF_S = 0.1
MAX_BACKOFF_S = 2.0


class _Complaints:
    """Says why there is no connection: once for each reason, not once for each try."""

    def __init__(self) -> None:
        self._last_reason = ""

    def tell(self, what: str, error: OctavoError) -> None:
        """A try failed."""
        is_news = error.reason != self._last_reason
        self._last_reason = error.reason
        # What is not there yet, or starts, is waited for; all else is somebody's mistake.
        level = logging.INFO if error.code is Code.UNAVAILABLE else logging.WARNING
        log.log(level if is_news else logging.DEBUG, "%s: %s; trying again until it is there", what, error.message)

    def forget(self) -> None:
        """A try succeeded."""
        self._last_reason = ""


LoadTokenizer = Callable[[str, int], Tokenizer]


@dataclass(frozen=True, slots=True)
class _Life:
    """What lives as long as a lease."""

    backend: Backend
    lease: Lease
    mutations: LeaseMutations


class Link:
    """Keeps the router connected; the servicer's view of what is served.

    Args:
        on_ready: told whenever new requests can, or can no longer, be taken.
        load: makes the tokenizer of a model source.
    """

    def __init__(
        self,
        config: RouterConfig,
        router_id: str,
        observer: Observer,
        threads: ThreadExecutor,
        on_ready: Callable[[bool], Awaitable[None]],
        load: LoadTokenizer = load_tokenizer,
    ) -> None:
        self.router_id = router_id
        self.is_ready = False
        self.is_draining = False
        self._config = config
        self._observer = observer
        self._threads = threads
        self._on_ready = on_ready
        self._load = load
        self._executor = ExecutorClient(config.executor)
        self._cache = CacheClient(config.cache_service, router_id, config.lease_ttl_s, config.recovery_grace_s)
        self._life: _Life | None = None
        self._task: asyncio.Task[None] | None = None
        self._session: Session | None = None
        self._complaints = _Complaints()
        self._tokenizers: dict[str, Tokenizer] = {}  # of the last model, by its fingerprint

    @property
    def backend(self) -> Backend | None:
        return self._life.backend if self._life else None

    @property
    def router_epoch(self) -> int:
        return self._life.lease.client_epoch if self._life else 0

    def start(self) -> None:
        """Begin to connect."""
        self._task = asyncio.create_task(self._run(), name="link")

    async def close(self) -> None:
        """Leave in order: live requests fail, the session ends, all blocks go back, connections close."""
        self.is_draining = True
        life = self._life
        sent_steps = {}
        if life is not None:
            life.backend.engine.fail_all(_draining())
            sent_steps = life.backend.engine.sent_steps()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._session is not None:
            await self._session.close()
        if life is not None:
            try:
                await self._cache.close_lease(life.lease, sent_steps)
            except OctavoError as error:
                log.warning("the lease was not closed (%s); the cache service will let it expire", error.message)
        await self._executor.close()
        await self._cache.close()

    async def _run(self) -> None:
        """Connect, and connect again, for ever."""
        backoff_s = FIRST_BACKOFF_S
        while True:
            before = self._life
            try:
                await self._live()
            except OctavoError as error:
                self._complaints.tell("not serving", error)
            except Exception:
                log.exception("not serving; trying again in %.1f s", backoff_s)
            if self._life is not before:  # it was connected
                backoff_s = FIRST_BACKOFF_S
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)

    async def _live(self) -> None:
        """One life, to its end."""
        model = await self._executor.describe()
        tokenizer = await self._tokenizer_of(model)
        lease = await self._cache.open_lease()
        outbox = Outbox()
        engine = Engine(model, _limits(self._config, model), outbox, self._observer)
        mutations = self._cache.mutations(lease, model, outbox, engine)
        backend = Backend(model, engine, tokenizer, self._threads)
        self._life = _Life(backend, lease, mutations)
        log.info(
            "serving %s on %s: %d blocks of %d tokens", model.name, model.device, model.num_blocks, model.block_size
        )
        try:
            await _until_one_ends(engine.run(), mutations.run(), self._keep_session(engine, lease))
        finally:
            await self._set_ready(False)
            if self._session is not None and not self.is_draining:
                self._session.abandon()
                self._session = None
            engine.detach()
            engine.fail_all(_lost())

    async def _tokenizer_of(self, model: Model) -> Tokenizer:
        if model.fingerprint not in self._tokenizers:
            loop = asyncio.get_running_loop()
            tokenizer = await loop.run_in_executor(self._threads, self._load, model.source, model.vocabulary_size)
            self._tokenizers = {model.fingerprint: tokenizer}
        return self._tokenizers[model.fingerprint]

    async def _keep_session(self, engine: Engine, lease: Lease) -> None:
        """Session after session on the same lease.

        Raises:
            OctavoError: none could be opened within the grace, or the executor now serves something else.
        """
        while True:
            try:
                async with asyncio.timeout(self._config.recovery_grace_s):
                    session = await self._open_session(engine.model, lease)
            except TimeoutError:
                raise _lost() from None
            await self._pump(session, engine)

    async def _open_session(self, model: Model, lease: Lease) -> Session:
        backoff_s = FIRST_BACKOFF_S
        while True:
            try:
                now = await self._executor.describe()
                if not now.is_same_pool(model):
                    raise ValueError(f"the executor now serves {now.name}, another model or another pool")
                return await self._executor.open_session(self.router_id, lease.client_epoch)
            except OctavoError as error:
                if error.code is Code.FAILED_PRECONDITION:
                    raise  # this epoch is over: a new lease is needed
                self._complaints.tell("no session with the executor", error)
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)

    async def _pump(self, session: Session, engine: Engine) -> None:
        """Outcomes into the engine until the session is lost."""
        self._session = session
        self._complaints.forget()
        engine.attach(session.key, session.send)
        await self._set_ready(True)
        try:
            while True:
                engine.on_outcome(await session.receive())
        except OctavoError as error:
            log.warning("the session with the executor is lost: %s", error.message)
        await self._set_ready(False)
        engine.detach()
        session.abandon()
        self._session = None

    async def _set_ready(self, is_ready: bool) -> None:
        self.is_ready = is_ready
        await self._on_ready(is_ready)


async def _until_one_ends(*works: Coroutine[Any, Any, None]) -> None:
    """Run all until the first ends, by itself or by an error, which is raised; the others are cancelled."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _limits(config: RouterConfig, model: Model) -> EngineLimits:
    return EngineLimits(
        max_queued_requests=config.max_queued_requests,
        max_running_requests=min(config.max_running_requests, model.max_rows),
        max_tokens_per_step=min(config.max_tokens_per_step, model.max_tokens_per_step),
        max_steps_in_flight=min(config.max_steps_in_flight, model.max_steps_in_flight),
        slack_blocks=config.slack_blocks,
    )


def _draining() -> OctavoError:
    return OctavoError(
        Code.UNAVAILABLE, "DRAINING", "this router is going away; send to another one", retry_after_s=1.0
    )


def _lost() -> OctavoError:
    return OctavoError(
        Code.UNAVAILABLE,
        "ENGINE_LOST",
        "the engine was lost while this request ran; send it again",
        retry_after_s=1.0,
    )
