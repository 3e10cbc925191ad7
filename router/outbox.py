"""What the router will tell the cache service, gathered into batches: a buffer, without IO.

The mutations of a lease go one at a time in order of their numbers; while one is on its way, the next ones gather here.
Within a sequence the order allocate, fork, extend, commit, release always holds, because a sequence is extended only
after its allocation was answered, a fork goes before all else that waits and carries the commit that it needs, and a
release swallows what else waits for its sequence.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from octavo.errors import OctavoError
from octavo.tracing import NO_TAG, RequestTag
from router.ids import BlockId, SequenceId, SessionKey, StepId
from router.request import CacheScope

MAX_BATCH = 256
MAX_BATCH_TOKENS = 4_000_000  # of 5 bytes at most: a message may have 32 MiB


@dataclass(frozen=True, slots=True)
class Allocation:
    sequence_id: SequenceId
    token_ids: tuple[int, ...]
    scope: CacheScope
    slack_blocks: int
    bypass_cache: bool
    tag: RequestTag = NO_TAG


@dataclass(frozen=True, slots=True)
class Extension:
    """Block counts are absolute; the answer is the range [have, granted)."""

    sequence_id: SequenceId
    have_blocks: int
    need_blocks: int
    want_blocks: int


@dataclass(frozen=True, slots=True)
class Commit:
    """Tokens [0, num_computed_tokens) have KV; `token_ids` begin at `token_offset`."""

    sequence_id: SequenceId
    num_computed_tokens: int
    token_offset: int
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Fork:
    """Children share the tokens of the parent that `commit` says are computed.

    Attributes:
        first: releases that go before it in the same message, so that the children can have their blocks.
    """

    parent_id: SequenceId
    child_ids: tuple[SequenceId, ...]
    commit: Commit
    first: "tuple[Release, ...]" = ()


@dataclass(frozen=True, slots=True)
class Release:
    """`free_after`: the highest sent step of each session that contains the sequence."""

    sequence_id: SequenceId
    commit: Commit | None
    free_after: tuple[tuple[SessionKey, StepId], ...]


@dataclass(frozen=True, slots=True)
class Allocated:
    """The answer to an allocation: blocks and hits, or why not."""

    block_ids: tuple[BlockId, ...] = ()
    num_cached_tokens: int = 0
    error: OctavoError | None = None


@dataclass(frozen=True, slots=True)
class Extended:
    """The answer to an extension: the blocks behind those that were there, or why not."""

    block_ids: tuple[BlockId, ...] = ()
    error: OctavoError | None = None


@dataclass(frozen=True, slots=True)
class Forked:
    """The answer to a fork: a table for each child, and (source, target) of each block to copy; or why not."""

    tables: tuple[tuple[BlockId, ...], ...] = ()
    copies: tuple[tuple[BlockId, BlockId], ...] = ()
    error: OctavoError | None = None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What a running sequence holds, for a cache service that was restarted."""

    sequence_id: SequenceId
    token_ids: tuple[int, ...]
    num_computed_tokens: int
    block_ids: tuple[BlockId, ...]
    scope: CacheScope
    bypass_cache: bool
    copy_source: BlockId | None


Item = Allocation | Extension | Commit | Fork | Release
Batch = list[Allocation] | list[Extension] | list[Commit] | list[Fork] | list[Release]


class Replies(Protocol):
    """Who hears the answers, and can say what is held."""

    def on_allocated(self, allocation: Allocation, outcome: Allocated) -> None: ...

    def on_extended(self, extension: Extension, outcome: Extended) -> None: ...

    def on_forked(self, fork: Fork, outcome: Forked) -> None: ...

    def snapshots(self) -> list[Snapshot]: ...

    def sent_steps(self) -> dict[SessionKey, StepId]: ...

    def on_disowned(self, sequence_id: SequenceId, error: OctavoError) -> None: ...


@dataclass
class Outbox:
    """Waiting mutations by kind. `on_filled` is called whenever something was put in."""

    on_filled: Callable[[], None] = lambda: None
    acknowledged: dict[SessionKey, StepId] = field(default_factory=dict)  # last step whose result is here
    _allocations: dict[SequenceId, Allocation] = field(default_factory=dict)
    _extensions: dict[SequenceId, Extension] = field(default_factory=dict)
    _commits: dict[SequenceId, Commit] = field(default_factory=dict)
    _forks: dict[SequenceId, Fork] = field(default_factory=dict)
    _releases: dict[SequenceId, Release] = field(default_factory=dict)
    _fenced_until: dict[SessionKey, StepId] = field(default_factory=dict)
    _told: dict[SessionKey, StepId] = field(default_factory=dict)
    _next_turn: int = 0

    def allocate(self, allocation: Allocation) -> None:
        self._allocations[allocation.sequence_id] = allocation
        self.on_filled()

    def extend(self, extension: Extension) -> None:
        self._extensions[extension.sequence_id] = extension
        self.on_filled()

    def commit(self, commit: Commit) -> None:
        """Gathers with a commit of the sequence that still waits: ranges of a sequence adjoin."""
        waiting = self._commits.get(commit.sequence_id)
        self._commits[commit.sequence_id] = _joined(waiting, commit) if waiting else commit
        self.on_filled()

    def fork(self, fork: Fork) -> None:
        """Takes the commit that waits for the parent along; what the parent computes later goes behind it."""
        waiting = self._commits.pop(fork.parent_id, None)
        commit = _joined(waiting, fork.commit) if waiting is not None else fork.commit
        first = tuple(self._whole(release) for release in fork.first)
        self._forks[fork.parent_id] = Fork(fork.parent_id, fork.child_ids, commit, first)
        for release in first:
            self.fence(dict(release.free_after))
        self.on_filled()

    def release(self, release: Release) -> None:
        """Takes the place of all that waits for the sequence; an allocation not yet sent is simply dropped."""
        if self._allocations.pop(release.sequence_id, None) is not None:
            return
        self._releases[release.sequence_id] = self._whole(release)
        self.fence(dict(release.free_after))
        self.on_filled()

    def drop_commit(self, sequence_id: SequenceId) -> None:
        """A cache service that was restarted did not give the sequence its blocks back: there is nothing to commit."""
        self._commits.pop(sequence_id, None)

    def _whole(self, release: Release) -> Release:
        """With the commit that waits for its sequence; nothing else of the sequence waits any more."""
        self._extensions.pop(release.sequence_id, None)
        waiting = self._commits.pop(release.sequence_id, None)
        if waiting is None:
            return release
        commit = _joined(waiting, release.commit) if release.commit else waiting
        return Release(release.sequence_id, commit, release.free_after)

    def acknowledge(self, session: SessionKey, step_id: StepId) -> None:
        """A result arrived. Heard at once only where fences wait for it; else it travels with the next message."""
        self.acknowledged[session] = step_id
        if self.lifts_fences():
            self.on_filled()

    def forget_session(self, session: SessionKey) -> None:
        """The session is over; its fences are the executor's to lift."""
        for table in (self.acknowledged, self._fenced_until, self._told):
            table.pop(session, None)

    def fence(self, sent: dict[SessionKey, StepId]) -> None:
        """Somebody waits until these steps are acknowledged."""
        for session, step_id in sent.items():
            self._fenced_until[session] = StepId(max(step_id, self._fenced_until.get(session, StepId(0))))

    def lifts_fences(self) -> bool:
        """Whether a fence waits for an acknowledgement that was not told yet."""
        for session, fenced in self._fenced_until.items():
            told = self._told.get(session, 0)
            if told < fenced and self.acknowledged.get(session, 0) > told:
                return True
        return False

    def mark_told(self, acknowledged: dict[SessionKey, StepId]) -> None:
        """These acknowledgements reached the cache service."""
        self._told.update(acknowledged)

    def take(self) -> Batch | None:
        """The next batch, of one kind. Forks first; the other kinds take turns, so that commits starve no extension."""
        if self._forks:
            forks, self._forks = list(self._forks.values()), {}
            return forks
        waiting: tuple[dict, ...] = (self._extensions, self._releases, self._allocations, self._commits)
        for offset in range(len(waiting)):
            turn = (self._next_turn + offset) % len(waiting)
            if waiting[turn]:
                self._next_turn = turn + 1
                keys = _first_keys(waiting[turn])
                return [waiting[turn].pop(key) for key in keys]
        return None

    def clear(self) -> None:
        """The lease is lost: nothing that waits means anything any more."""
        for table in (self._allocations, self._extensions, self._commits, self._forks, self._releases):
            table.clear()
        for sessions in (self.acknowledged, self._fenced_until, self._told):
            sessions.clear()


def _first_keys(waiting: Mapping[SequenceId, Item]) -> list[SequenceId]:
    """Of as many as go into one message, and of at least one. Allocations of long prompts are what fills it."""
    keys: list[SequenceId] = []
    num_tokens = 0
    for key, item in waiting.items():
        num_tokens += len(item.token_ids) if isinstance(item, Allocation) else 0
        if keys and (len(keys) == MAX_BATCH or num_tokens > MAX_BATCH_TOKENS):
            break
        keys.append(key)
    return keys


def _joined(first: Commit, second: Commit) -> Commit:
    return Commit(
        first.sequence_id,
        max(first.num_computed_tokens, second.num_computed_tokens),
        first.token_offset,
        first.token_ids + second.token_ids,
    )
