"""Sessions in a running process: the one thread that steps run in, the clock, and the cache service kept informed.

Everything that touches a session goes through one thread in order of arrival, and the event loop never waits for the
model. Where steps are computed by a device, a second thread waits for it and does nothing else, so that the first can
begin the next step meanwhile. Not here: gRPC, and what a session is.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol, TypeVar

from executor.begun import BegunStep
from executor.ids import SessionId, StepId
from executor.sessions import Opened, Opening, SessionStore
from executor.step import Step, StepOutcome
from octavo.errors import Code, OctavoError

log = logging.getLogger(__name__)

T = TypeVar("T")

HOUSEKEEPING_INTERVAL_S = 1.0
_LAST_REPORTS_S = 2.0


class SessionAuthority(Protocol):
    """Who must know which sessions live. Raises OctavoError."""

    async def open_session(self, session_id: SessionId, opening: Opening) -> None:
        """Before the first step."""

    async def close_session(self, session_id: SessionId) -> None:
        """After the last step."""

    async def orphaned_sessions(self) -> frozenset[SessionId]:
        """Sessions whose router is gone for good."""


async def _nobody_asks(_: bool) -> None: ...


class SessionHost:
    """The session store behind its thread."""

    def __init__(
        self,
        store: SessionStore,
        authority: SessionAuthority,
        on_authority_lost: Callable[[OctavoError], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
        on_idle: Callable[[bool], Awaitable[None]] = _nobody_asks,
    ) -> None:
        """What it tells:

        Args:
            on_authority_lost: called with each error of a regular call to the authority; must not block.
            on_idle: told in each round of housekeeping whether no session is held, and every end was reported.
        """
        self._store = store
        self._authority = authority
        self._on_authority_lost = on_authority_lost
        self._clock = clock
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="steps")
        self._waiting = ThreadPoolExecutor(max_workers=1, thread_name_prefix="results")
        self._on_idle = on_idle
        self._unreported: set[SessionId] = set()
        self._streams: set[Callable[[], None]] = set()
        self._is_draining = False
        self._wake = asyncio.Event()

    async def open(self, opening: Opening) -> Opened:
        """Continue or begin a session; a fresh one is announced first.

        Raises:
            OctavoError: as `SessionStore.open`, and as the authority refuses the session.
        """
        opened = await self._run(self._store.open, opening)
        self._wake.set()
        if opened.fresh:
            try:
                await self._authority.open_session(opened.session_id, opening)
            except BaseException:
                self.close(opened)
                raise
        return opened

    def process(self, opened: Opened, step: Step) -> "asyncio.Future[StepOutcome]":
        """Queue a step; its outcome comes when it has run. The future raises as `SessionStore.begin`."""
        answer: Future[StepOutcome] = Future()
        self._thread.submit(self._begin, opened, step, answer)
        return asyncio.wrap_future(answer)

    def acknowledge(self, opened: Opened, step_id: StepId) -> "asyncio.Future[None]":
        """Queue an acknowledgement behind the steps before it."""
        return self._run(self._store.acknowledge, opened, step_id)

    def close(self, opened: Opened) -> None:
        """End the session once the steps before have run."""
        self._thread.submit(self._store.close, opened)
        self._wake.set()

    def disconnect(self, opened: Opened) -> None:
        """The connection is gone."""
        self._thread.submit(self._store.disconnect, opened, self._clock())

    @property
    def is_draining(self) -> bool:
        """Whether fresh sessions are refused."""
        return self._is_draining

    async def drain(self) -> int:
        """Refuse fresh sessions, and tell the live ones. Returns their number."""
        self._is_draining = True
        num_live = await self._run(self._store.drain)
        for tell in list(self._streams):
            tell()
        return num_live

    async def take_again(self) -> None:
        """Take fresh sessions again: nobody can go on elsewhere, or nothing is to end any more."""
        self._is_draining = False
        await self._run(self._store.take_again)

    def listen(self, on_drain: Callable[[], None]) -> Callable[[], None]:
        """Tell a stream of each drain, and of one that began already. Returns what ends that."""
        self._streams.add(on_drain)
        if self._is_draining:
            on_drain()
        return lambda: self._streams.discard(on_drain)

    async def keep_house(self, interval_s: float = HOUSEKEEPING_INTERVAL_S) -> None:
        """For ever: end what is over, and report every end until the authority has heard it."""
        while True:
            self._wake.clear()
            is_idle = False
            try:
                await self._run(self._store.expire, self._clock())
                await self._end_orphans()
                await self._report_ended()
                is_idle = await self._run(lambda: self._store.is_idle)
            except OctavoError as error:
                self._on_authority_lost(error)
            await self._on_idle(is_idle)
            try:
                # Not wait_for: in Python 3.11 it can lose the cancellation that ends this task.
                async with asyncio.timeout(interval_s):
                    await self._wake.wait()
            except TimeoutError:
                continue

    async def shut_down(self) -> None:
        """End every session after the steps that are queued, and report what can be reported in short time."""
        await self._run(self._store.end_all)
        try:
            async with asyncio.timeout(_LAST_REPORTS_S):
                await self._report_ended()
        except (OctavoError, TimeoutError) as error:
            log.info("sessions not reported closed (the end of this process says it too): %s", error)
        self._waiting.shutdown(wait=True)  # what it waits for comes back to the other thread
        self._thread.shutdown(wait=True)

    def _begin(self, opened: Opened, step: Step, answer: "Future[StepOutcome]") -> None:
        if not answer.set_running_or_notify_cancel():  # whoever asked has gone
            return
        try:
            begun = self._store.begin(opened, step)
        except BaseException as error:
            answer.set_exception(error)
            return
        if isinstance(begun, BegunStep):
            self._waiting.submit(self._wait, opened, begun, answer)
        else:
            answer.set_result(begun)

    def _wait(self, opened: Opened, begun: BegunStep, answer: "Future[StepOutcome]") -> None:
        try:
            begun.output.wait()
        finally:  # what went wrong on the device is told by the end of the step
            self._thread.submit(self._finish, opened, begun, answer)

    def _finish(self, opened: Opened, begun: BegunStep, answer: "Future[StepOutcome]") -> None:
        try:
            answer.set_result(self._store.finish(opened, begun))
        except BaseException as error:
            answer.set_exception(error)

    async def _end_orphans(self) -> None:
        orphans = await self._authority.orphaned_sessions()
        if orphans:
            log.info("ending sessions whose leases are over: %s", sorted(orphans))
            await self._run(self._store.end_sessions, orphans)

    async def _report_ended(self) -> None:
        self._unreported.update(await self._run(self._store.take_ended))
        for session_id in sorted(self._unreported):
            try:
                await self._authority.close_session(session_id)
            except OctavoError as error:
                if error.code is Code.UNAVAILABLE:
                    raise
                log.warning("the cache service does not take the end of session %d: %s", session_id, error.message)
            self._unreported.discard(session_id)

    def _run(self, function: Callable[..., T], *arguments: object) -> "asyncio.Future[T]":
        return asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)
