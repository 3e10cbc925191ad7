"""What a client asks of the block manager and what it is given, free of any wire format.

Here belong the shapes of operations and answers. Not here: what they do (manager) and how they travel (servicer).
"""

from array import array
from dataclasses import dataclass, field
from typing import NamedTuple, NewType

from cache_service.block import BlockId
from cache_service.fence import SessionStep
from cache_service.prefix import Extras

LeaseId = NewType("LeaseId", int)
SequenceId = NewType("SequenceId", int)


class SequenceKey(NamedTuple):
    """A sequence among those of all leases."""

    lease_id: LeaseId
    sequence_id: SequenceId


@dataclass(frozen=True, slots=True)
class LeaseHeader:
    """What every mutation of a lease begins with; see `LeaseHeader` in cache.proto."""

    lease_id: LeaseId
    sequence_number: int
    acknowledged: tuple[SessionStep, ...] = ()


@dataclass(frozen=True, slots=True)
class Allocation:
    sequence_id: SequenceId
    token_ids: "array[int]"  # [num_tokens] uint32, at least one
    extras: Extras = field(default_factory=Extras)
    slack_blocks: int = 0
    bypass_cache: bool = False


@dataclass(frozen=True, slots=True)
class Allocated:
    block_ids: tuple[BlockId, ...]  # position // block_size -> block
    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class Extension:
    sequence_id: SequenceId
    have_blocks: int
    need_blocks: int
    want_blocks: int


@dataclass(frozen=True, slots=True)
class Extended:
    block_ids: tuple[BlockId, ...]  # from have_blocks on


@dataclass(frozen=True, slots=True)
class Commit:
    sequence_id: SequenceId
    num_computed_tokens: int
    token_offset: int
    token_ids: "array[int]"  # [num_tokens] uint32, may be empty


@dataclass(frozen=True, slots=True)
class Committed:
    num_findable_blocks: int  # leading blocks of the sequence that others can hit


@dataclass(frozen=True, slots=True)
class Fork:
    parent_sequence_id: SequenceId
    child_sequence_ids: tuple[SequenceId, ...]
    commit: Commit | None = None  # of the parent, applied first; it holds even where the fork is refused


@dataclass(frozen=True, slots=True)
class Forked:
    child_block_ids: tuple[tuple[BlockId, ...], ...]  # as child_sequence_ids
    copies: tuple[tuple[BlockId, BlockId], ...]  # (source, target): all sources are read before any target is written


@dataclass(frozen=True, slots=True)
class Release:
    sequence_id: SequenceId
    commit: Commit | None = None
    free_after: tuple[SessionStep, ...] = ()


@dataclass(frozen=True, slots=True)
class Released:
    was_held: bool  # False: unknown or released before; it cannot be allocated any more either way


@dataclass(frozen=True, slots=True)
class SequenceSnapshot:
    """A live sequence as its client knows it; see `SequenceSnapshot` in cache.proto."""

    sequence_id: SequenceId
    arena_id: str
    token_ids: "array[int]"  # [num_tokens] uint32
    num_computed_tokens: int
    block_ids: tuple[BlockId, ...]  # position // block_size -> block
    extras: Extras = field(default_factory=Extras)
    bypass_cache: bool = False
    copy_source: BlockId | None = None  # of a copy that no acknowledged step has proved yet
