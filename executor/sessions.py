"""All sessions of this executor: one per router, which epoch owns it, and when it ends.

    Open, higher epoch            the old session ends, a fresh one begins
    Open, equal epoch             the session goes on where it is held; with takeover, ends and begins afresh
    Open, lower epoch             FAILED_PRECONDITION, STALE_EPOCH
    disconnected for too long     ends

Only the newest connection of a session may run steps. Time is an argument. Every end is kept in a list until its
reader has reported it to the cache service, which frees blocks by it.
"""

from collections.abc import Callable
from dataclasses import dataclass

from executor.begun import BegunStep
from executor.ids import Attachment, RouterEpoch, RouterId, SessionId, StepId
from executor.session import Session
from executor.step import Step, StepOutcome
from octavo.errors import Code, FieldViolation, OctavoError, invalid_argument


@dataclass(frozen=True, slots=True)
class Opening:
    """What a router asks for."""

    router_id: RouterId
    router_epoch: RouterEpoch
    takeover: bool = False
    last_seen_step: StepId = StepId(0)


@dataclass(frozen=True, slots=True)
class Opened:
    """What it got."""

    router_id: RouterId
    session_id: SessionId
    attachment: Attachment
    fresh: bool
    last_applied_step: StepId


@dataclass(slots=True)
class _Held:
    """A session and who may use it."""

    session: Session
    epoch: RouterEpoch
    attachment: Attachment
    disconnected_at_s: float | None = None  # None: connected


class SessionStore:
    """The only owner of the sessions. Used by one thread."""

    def __init__(self, make_session: Callable[[SessionId], Session], timeout_s: float) -> None:
        self._make_session = make_session
        self._timeout_s = timeout_s
        self._held: dict[RouterId, _Held] = {}
        self._last_session_id = 0
        self._last_attachment = 0
        self._draining = False
        self._admitted: set[RouterId] = set()  # during a drain: who had a session when it began
        self._ended: list[SessionId] = []

    @property
    def num_sessions(self) -> int:
        """Sessions that are held, connected or not."""
        return len(self._held)

    @property
    def is_idle(self) -> bool:
        """No session is held, and of none that was, the end has still to be taken."""
        return not self._held and not self._ended

    @property
    def num_rows(self) -> int:
        """Rows in the slots of all sessions."""
        return sum(held.session.num_rows for held in list(self._held.values()))

    def drain(self) -> int:
        """Refuse fresh sessions from now on. Returns the number of live ones.

        Whoever has one now may open it anew: it may find that it can go on nowhere else.
        """
        self._admitted = set(self._held) | (self._admitted if self._draining else set())
        self._draining = True
        return self.num_sessions

    def take_again(self) -> None:
        """End of a drain: fresh sessions are taken."""
        self._draining = False

    def open(self, opening: Opening) -> Opened:
        """Continue or begin a router's session, and take it from any earlier connection.

        Raises:
            OctavoError: FAILED_PRECONDITION (STALE_EPOCH), UNAVAILABLE (DRAINING), INVALID_ARGUMENT.
        """
        held = self._held.get(opening.router_id)
        _check_opening(opening, held)
        continues = held is not None and held.epoch == opening.router_epoch and not opening.takeover
        if not continues:
            held = self._begin(opening)
        assert held is not None
        self._last_attachment += 1
        held.attachment = Attachment(self._last_attachment)
        held.disconnected_at_s = None
        held.session.settle()  # the router is told of every step that was begun
        held.session.acknowledge(opening.last_seen_step)
        session = held.session
        return Opened(opening.router_id, session.session_id, held.attachment, not continues, session.last_applied_step)

    def begin(self, opened: Opened, step: Step) -> BegunStep | StepOutcome:
        """Begin a step of a connection; see `Session.begin`.

        Raises:
            OctavoError: ABORTED (SESSION_SUPERSEDED), another connection took the session, or it ended.
        """
        return self._of(opened).session.begin(step)

    def finish(self, opened: Opened, begun: BegunStep) -> StepOutcome:
        """The outcome of a step that was begun, waited for. The end of a session finishes its steps."""
        return begun.outcome or self._of(opened).session.finish(begun)

    def acknowledge(self, opened: Opened, step_id: StepId) -> None:
        """Drop the results up to step_id. Raises as `begin`."""
        self._of(opened).session.acknowledge(step_id)

    def close(self, opened: Opened) -> None:
        """End the connection's session; nothing if it is no longer this connection's."""
        held = self._held.get(opened.router_id)
        if held is not None and held.attachment == opened.attachment:
            self._end(opened.router_id)

    def disconnect(self, opened: Opened, now_s: float) -> None:
        """The connection is gone; its session waits for the next one."""
        held = self._held.get(opened.router_id)
        if held is not None and held.attachment == opened.attachment:
            held.disconnected_at_s = now_s

    def end_sessions(self, session_ids: frozenset[SessionId]) -> None:
        """End sessions by id, whoever is connected: their leases are over."""
        for router_id, held in list(self._held.items()):
            if held.session.session_id in session_ids:
                self._end(router_id)

    def end_all(self) -> None:
        """End every session."""
        for router_id in list(self._held):
            self._end(router_id)

    def expire(self, now_s: float) -> None:
        """End the sessions whose routers stayed away."""
        for router_id, held in list(self._held.items()):
            if held.disconnected_at_s is not None and now_s - held.disconnected_at_s >= self._timeout_s:
                self._end(router_id)

    def take_ended(self) -> list[SessionId]:
        """The sessions that ended since the last call: no step of them runs or will run."""
        ended, self._ended = self._ended, []
        return ended

    def _of(self, opened: Opened) -> _Held:
        held = self._held.get(opened.router_id)
        if held is None or held.attachment != opened.attachment:
            raise OctavoError(
                Code.ABORTED,
                "SESSION_SUPERSEDED",
                f"session {opened.session_id} of {opened.router_id!r} ended or has a newer connection; open again",
            )
        return held

    def _begin(self, opening: Opening) -> _Held:
        if self._draining and opening.router_id not in self._admitted:
            raise OctavoError(
                Code.UNAVAILABLE, "DRAINING", "this executor takes no new sessions; use another", retry_after_s=1.0
            )
        if opening.router_id in self._held:
            self._end(opening.router_id)
        self._last_session_id += 1
        session = self._make_session(SessionId(self._last_session_id))
        held = _Held(session, opening.router_epoch, Attachment(0))
        self._held[opening.router_id] = held
        return held

    def _end(self, router_id: RouterId) -> None:
        session = self._held.pop(router_id).session
        session.settle()  # its blocks go to others once the end is reported
        self._ended.append(session.session_id)


def _check_opening(opening: Opening, held: _Held | None) -> None:
    if not opening.router_id:
        raise invalid_argument(FieldViolation("open.router_id", "empty; it names the router"))
    if held is not None and opening.router_epoch < held.epoch:
        raise OctavoError(
            Code.FAILED_PRECONDITION,
            "STALE_EPOCH",
            f"open.router_epoch: {opening.router_epoch}, but {opening.router_id!r} is here with {held.epoch}: "
            f"a newer process of this router took over",
        )
