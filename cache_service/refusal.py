"""The errors that clients of the block manager meet, each with its reason, its numbers and what to do next.

Here belongs the wording. Not here: when they are raised.
"""

from cache_service.fence import SessionKey
from cache_service.operation import LeaseId, SequenceId
from octavo.errors import Code, OctavoError

# Between two tries of a client that waits for a rebuild.
REBUILD_RETRY_S = 0.05
STOPPING_RETRY_S = 1.0
# Of a router whose executor is about to be dead.
PREDECESSOR_RETRY_S = 0.05


def no_blocks(num_needed: int, num_available: int, num_fenced: int, num_total: int) -> OctavoError:
    """RESOURCE_EXHAUSTED: not now, but possible later."""
    return OctavoError(
        Code.RESOURCE_EXHAUSTED,
        "NO_BLOCKS",
        f"{num_needed} more blocks are needed, {num_available} of {num_total} are to be had "
        f"({num_fenced} are fenced by steps in flight); release sequences or wait",
        metadata=_numbers(needed=num_needed, available=num_available, fenced=num_fenced, total=num_total),
    )


def never_fits(num_needed: int, num_usable: int, block_size: int) -> OctavoError:
    """FAILED_PRECONDITION: not even an empty arena would do."""
    return OctavoError(
        Code.FAILED_PRECONDITION,
        "NEVER_FITS",
        f"{num_needed} blocks of {block_size} tokens are needed, the arena has {num_usable} in all; "
        "shorten the sequence or give the arena more bytes",
        metadata=_numbers(needed=num_needed, usable=num_usable, block_size=block_size),
    )


def unknown_sequence(sequence_id: SequenceId) -> OctavoError:
    return OctavoError(
        Code.NOT_FOUND,
        "UNKNOWN_SEQUENCE",
        f"sequence {sequence_id} is not held by this lease; allocate it first",
        metadata=_numbers(sequence_id=sequence_id),
    )


def sequence_released(sequence_id: SequenceId) -> OctavoError:
    return OctavoError(
        Code.ABORTED,
        "RELEASED",
        f"sequence {sequence_id} was released; its id is never used again, take a new one",
        metadata=_numbers(sequence_id=sequence_id),
    )


def sequence_exists(sequence_id: SequenceId) -> OctavoError:
    return OctavoError(
        Code.ALREADY_EXISTS,
        "SEQUENCE_EXISTS",
        f"sequence {sequence_id} is held by this lease already; ids are never used again",
        metadata=_numbers(sequence_id=sequence_id),
    )


def unknown_arena(arena_id: str) -> OctavoError:
    return OctavoError(
        Code.NOT_FOUND,
        "UNKNOWN_ARENA",
        f"there is no arena {arena_id!r}; an executor creates it by RegisterExecutor",
        metadata={"arena_id": arena_id},
    )


def arena_replaced(arena_id: str) -> OctavoError:
    return OctavoError(
        Code.ABORTED,
        "ARENA_REPLACED",
        f"the arena {arena_id!r} that was followed is gone; follow the next one from its beginning",
        metadata={"arena_id": arena_id},
    )


def too_many_watches(most: int) -> OctavoError:
    return OctavoError(
        Code.RESOURCE_EXHAUSTED,
        "TOO_MANY_WATCHES",
        f"block events are followed {most} times already",
        metadata={"max_watches": str(most)},
    )


def stopping() -> OctavoError:
    return OctavoError(
        Code.UNAVAILABLE, "STOPPING", "this cache service stops; follow its successor", retry_after_s=STOPPING_RETRY_S
    )


def lease_expired(lease_id: LeaseId) -> OctavoError:
    return OctavoError(
        Code.FAILED_PRECONDITION,
        "LEASE_EXPIRED",
        f"lease {lease_id} is over or was never granted; open a new one, what it held is gone",
        metadata=_numbers(lease_id=lease_id),
    )


def no_live_lease(client_id: str, client_epoch: int) -> OctavoError:
    return OctavoError(
        Code.FAILED_PRECONDITION,
        "LEASE_EXPIRED",
        f"client {client_id!r} has no live lease of epoch {client_epoch}; the router opens its lease first",
        metadata={"client_id": client_id, "client_epoch": str(client_epoch)},
    )


def sequence_gap(number: int, expected: int) -> OctavoError:
    return OctavoError(
        Code.ABORTED,
        "SEQUENCE_GAP",
        f"message {number} of the lease came where {expected} was expected; only the last message may be repeated, "
        "unchanged",
        metadata=_numbers(got=number, expected=expected),
    )


def reconcile_first(lease_id: LeaseId) -> OctavoError:
    """UNAVAILABLE: this cache service was restarted, and the client has not said yet what it holds."""
    return OctavoError(
        Code.UNAVAILABLE,
        "RECONCILE",
        f"the cache service was restarted and does not know what lease {lease_id} holds; say it by Reconcile",
        metadata=_numbers(lease_id=lease_id),
        retry_after_s=REBUILD_RETRY_S,
    )


def rebuilding() -> OctavoError:
    """UNAVAILABLE: no block is handed out yet."""
    return OctavoError(
        Code.UNAVAILABLE,
        "REBUILDING",
        "the cache service was restarted and hands out no block before every client has said what it holds and the "
        "steps in flight have ended",
        retry_after_s=REBUILD_RETRY_S,
    )


def claim_refused(sequence_id: SequenceId, why: str) -> OctavoError:
    """ABORTED: the sequence's blocks cannot be given back to it; its tokens are computed again under a new id."""
    return OctavoError(
        Code.ABORTED,
        "CLAIM_REFUSED",
        f"sequence {sequence_id} cannot have its blocks back: {why}; allocate it again under a new id",
        metadata=_numbers(sequence_id=sequence_id),
    )


def stale_epoch(who: str, epoch: int, current: int) -> OctavoError:
    return OctavoError(
        Code.FAILED_PRECONDITION,
        "STALE_EPOCH",
        f"epoch {epoch} of {who} is over or was never granted (the last is {current}); ask for a new one with 0",
        metadata={"epoch": str(epoch), "current": str(current)},
    )


def unknown_session(session: SessionKey) -> OctavoError:
    return OctavoError(
        Code.FAILED_PRECONDITION,
        "UNKNOWN_SESSION",
        f"session {session.session_id} of executor {session.executor_id!r}, epoch {session.executor_epoch}, "
        "was never announced for this lease; the executor calls OpenSession before it answers Opened",
        metadata=_session(session),
    )


def session_closed(session: SessionKey) -> OctavoError:
    return OctavoError(
        Code.FAILED_PRECONDITION,
        "SESSION_CLOSED",
        f"session {session.session_id} of executor {session.executor_id!r} was closed; take a new id",
        metadata=_session(session),
    )


def session_taken(session: SessionKey) -> OctavoError:
    return OctavoError(
        Code.ALREADY_EXISTS,
        "SESSION_TAKEN",
        f"session {session.session_id} of executor {session.executor_id!r} belongs to another lease; take a new id",
        metadata=_session(session),
    )


def predecessor_alive(session: SessionKey) -> OctavoError:
    """UNAVAILABLE: the executor that ran these sequences may still write into their blocks."""
    return OctavoError(
        Code.UNAVAILABLE,
        "PREDECESSOR_ALIVE",
        f"session {session.session_id} of this lease is open on executor {session.executor_id!r}, which is not known "
        "dead; close it, or end that process",
        metadata=_session(session),
        retry_after_s=PREDECESSOR_RETRY_S,
    )


def executor_alive(executor_id: str, epoch: int) -> OctavoError:
    return OctavoError(
        Code.FAILED_PRECONDITION,
        "EXECUTOR_ALIVE",
        f"executor {executor_id!r} of epoch {epoch} still lives and may write into the arena; "
        "stop it first, or register under another id",
        metadata={"executor_id": executor_id, "epoch": str(epoch)},
    )


def geometry_mismatch(arena_id: str, what: str, holds: str, asked: str) -> OctavoError:
    return OctavoError(
        Code.FAILED_PRECONDITION,
        "GEOMETRY_MISMATCH",
        f"arena {arena_id!r} is in use with {what} {holds}, this executor asks for {asked}; "
        "wait until it is empty, or use another arena",
        metadata={"arena_id": arena_id, "holds": holds, "asked": asked},
    )


def arena_too_large(needed_bytes: int, free_bytes: int, where: str) -> OctavoError:
    return OctavoError(
        Code.RESOURCE_EXHAUSTED,
        "ARENA_TOO_LARGE",
        f"the arena needs {needed_bytes} bytes, {where} has {free_bytes} free; "
        "ask for fewer KV bytes, or make it larger",
        metadata=_numbers(needed_bytes=needed_bytes, free_bytes=free_bytes),
    )


def arena_too_large_for_device(needed_bytes: int, total_bytes: int, ordinal: int) -> OctavoError:
    return OctavoError(
        Code.RESOURCE_EXHAUSTED,
        "ARENA_TOO_LARGE",
        f"the arena needs {needed_bytes} bytes, more than is free of the {total_bytes} that cuda:{ordinal} has; "
        "ask for fewer KV bytes, or end what else uses the device",
        metadata=_numbers(needed_bytes=needed_bytes, total_bytes=total_bytes),
    )


def _session(session: SessionKey) -> dict[str, str]:
    return {field: str(value) for field, value in session._asdict().items()}


def _numbers(**numbers: int) -> dict[str, str]:
    return {name: str(number) for name, number in numbers.items()}
