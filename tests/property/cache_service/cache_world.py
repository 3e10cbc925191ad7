"""Routers, executors and KV memory around a cache service, small enough to be random and exact enough to judge it.

Every slot of every block holds what was computed into it: the extras and the whole history up to its position. So any
wrong sharing, early reuse, lost fence or bad copy shows up as a wrong value where a live sequence, or a step in
flight, reads. Nothing here knows how the cache service works.
"""

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from cache_service.block import BlockId
from cache_service.fence import END_OF_SESSION, SessionKey, SessionStep
from cache_service.operation import (
    Allocated,
    Commit,
    Extended,
    Extension,
    Fork,
    Forked,
    LeaseHeader,
    LeaseId,
    Release,
    SequenceId,
    SequenceSnapshot,
)
from cache_service.prefix import Extras
from octavo.errors import Code, OctavoError
from tests.property.cache_service.cache_drivers import ARENA, TTL_S, CacheDriver, FakeMemory, allocation

POISON = None
Value = tuple[str, tuple[int, ...]] | None  # (extras, history) or poison


@dataclass(eq=False)
class Row:
    """A sequence as its router knows it."""

    sequence_id: int
    client: "Client"
    extras: dict[str, str]
    tokens: list[int]
    table: list[int]
    num_known: int  # tokens that the manager was told
    num_computed: int  # of received steps
    num_planned: int  # of sent steps
    bypass: bool = False
    num_committed: int = 0
    copy: tuple[int, int] | None = None  # rides the first step of each session, until a step is received
    copy_sent: bool = False  # in the present session
    last_step: dict[SessionKey, int] = field(default_factory=dict)
    session: "Session | None" = None
    ended: bool = False

    def value(self, position: int) -> Value:
        return (repr(sorted(self.extras.items())), tuple(self.tokens[: position + 1]))


@dataclass(eq=False)
class Part:
    """One row's share of a step: what it reads and writes, fixed when the step was sent."""

    row: Row
    start: int
    end: int
    table: tuple[int, ...]
    values: tuple[Value, ...]  # of positions 0 .. end


@dataclass(eq=False)
class Step:
    step_id: int
    parts: list[Part]
    copies: list[tuple[int, int]]

    def blocks(self) -> set[int]:
        return {block for part in self.parts for block in part.table} | {b for copy in self.copies for b in copy}


@dataclass(eq=False)
class Session:
    key: SessionKey
    client: "Client"
    sent: list[Step] = field(default_factory=list)  # not executed
    executed: list[Step] = field(default_factory=list)  # not received
    last_sent: int = 0
    last_received: int = 0
    last_told: int = 0  # acknowledged in a message


@dataclass(eq=False)
class Client:
    client_id: str
    lease_id: LeaseId
    epoch: int
    number: int = 0
    rows: list[Row] = field(default_factory=list)
    next_id: int = 1


class CacheWorld:
    """Everything around one cache service with one arena. Every method is one thing that can happen."""

    def __init__(self, driver: CacheDriver, num_blocks: int, block_size: int, num_executors: int = 2) -> None:
        self.driver = driver
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.memory: list[list[Value]] = [[POISON] * block_size for _ in range(num_blocks)]
        self.epochs = {f"e{i}": driver.register(f"e{i}", num_blocks, block_size) for i in range(num_executors)}
        self.sessions: list[Session] = []  # open ones, those of dead leases included
        self.next_session_id = 1
        self.sent_before: dict[Session, int] = {}  # at the last death of the cache service
        self.histories: list[list[int]] = []  # of released rows, to be asked for again
        self.clients = [self._new_client("a"), self._new_client("b")]

    def _new_client(self, client_id: str) -> Client:
        return Client(client_id, *self.driver.open_lease(client_id))

    # ------------------------------------------------------------------------------------------------------- requests

    def header(self, client: Client) -> LeaseHeader:
        client.number += 1
        told = [session for session in self.sessions if session.client is client and session.last_received]
        for session in told:
            session.last_told = session.last_received
        steps = tuple(SessionStep(session.key, session.last_received) for session in told)
        return LeaseHeader(client.lease_id, client.number, steps)

    def _ask_for_blocks(self, client: Client, ask: Callable[[LeaseHeader], list[Any]]) -> Any:
        """The answer to a message of one item. After a death of the cache service none is handed out as long as a step
        of the time before may run; such a refusal uses up no number."""
        refused = None
        try:
            [answer] = ask(self.header(client))
        except OctavoError as error:
            refused, answer = error, None
            client.number -= 1
        if refused is not None:
            assert (refused.code, refused.reason) == (Code.UNAVAILABLE, "REBUILDING")
            waiting = [session for session in self.sessions if session.last_told < self.sent_before.get(session, 0)]
            assert waiting, "nothing of the time before can run any more"
        return answer

    def allocate(self, client: Client, prompt: list[int], extras: dict[str, str], slack: int, bypass: bool) -> None:
        sequence_id = client.next_id
        client.next_id += 1
        item = allocation(sequence_id, array("I", prompt), slack=slack, bypass=bypass, **extras)
        before = self.driver.counts()
        answer = self._ask_for_blocks(client, lambda header: self.driver.allocate(header, [item]))
        if answer is None:
            return
        if isinstance(answer, OctavoError):
            self._check_refused(answer, -(-len(prompt) // self.block_size))
            return
        num_cached = answer.num_cached_tokens
        assert num_cached % self.block_size == 0
        assert num_cached <= len(prompt) - 1
        assert not (bypass and num_cached)
        num_hit = num_cached // self.block_size
        table = list(answer.block_ids)
        assert -(-len(prompt) // self.block_size) <= len(table) <= -(-len(prompt) // self.block_size) + slack
        row = Row(sequence_id, client, extras, list(prompt), table, len(prompt), num_cached, num_cached, bypass)
        row.num_committed = num_cached
        self._hand_out(table[num_hit:])
        client.rows.append(row)
        after = self.driver.counts()
        if not bypass:
            assert after.queried_tokens - before.queried_tokens == len(prompt)
            assert after.hit_tokens - before.hit_tokens == num_cached

    def _check_refused(self, error: OctavoError, num_needed: int) -> None:
        if error.reason == "NEVER_FITS":
            assert num_needed > self.num_blocks - 1
            return
        assert (error.code, error.reason) == (Code.RESOURCE_EXHAUSTED, "NO_BLOCKS")
        assert num_needed <= self.num_blocks - 1

    def _hand_out(self, blocks: list[int]) -> None:
        """New blocks: nobody else may have them, and no step in flight may touch them."""
        in_flight = {block for session in self.sessions for step in session.sent for block in step.blocks()}
        owned = {block for client in self.clients for row in client.rows for block in row.table}
        assert 0 not in blocks
        assert not in_flight & set(blocks), "a block that a step in flight may touch was handed out"
        assert not owned & set(blocks), "a block in use was handed out"
        for block in blocks:
            self.memory[block] = [POISON] * self.block_size

    def extend(self, row: Row, num_need: int, num_want: int) -> bool:
        need = len(row.table) + num_need
        item = Extension(SequenceId(row.sequence_id), len(row.table), need, need + num_want)
        answer = self._ask_for_blocks(row.client, lambda header: self.driver.extend(header, [item]))
        if answer is None:
            return False
        if isinstance(answer, OctavoError):
            self._check_refused(answer, need)
            return False
        assert isinstance(answer, Extended)
        assert num_need <= len(answer.block_ids) <= num_need + num_want
        self._hand_out(list(answer.block_ids))
        row.table += answer.block_ids
        return True

    def commit(self, row: Row, num_overlap: int, ahead: bool) -> None:
        [error] = self.driver.commit(self.header(row.client), [self._commit_of(row, num_overlap, ahead)])
        assert error is None, error
        self.histories += [row.tokens[: row.num_computed]] if row.num_computed else []

    def _commit_of(self, row: Row, num_overlap: int, ahead: bool) -> Commit:
        """Everything received; from a little before what is known, perhaps with the token that has no KV yet."""
        offset = max(0, row.num_known - num_overlap)
        end = max(row.num_known, min(row.num_computed + ahead, len(row.tokens)))
        row.num_known, row.num_committed = end, row.num_computed
        return Commit(SequenceId(row.sequence_id), row.num_computed, offset, array("I", row.tokens[offset:end]))

    def fork(self, row: Row, num_children: int) -> None:
        """Children go on from what is committed; the parent has nothing in flight."""
        if row.num_planned != row.num_computed or row.num_committed != row.num_computed:
            return
        child_ids = tuple(SequenceId(row.client.next_id + i) for i in range(num_children))
        row.client.next_id += num_children
        before = self.driver.counts()
        item = Fork(SequenceId(row.sequence_id), child_ids)
        answer = self._ask_for_blocks(row.client, lambda header: self.driver.fork(header, [item]))
        if answer is None:
            return
        if isinstance(answer, OctavoError):
            assert answer.reason == "NO_BLOCKS"
            after = self.driver.counts()
            assert (after.free, after.cached, after.used) == (before.free, before.cached, before.used)
            return
        assert isinstance(answer, Forked)
        has_partial = bool(row.num_computed % self.block_size)
        assert len(answer.copies) == (num_children if has_partial else 0)
        self._hand_out([target for _, target in answer.copies])
        for i, (child_id, table) in enumerate(zip(child_ids, answer.child_block_ids, strict=True)):
            assert len(table) == -(-row.num_computed // self.block_size)
            self._add_child(row, child_id, list(table), answer.copies[i] if has_partial else None)

    def _add_child(self, parent: Row, child_id: int, table: list[int], copy: tuple[int, int] | None) -> None:
        num = parent.num_computed
        child = Row(child_id, parent.client, parent.extras, parent.tokens[:num], table, num, num, num, parent.bypass)
        child.num_committed, child.copy, child.session = num, copy, parent.session
        parent.client.rows.append(child)

    def release(self, row: Row, with_commit: bool) -> None:
        commit = self._commit_of(row, 0, ahead=False) if with_commit else None
        free_after = tuple(SessionStep(key, step_id) for key, step_id in row.last_step.items())
        item = Release(SequenceId(row.sequence_id), commit, free_after)
        header = self.header(row.client)
        [error] = self.driver.release(header, [item])
        assert error is None, error
        self._end(row)
        row.client.rows.remove(row)
        self.histories += [row.tokens] if row.tokens else []  # a child forked before anything was computed has none
        # The last message again, as after a lost reply: answered, and nothing changes.
        before = self.driver.counts()
        assert self.driver.release(header, [item]) == [None]
        assert self.driver.counts() == before

    @staticmethod
    def _end(row: Row) -> None:
        row.ended = True

    # ---------------------------------------------------------------------------------------------------------- steps

    def session_of(self, row: Row, executor_id: str) -> Session:
        """The session a row runs in; a row without one is given one on this executor."""
        if row.session is None or row.session not in self.sessions:
            row.session = next(
                (s for s in self.sessions if s.client is row.client and s.key.executor_id == executor_id), None
            ) or self._open_session(row.client, executor_id)
        return row.session

    def _open_session(self, client: Client, executor_id: str) -> Session:
        key = SessionKey(executor_id, self.epochs[executor_id], self.next_session_id)
        self.next_session_id += 1
        self.driver.open_session(key, client.client_id, client.epoch)
        session = Session(key, client)
        self.sessions.append(session)
        return session

    def send_step(self, rows: list[Row], executor_id: str, chunk: int, token: int) -> None:
        """Send one step of these rows; rows of other sessions are left out."""
        session = self.session_of(rows[0], executor_id)
        parts, copies = [], []
        for row in dict.fromkeys(rows):
            if row.client is session.client and self.session_of(row, executor_id) is session:
                part = self._plan(row, chunk, token)
                if part is not None:
                    parts.append(part)
                    copies += [row.copy] if row.copy and not row.copy_sent else []
                    row.copy_sent = True
        if parts:
            session.last_sent += 1
            session.sent.append(Step(session.last_sent, parts, copies))
            for part in parts:
                part.row.last_step[session.key] = session.last_sent

    def _plan(self, row: Row, chunk: int, token: int) -> Part | None:
        start = row.num_planned
        if start == len(row.tokens):
            row.tokens.append(token)
        end = min(start + chunk, len(row.tokens))
        num_missing = -(-end // self.block_size) - len(row.table)
        if num_missing > 0 and not self.extend(row, num_missing, 0):
            return None
        row.num_planned = end
        values = tuple(row.value(position) for position in range(end))
        return Part(row, start, end, tuple(row.table), values)

    def execute(self, session: Session) -> None:
        """The executor runs the oldest step: copies, all sources first, then each row reads and writes."""
        if not session.sent:
            return
        step = session.sent.pop(0)
        sources = [list(self.memory[source]) for source, _ in step.copies]
        for (_, target), content in zip(step.copies, sources, strict=True):
            self.memory[target] = content
        for part in step.parts:
            for position in range(part.start):
                assert self._at(part.table, position) == part.values[position], "a step in flight reads wrong KV"
        for part in step.parts:
            for position in range(part.start, part.end):
                block, slot = part.table[position // self.block_size], position % self.block_size
                self.memory[block][slot] = part.values[position]
        session.executed.append(step)

    def receive(self, session: Session) -> None:
        """The router gets the oldest result; the next message of its lease acknowledges it."""
        if not session.executed:
            return
        step = session.executed.pop(0)
        session.last_received = step.step_id
        for part in step.parts:
            if not part.row.ended and part.row.session is session:
                part.row.num_computed = max(part.row.num_computed, part.end)
                part.row.copy = None

    # --------------------------------------------------------------------------------------------------- ends of things

    def drop_session(self, session: Session, *, tell: bool) -> None:
        """The executor ends a session; what was sent and not executed never runs. Rows go on from what was received."""
        self.sessions.remove(session)
        if tell:
            self.driver.close_session(session.key)
        for row in session.client.rows:
            if row.session is session:
                row.session, row.num_planned, row.copy_sent = None, row.num_computed, False

    def kill_executor(self, executor_id: str) -> None:
        """An executor dies and its successor registers."""
        for session in [s for s in self.sessions if s.key.executor_id == executor_id]:
            self.drop_session(session, tell=False)
        self.driver.kill_executor(executor_id)
        before = self.epochs[executor_id]
        self.epochs[executor_id] = self.driver.register(executor_id, self.num_blocks, self.block_size)
        assert self.epochs[executor_id] > before

    def expire(self, client: Client) -> None:
        """A router falls silent until its lease is over; its sessions live on, and a successor comes."""
        for other in self.clients:
            if other is not client:
                self.driver.keep_alive(other.lease_id)
        self.driver.advance(TTL_S * 0.6)
        for other in self.clients:
            if other is not client:
                self.driver.keep_alive(other.lease_id)
        self.driver.advance(TTL_S * 0.6)
        for row in client.rows:
            self._end(row)
        self._replace(client)

    def supersede(self, client: Client) -> None:
        """A router's successor opens its lease while the old one lives."""
        for row in client.rows:
            self._end(row)
        self._replace(client)

    def _replace(self, client: Client) -> None:
        successor = self._new_client(client.client_id)
        assert successor.epoch > client.epoch
        self.clients[self.clients.index(client)] = successor

    def close_orphans(self, executor_id: str) -> None:
        """The executor asks which sessions have nobody any more, and closes them."""
        orphaned = self.driver.orphaned(executor_id, self.epochs[executor_id])
        expected = {
            s.key.session_id for s in self.sessions if s.client not in self.clients and s.key.executor_id == executor_id
        }
        assert set(orphaned) == expected
        for session in [s for s in self.sessions if s.key.session_id in expected]:
            self.drop_session(session, tell=True)

    # ------------------------------------------------------------------------------------- death of the cache service

    def kill_cache_service(
        self, tear: Callable[[FakeMemory], None], meanwhile: Callable[[], None], silent: int
    ) -> None:
        """It dies and is started again; all say what they hold, except for one that never will (`silent` is its place).

        Every claim is granted, and nothing is handed out that a step of the time before may still touch.
        """
        self.driver.die(tear)
        clients = list(self.clients)
        self._check_reconcile_comes_first(clients[0])
        meanwhile()
        self.sent_before = {
            session: session.last_sent if session.client in clients else END_OF_SESSION for session in self.sessions
        }
        for place, client in enumerate(clients):
            if place == silent:
                self.supersede(client)
                self.sent_before |= {session: END_OF_SESSION for session in self.sessions if session.client is client}
            else:
                self.reconcile(client)

    def _check_reconcile_comes_first(self, client: Client) -> None:
        with pytest.raises(OctavoError) as refused:
            self.driver.keep_alive(client.lease_id)
        assert (refused.value.code, refused.value.reason) == (Code.UNAVAILABLE, "RECONCILE")

    def reconcile(self, client: Client) -> None:
        """All that the client holds."""
        snapshots = [self._snapshot_of(row) for row in client.rows]
        sent = [SessionStep(s.key, s.last_sent) for s in self.sessions if s.client is client]
        assert self.driver.reconcile(self.header(client), snapshots, sent) == [None] * len(snapshots)

    @staticmethod
    def _snapshot_of(row: Row) -> SequenceSnapshot:
        row.num_known = max(row.num_known, row.num_computed)
        row.num_committed = row.num_computed
        return SequenceSnapshot(
            sequence_id=SequenceId(row.sequence_id),
            arena_id=ARENA,
            token_ids=array("I", row.tokens[: row.num_known]),
            num_computed_tokens=row.num_computed,
            block_ids=tuple(map(BlockId, row.table)),
            extras=Extras(**row.extras),
            bypass_cache=row.bypass,
            copy_source=BlockId(row.copy[0]) if row.copy else None,
        )

    # --------------------------------------------------------------------------------------------------------- judging

    def _at(self, table: tuple[int, ...] | list[int], position: int) -> Value:
        return self.memory[table[position // self.block_size]][position % self.block_size]

    def check(self) -> None:
        """The invariants, and that every live sequence finds its own KV wherever it was computed."""
        counts = self.driver.counts()
        assert counts.violations == ()
        states = counts.free + counts.cached + counts.used + counts.fenced + counts.reserved
        assert (counts.reserved, states, counts.total) == (1, self.num_blocks, self.num_blocks)
        rows = [row for client in self.clients for row in client.rows]
        assert counts.num_sequences == len(rows)
        for row in rows:
            if row.copy is None:
                for position in range(row.num_computed):
                    assert self._at(row.table, position) == row.value(position), "a live sequence's KV is wrong"

    def settle(self) -> None:
        """Everything ends: no block is used or fenced any more."""
        for client in self.clients:
            for row in list(client.rows):
                self.release(row, with_commit=True)
            self.driver.close_lease(client.lease_id)
        for session in list(self.sessions):
            self.drop_session(session, tell=True)
        counts = self.driver.counts()
        assert counts.violations == ()
        assert (counts.used, counts.fenced, counts.num_sequences) == (0, 0, 0)
        assert counts.free + counts.cached + 1 == self.num_blocks


__all__ = ["Allocated", "CacheWorld", "Client", "Row", "Session"]
