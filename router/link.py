"""The connections that keep one engine fed: executor session and cache lease, opened, watched, and opened again.

life      one model, one lease: ends when the lease is lost or the executor serves something else
session   within a life: an executor that died and came back is sent all rows again, and streams go on
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Executor as ThreadExecutor
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from octavo.errors import Code, OctavoError
from octavo.tls import TlsSource
from router import refusals
from router.backend import Backend
from router.backoff import Backoff
from router.clients.cache import CacheClient, Lease, LeaseMutations
from router.clients.executor import ExecutorClient, Session
from router.config import EngineAddress, RouterConfig
from router.engine import Engine, EngineLimits
from router.model import Model
from router.observer import Observers
from router.outbox import Outbox
from router.pool import Pool
from router.text.tokenizer import Tokenizer
from router.text.tokenizers import Tokenizers

log = logging.getLogger(__name__)

# The whole grace was waited for already. What else ends a life takes the lease alone.
GIVEN_UP = ("ENGINE_LOST", "CACHE_SERVICE_LOST", "MODEL_CHANGED")
FIRST_BACKOFF_S = 0.1
MAX_UNHEARD_WAITS = 6
HANDOVER_INTERVAL_S = 0.25  # between two looks for a successor of an executor that wants to end
MAX_BACKOFF_S = 2.0
MAX_SESSION_BACKOFF_S = 0.25  # running requests wait, and most of an executor's new start is behind it by then
# After a fault of our own the same may happen again at once: as Kubernetes does with a container that crashes.
FIRST_FAULT_PAUSE_S = 1.0
MAX_FAULT_PAUSE_S = 60.0
FAULT_FORGOTTEN_S = 300.0


class _Complaints:
    """Says why there is no connection to an engine: once for each reason, not once for each try."""

    def __init__(self, engine: str) -> None:
        self._engine = engine
        self._last_reason = ""

    def tell(self, what: str, error: OctavoError) -> None:
        """A try failed."""
        is_news = error.reason != self._last_reason
        self._last_reason = error.reason
        # What is not there yet, or starts, is waited for; all else is somebody's mistake.
        level = logging.INFO if error.code is Code.UNAVAILABLE else logging.WARNING
        text = "%s (%s): %s; trying again until it is there"
        log.log(level if is_news else logging.DEBUG, text, what, self._engine, error.message)

    def forget(self) -> None:
        """A try succeeded."""
        self._last_reason = ""


@dataclass(frozen=True, slots=True)
class _Life:
    """What lives as long as a lease."""

    backend: Backend
    lease: Lease
    mutations: LeaseMutations


class LinkState(Enum):
    """How it stands with an engine.

    CONNECTING: not reached yet, or lost. SERVING: it takes requests. FAULTED: the router itself failed on it.
    """

    CONNECTING = auto()
    SERVING = auto()
    FAULTED = auto()


@dataclass(frozen=True, slots=True)
class Common:
    """What all links of a router share.

    Attributes:
        on_ready: told whenever a link can, or can no longer, take new requests.
        tls: of the calls to executors and cache services.
    """

    config: RouterConfig
    router_id: str
    observers: Observers
    tokenizers: Tokenizers
    threads: ThreadExecutor
    on_ready: Callable[[], Awaitable[None]]
    tls: TlsSource | None


class Link:
    """Keeps the router connected to one engine.

    Attributes:
        name: of the engine, as configured.
        num_wanted_spares: executors that should be ready beside the one that serves.
        client_id: what executor and cache service know this link by.
        model: what the engine serves, or served last; None: it was never reached.
        is_ready: whether new requests are taken.
    """

    def __init__(self, address: EngineAddress, common: Common) -> None:
        config = common.config
        self.name = address.name
        self.num_wanted_spares = address.num_wanted_spares
        self.client_id = f"{common.router_id}/{address.name}"
        self.model: Model | None = None
        self.is_ready = False
        self._common = common
        self._config = config
        tls, server_name = common.tls, config.internal_tls_server_name
        addresses = (address.executor, *address.spare_executors)
        self._pool = Pool(address.name, [(each, ExecutorClient(each, tls, server_name)) for each in addresses])
        self._watch: asyncio.Task[None] | None = None
        self._cache_address = address.cache_service
        patience_s = config.recovery_grace_s
        self._cache = CacheClient(
            address.cache_service, self.client_id, config.lease_ttl_s, patience_s, tls, server_name
        )
        self._life: _Life | None = None
        self._carried: Backend | None = None  # between two lives: requests whose lease was lost
        self._expiry: asyncio.Task[None] | None = None  # of those
        self._task: asyncio.Task[None] | None = None
        self._session: Session | None = None
        self._is_closing = False
        self._is_faulted = False
        self._fault_pauses = Backoff(FIRST_FAULT_PAUSE_S, MAX_FAULT_PAUSE_S)
        self._complaints = _Complaints(self.name)

    @property
    def backend(self) -> Backend | None:
        return self._life.backend if self._life else None

    @property
    def num_ready_spares(self) -> int:
        """Executors that could take over now."""
        return self._pool.num_ready_spares

    @property
    def state(self) -> LinkState:
        if self.is_ready:
            return LinkState.SERVING
        return LinkState.FAULTED if self._is_faulted else LinkState.CONNECTING

    @property
    def router_epoch(self) -> int:
        return self._life.lease.client_epoch if self._life else 0

    def start(self) -> None:
        """Begin to connect."""
        self._task = asyncio.create_task(self._run(), name="link")
        self._watch = asyncio.create_task(self._pool.watch(), name="pool")

    async def close(self) -> None:
        """Leave in order: live requests fail, the session ends, all blocks go back, connections close."""
        self._is_closing = True
        life = self._life
        sent_steps = {}
        if life is not None:
            life.backend.engine.fail_all(refusals.draining())
            sent_steps = life.backend.engine.sent_steps()
        tasks = [task for task in (self._task, self._watch) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._session is not None:
            await self._session.close()
        if life is not None:
            try:
                await self._cache.close_lease(life.lease, sent_steps)
            except OctavoError as error:
                log.warning("the lease was not closed (%s); the cache service will let it expire", error.message)
        if self._expiry is not None:
            self._expiry.cancel()
        if self._carried is not None:
            await self._carried.close()
        await self._pool.close()
        await self._cache.close()

    async def _run(self) -> None:
        """Connect, and connect again, for ever."""
        backoff = Backoff(FIRST_BACKOFF_S, MAX_BACKOFF_S)
        while True:
            before, began = self._life, time.monotonic()
            try:
                await self._live()
            except OctavoError as error:
                self._complaints.tell("not serving", error)
                if self._life is not before:  # it was connected
                    backoff.reset()
                wait_s = backoff.next_s()
            except Exception:
                wait_s = self._take_fault(time.monotonic() - began)
            await asyncio.sleep(wait_s)

    def _take_fault(self, lived_s: float) -> float:
        """Something is wrong with the router itself: loud, counted, and no reason to hurry. Returns the pause."""
        if lived_s > FAULT_FORGOTTEN_S:
            self._fault_pauses.reset()
        self._is_faulted = True
        self._common.observers.on_fault(self.name)
        pause_s = self._fault_pauses.next_s()
        text = "a fault of the router on engine %s, a defect to report: its requests end with INTERNAL; again in %.0f s"
        log.exception(text, self.name, pause_s)
        return pause_s

    async def _live(self) -> None:
        """One life, to its end."""
        self.model = model = await self._pool.describe()
        tokenizer = await self._common.tokenizers.of(model)
        lease = await self._cache.open_lease()
        backend = await self._take_carried(model) or self._make_backend(model, tokenizer)
        engine = backend.engine
        mutations = self._cache.mutations(lease, model, engine.outbox, engine)
        self._life = _Life(backend, lease, mutations)
        blocks = f"{model.num_blocks} blocks of {model.block_size} tokens"
        at = f"{self.name}, executor {self._pool.serving}, on {model.device}"
        log.info("serving %s by %s: %s", model.name, at, blocks)
        is_carried = False
        try:
            await _until_one_ends(engine.run(), mutations.run(), self._keep_session(self._life))
        except OctavoError as error:
            is_carried = error.reason not in GIVEN_UP
            raise
        except Exception:
            engine.fail_all(refusals.router_fault())  # sent again, they could do the same again: not UNAVAILABLE
            raise
        finally:
            await self._set_ready(False)
            if self._session is not None and not self._is_closing:
                self._session.abandon()
                self._session = None
            engine.detach()
            if is_carried:
                engine.lose_lease()
                self._carried = backend
                self._expiry = asyncio.create_task(self._expire_carried(), name="carried requests")
            else:
                engine.fail_all(refusals.engine_lost())
                await backend.close()

    def _make_backend(self, model: Model, tokenizer: Tokenizer) -> Backend:
        observer = self._common.observers.of(self.name, model.name)
        engine = Engine(model, _limits(self._config, model), Outbox(), observer)
        pool = (self._cache_address, model.arena_id, model.fingerprint, model.num_blocks)
        return Backend(self.name, model, engine, tokenizer, self._common.threads, pool)

    async def _take_carried(self, model: Model) -> Backend | None:
        """What served before, with its requests, if it was the same model on the same pool; else they fail."""
        if self._expiry is not None:
            self._expiry.cancel()
        carried, self._carried = self._carried, None
        if carried is not None and carried.model != model:
            carried.engine.fail_all(refusals.engine_lost())
            await carried.close()
            return None
        return carried

    async def _expire_carried(self) -> None:
        """Requests without a lease wait for the next one, and no longer than for anything else."""
        await asyncio.sleep(self._config.recovery_grace_s)
        carried, self._carried = self._carried, None
        if carried is not None:
            carried.engine.fail_all(refusals.engine_lost())
            await carried.close()

    async def _keep_session(self, life: _Life) -> None:
        """Session after session on the same lease.

        Raises:
            OctavoError: none could be opened within the grace, or the executor now serves something else.
        """
        while True:
            try:
                async with asyncio.timeout(self._config.recovery_grace_s):
                    session = await self._open_session(life)
            except TimeoutError:
                raise refusals.engine_lost() from None
            await self._pump(session, life.backend.engine)

    async def _open_session(self, life: _Life) -> Session:
        model = life.backend.model
        backoff = Backoff(FIRST_BACKOFF_S, MAX_SESSION_BACKOFF_S)
        num_waits = 0  # for one that is about to be dead, or to say that its session is over: requests may wait as long
        while True:
            pause_s = None
            try:
                num_reconciled = life.mutations.num_reconciled
                session = await self._pool.open_session(model, self.client_id, life.lease.client_epoch)
                if num_reconciled == life.mutations.num_reconciled:
                    return session
                # A restarted cache service was not told of this session and waits for its end: take another.
                session.abandon()
            except OctavoError as error:
                if error.code is Code.FAILED_PRECONDITION:
                    raise  # this epoch is over: a new lease is needed
                self._complaints.tell("no session with an executor", error)
                if error.reason == "PREDECESSOR_ALIVE":
                    pause_s = error.retry_after_s
                    num_waits += 1
            if pause_s is None or num_waits > MAX_UNHEARD_WAITS:
                await self._set_ready(False)
            await asyncio.sleep(pause_s or backoff.next_s())

    async def _pump(self, session: Session, engine: Engine) -> None:
        """Outcomes into the engine until the session is lost."""
        self._session = session
        self._complaints.forget()
        engine.attach(session.key, session.send)
        await self._set_ready(True)
        try:
            await _until_one_ends(self._take_outcomes(session, engine), self._leave_when_told(session, engine))
        except OctavoError as error:
            if not (engine.is_paused and error.reason == "SESSION_ENDED"):  # as was asked for
                log.warning("the session with the executor is lost (%s): %s", self.name, error.message)
        engine.take_results()
        if not (engine.is_paused or self._pool.num_ready_spares):
            await self._set_ready(False)
        engine.detach()
        session.abandon()
        self._session = None

    @staticmethod
    async def _take_outcomes(session: Session, engine: Engine) -> None:
        while True:
            engine.on_outcome(await session.receive())

    async def _leave_when_told(self, session: Session, engine: Engine) -> None:
        """Once the executor wants to end and another can go on, end the session behind the steps on their way."""
        while not engine.is_paused:
            await session.is_to_end.wait()
            session.is_to_end.clear()
            while await self._pool.is_draining():
                if await self._pool.choose_successor():
                    engine.pause()
                    session.leave()
                    break
                await asyncio.sleep(HANDOVER_INTERVAL_S)
        await asyncio.Event().wait()  # for the session's end, which the other one sees

    async def _set_ready(self, is_ready: bool) -> None:
        self.is_ready = is_ready
        self._is_faulted = self._is_faulted and not is_ready
        await self._common.on_ready()


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
        poison_limit=config.poison_limit,
        max_prefill_tokens_beside_decodes=config.max_prefill_tokens_beside_decodes,
    )
