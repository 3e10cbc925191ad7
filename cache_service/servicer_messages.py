"""Messages of cache.proto to the shapes of the domain, and back.

Here belongs translation, and the refusal of what cannot be translated. Not here: any decision.
"""

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from google.rpc import status_pb2

from cache_service.block import BlockId
from cache_service.events import BlockEvent, Removed
from cache_service.fence import SessionKey, SessionStep
from cache_service.geometry import ArenaDescription, KvGeometry, LayerGeometry, LayerLayout, TensorLayout
from cache_service.managed_arena import ManagedArena
from cache_service.operation import (
    Allocated,
    Allocation,
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
from cache_service.prefix import Extras, unpack_tokens
from cache_service.registration import Registration
from cache_service.watching import Batch
from octavo.errors import FieldViolation, OctavoError, invalid_argument
from octavo.rpc import status_of
from octavo.v1 import cache_pb2

# ------------------------------------------------------------------------------------------------------- from messages


def registration_of(request: cache_pb2.RegisterExecutorRequest) -> Registration:
    geometry = request.geometry
    layers = tuple(LayerGeometry(layer.num_kv_heads, layer.k_head_dim, layer.v_head_dim) for layer in geometry.layers)
    return Registration(
        executor_id=request.executor_id,
        executor_epoch=request.executor_epoch,
        arena_id=request.arena_id,
        model_fingerprint=request.model_fingerprint,
        geometry=KvGeometry(geometry.block_size, geometry.dtype, layers),
        kv_bytes=request.kv_bytes,
        pid=request.pid,
    )


def session_of(key: cache_pb2.SessionKey) -> SessionKey:
    return SessionKey(key.executor_id, key.executor_epoch, key.session_id)


def steps_of(steps: Iterable[cache_pb2.SessionStep]) -> tuple[SessionStep, ...]:
    return tuple(SessionStep(session_of(step.session), step.step_id) for step in steps)


def header_of(header: cache_pb2.LeaseHeader) -> LeaseHeader:
    return LeaseHeader(LeaseId(header.lease_id), header.sequence_number, steps_of(header.acknowledged))


def extras_of(extras: cache_pb2.KeyExtras) -> Extras:
    return Extras(
        model=extras.model,
        revision=extras.revision,
        kv_dtype=extras.kv_dtype,
        adapter=extras.adapter if extras.HasField("adapter") else None,
        tenant=extras.tenant if extras.HasField("tenant") else None,
        salt=extras.salt if extras.HasField("salt") else None,
        image_hashes=tuple(extras.image_hashes),
    )


def tokens_of(token_ids: Iterable[int]) -> "array[int]":
    return array("I", list(token_ids))


def allocation_of(message: cache_pb2.SequenceAllocation) -> Allocation:
    return Allocation(
        sequence_id=SequenceId(message.sequence_id),
        token_ids=tokens_of(message.token_ids),
        extras=extras_of(message.extras),
        slack_blocks=message.slack_blocks,
        bypass_cache=message.bypass_cache,
    )


def extension_of(message: cache_pb2.SequenceExtension) -> Extension:
    return Extension(SequenceId(message.sequence_id), message.have_blocks, message.need_blocks, message.want_blocks)


def commit_of(message: cache_pb2.SequenceCommit) -> Commit:
    return Commit(
        sequence_id=SequenceId(message.sequence_id),
        num_computed_tokens=message.num_computed_tokens,
        token_offset=message.token_offset,
        token_ids=tokens_of(message.token_ids),
    )


def fork_of(message: cache_pb2.SequenceFork, path: str) -> Fork:
    """Raises INVALID_ARGUMENT when its commit is of another sequence."""
    commit = commit_of(message.commit) if message.HasField("commit") else None
    if commit is not None and commit.sequence_id != message.parent_sequence_id:
        raise invalid_argument(
            FieldViolation(
                f"{path}.commit.sequence_id", f"is {commit.sequence_id}; the parent is {message.parent_sequence_id}"
            )
        )
    return Fork(SequenceId(message.parent_sequence_id), tuple(map(SequenceId, message.child_sequence_ids)), commit)


def release_of(message: cache_pb2.SequenceRelease, path: str) -> Release:
    """Raises INVALID_ARGUMENT when its commit is of another sequence."""
    commit = commit_of(message.commit) if message.HasField("commit") else None
    if commit is not None and commit.sequence_id != message.sequence_id:
        raise invalid_argument(
            FieldViolation(f"{path}.commit.sequence_id", f"is {commit.sequence_id}; the released {message.sequence_id}")
        )
    return Release(SequenceId(message.sequence_id), commit, steps_of(message.free_after))


def snapshot_of(message: cache_pb2.SequenceSnapshot) -> SequenceSnapshot:
    return SequenceSnapshot(
        sequence_id=SequenceId(message.sequence_id),
        arena_id=message.arena_id,
        token_ids=tokens_of(message.token_ids),
        num_computed_tokens=message.num_computed_tokens,
        block_ids=tuple(BlockId(block) for table in message.tables[:1] for block in table.block_ids),
        extras=extras_of(message.extras),
        bypass_cache=message.bypass_cache,
        copy_source=BlockId(message.copy_source) if message.HasField("copy_source") else None,
    )


# --------------------------------------------------------------------------------------------------------- to messages


def item_status(answer: object, path: str) -> status_pb2.Status:
    """OK, or the item's error; the fields it names are those of the whole request."""
    if not isinstance(answer, OctavoError):
        return status_pb2.Status()
    located = tuple(FieldViolation(f"{path}.{v.field}", v.description) for v in answer.violations)
    if not located:
        return status_of(answer)
    return status_of(invalid_argument(*located))


def table_message(block_ids: Sequence[BlockId]) -> cache_pb2.BlockTable:
    return cache_pb2.BlockTable(kv_group=0, block_ids=block_ids)


def allocated_message(answer: Allocated | OctavoError, path: str) -> cache_pb2.AllocatedSequence:
    if isinstance(answer, OctavoError):
        return cache_pb2.AllocatedSequence(status=item_status(answer, path))
    tables = [table_message(answer.block_ids)]
    return cache_pb2.AllocatedSequence(tables=tables, num_cached_tokens=answer.num_cached_tokens)


def extended_message(answer: Extended | OctavoError, path: str) -> cache_pb2.ExtendedSequence:
    if isinstance(answer, OctavoError):
        return cache_pb2.ExtendedSequence(status=item_status(answer, path))
    return cache_pb2.ExtendedSequence(tables=[table_message(answer.block_ids)])


def forked_message(answer: Forked | OctavoError, path: str) -> cache_pb2.ForkedSequence:
    if isinstance(answer, OctavoError):
        return cache_pb2.ForkedSequence(status=item_status(answer, path))
    return cache_pb2.ForkedSequence(
        child_tables=map(table_message, answer.child_block_ids),
        copy_sources=[source for source, _ in answer.copies],
        copy_targets=[target for _, target in answer.copies],
    )


def arena_message(arena: ArenaDescription) -> cache_pb2.Arena:
    geometry = arena.geometry
    layout = cache_pb2.ArenaLayout(
        data_offset=arena.layout.data_offset,
        block_bytes=arena.layout.block_bytes,
        layers=map(_layer_message, arena.layout.layers),
    )
    return cache_pb2.Arena(
        arena_id=arena.arena_id,
        model_fingerprint=arena.model_fingerprint,
        geometry=cache_pb2.KvGeometry(
            block_size=geometry.block_size,
            dtype=geometry.dtype,
            layers=[cache_pb2.LayerGeometry(**asdict(layer)) for layer in geometry.layers],
        ),
        num_blocks=arena.num_blocks,
        layout=layout,
        **_handle_of(arena),
    )


def _handle_of(arena: ArenaDescription) -> dict[str, Any]:
    if arena.cuda is None:
        return {"posix": cache_pb2.PosixSharedMemory(path=arena.path, size_bytes=arena.size_bytes)}
    return {"cuda": cache_pb2.CudaMemory(size_bytes=arena.size_bytes, **asdict(arena.cuda))}


def _layer_message(layer: LayerLayout) -> cache_pb2.LayerLayout:
    return cache_pb2.LayerLayout(
        k=_tensor_message(layer.k),
        v=_tensor_message(layer.v),
        k_scale=_tensor_message(layer.k_scale) if layer.k_scale else None,
        v_scale=_tensor_message(layer.v_scale) if layer.v_scale else None,
    )


def _tensor_message(tensor: TensorLayout) -> cache_pb2.TensorLayout:
    return cache_pb2.TensorLayout(**asdict(tensor))


def events_message(batch: Batch) -> cache_pb2.WatchBlockEventsResponse:
    return cache_pb2.WatchBlockEventsResponse(
        stream_id=batch.stream_id,
        last_number=batch.last_number,
        begins_snapshot=batch.begins_snapshot,
        events=[_event_message(event) for event in batch.events],
    )


def _event_message(event: BlockEvent) -> cache_pb2.BlockEvent:
    if isinstance(event, Removed):
        return cache_pb2.BlockEvent(removed=cache_pb2.BlockRemoved(key=event.key))
    stored = cache_pb2.BlockStored(key=event.key, parent_key=event.parent_key, token_ids=unpack_tokens(event.tokens))
    return cache_pb2.BlockEvent(stored=stored)


def stats_message(arena: ManagedArena, violations: Iterable[str]) -> cache_pb2.ArenaStats:
    counts = asdict(arena.manager.stats())
    return cache_pb2.ArenaStats(arena_id=arena.memory.description.arena_id, violations=violations, **counts)
