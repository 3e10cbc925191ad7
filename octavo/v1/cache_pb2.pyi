import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from google.rpc import status_pb2 as _status_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class KvGeometry(_message.Message):
    __slots__ = ("block_size", "dtype", "layers")
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    block_size: int
    dtype: str
    layers: _containers.RepeatedCompositeFieldContainer[LayerGeometry]
    def __init__(self, block_size: _Optional[int] = ..., dtype: _Optional[str] = ..., layers: _Optional[_Iterable[_Union[LayerGeometry, _Mapping]]] = ...) -> None: ...

class LayerGeometry(_message.Message):
    __slots__ = ("num_kv_heads", "k_head_dim", "v_head_dim")
    NUM_KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    K_HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    V_HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    num_kv_heads: int
    k_head_dim: int
    v_head_dim: int
    def __init__(self, num_kv_heads: _Optional[int] = ..., k_head_dim: _Optional[int] = ..., v_head_dim: _Optional[int] = ...) -> None: ...

class RegisterExecutorRequest(_message.Message):
    __slots__ = ("executor_id", "executor_epoch", "pid", "arena_id", "model_fingerprint", "geometry", "kv_bytes", "metrics_address")
    EXECUTOR_ID_FIELD_NUMBER: _ClassVar[int]
    EXECUTOR_EPOCH_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    ARENA_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    GEOMETRY_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_FIELD_NUMBER: _ClassVar[int]
    METRICS_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    executor_id: str
    executor_epoch: int
    pid: int
    arena_id: str
    model_fingerprint: str
    geometry: KvGeometry
    kv_bytes: int
    metrics_address: str
    def __init__(self, executor_id: _Optional[str] = ..., executor_epoch: _Optional[int] = ..., pid: _Optional[int] = ..., arena_id: _Optional[str] = ..., model_fingerprint: _Optional[str] = ..., geometry: _Optional[_Union[KvGeometry, _Mapping]] = ..., kv_bytes: _Optional[int] = ..., metrics_address: _Optional[str] = ...) -> None: ...

class RegisterExecutorResponse(_message.Message):
    __slots__ = ("arena", "executor_epoch")
    ARENA_FIELD_NUMBER: _ClassVar[int]
    EXECUTOR_EPOCH_FIELD_NUMBER: _ClassVar[int]
    arena: Arena
    executor_epoch: int
    def __init__(self, arena: _Optional[_Union[Arena, _Mapping]] = ..., executor_epoch: _Optional[int] = ...) -> None: ...

class OpenSessionRequest(_message.Message):
    __slots__ = ("session", "client_id", "client_epoch", "takeover")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    CLIENT_ID_FIELD_NUMBER: _ClassVar[int]
    CLIENT_EPOCH_FIELD_NUMBER: _ClassVar[int]
    TAKEOVER_FIELD_NUMBER: _ClassVar[int]
    session: SessionKey
    client_id: str
    client_epoch: int
    takeover: bool
    def __init__(self, session: _Optional[_Union[SessionKey, _Mapping]] = ..., client_id: _Optional[str] = ..., client_epoch: _Optional[int] = ..., takeover: bool = ...) -> None: ...

class OpenSessionResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListOrphanedSessionsRequest(_message.Message):
    __slots__ = ("executor_id", "executor_epoch")
    EXECUTOR_ID_FIELD_NUMBER: _ClassVar[int]
    EXECUTOR_EPOCH_FIELD_NUMBER: _ClassVar[int]
    executor_id: str
    executor_epoch: int
    def __init__(self, executor_id: _Optional[str] = ..., executor_epoch: _Optional[int] = ...) -> None: ...

class ListOrphanedSessionsResponse(_message.Message):
    __slots__ = ("session_ids",)
    SESSION_IDS_FIELD_NUMBER: _ClassVar[int]
    session_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, session_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class CloseSessionRequest(_message.Message):
    __slots__ = ("session",)
    SESSION_FIELD_NUMBER: _ClassVar[int]
    session: SessionKey
    def __init__(self, session: _Optional[_Union[SessionKey, _Mapping]] = ...) -> None: ...

class CloseSessionResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetArenaRequest(_message.Message):
    __slots__ = ("arena_id",)
    ARENA_ID_FIELD_NUMBER: _ClassVar[int]
    arena_id: str
    def __init__(self, arena_id: _Optional[str] = ...) -> None: ...

class GetArenaResponse(_message.Message):
    __slots__ = ("arena",)
    ARENA_FIELD_NUMBER: _ClassVar[int]
    arena: Arena
    def __init__(self, arena: _Optional[_Union[Arena, _Mapping]] = ...) -> None: ...

class Arena(_message.Message):
    __slots__ = ("arena_id", "model_fingerprint", "geometry", "num_blocks", "layout", "posix", "cuda")
    ARENA_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    GEOMETRY_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    POSIX_FIELD_NUMBER: _ClassVar[int]
    CUDA_FIELD_NUMBER: _ClassVar[int]
    arena_id: str
    model_fingerprint: str
    geometry: KvGeometry
    num_blocks: int
    layout: ArenaLayout
    posix: PosixSharedMemory
    cuda: CudaMemory
    def __init__(self, arena_id: _Optional[str] = ..., model_fingerprint: _Optional[str] = ..., geometry: _Optional[_Union[KvGeometry, _Mapping]] = ..., num_blocks: _Optional[int] = ..., layout: _Optional[_Union[ArenaLayout, _Mapping]] = ..., posix: _Optional[_Union[PosixSharedMemory, _Mapping]] = ..., cuda: _Optional[_Union[CudaMemory, _Mapping]] = ...) -> None: ...

class PosixSharedMemory(_message.Message):
    __slots__ = ("path", "size_bytes")
    PATH_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    path: str
    size_bytes: int
    def __init__(self, path: _Optional[str] = ..., size_bytes: _Optional[int] = ...) -> None: ...

class CudaMemory(_message.Message):
    __slots__ = ("socket", "memory_id", "size_bytes", "device_uuid")
    SOCKET_FIELD_NUMBER: _ClassVar[int]
    MEMORY_ID_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    DEVICE_UUID_FIELD_NUMBER: _ClassVar[int]
    socket: str
    memory_id: str
    size_bytes: int
    device_uuid: str
    def __init__(self, socket: _Optional[str] = ..., memory_id: _Optional[str] = ..., size_bytes: _Optional[int] = ..., device_uuid: _Optional[str] = ...) -> None: ...

class ArenaLayout(_message.Message):
    __slots__ = ("data_offset", "block_bytes", "layers")
    DATA_OFFSET_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    data_offset: int
    block_bytes: int
    layers: _containers.RepeatedCompositeFieldContainer[LayerLayout]
    def __init__(self, data_offset: _Optional[int] = ..., block_bytes: _Optional[int] = ..., layers: _Optional[_Iterable[_Union[LayerLayout, _Mapping]]] = ...) -> None: ...

class LayerLayout(_message.Message):
    __slots__ = ("k", "v", "k_scale", "v_scale")
    K_FIELD_NUMBER: _ClassVar[int]
    V_FIELD_NUMBER: _ClassVar[int]
    K_SCALE_FIELD_NUMBER: _ClassVar[int]
    V_SCALE_FIELD_NUMBER: _ClassVar[int]
    k: TensorLayout
    v: TensorLayout
    k_scale: TensorLayout
    v_scale: TensorLayout
    def __init__(self, k: _Optional[_Union[TensorLayout, _Mapping]] = ..., v: _Optional[_Union[TensorLayout, _Mapping]] = ..., k_scale: _Optional[_Union[TensorLayout, _Mapping]] = ..., v_scale: _Optional[_Union[TensorLayout, _Mapping]] = ...) -> None: ...

class TensorLayout(_message.Message):
    __slots__ = ("offset", "head_stride", "token_stride", "element_stride")
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    HEAD_STRIDE_FIELD_NUMBER: _ClassVar[int]
    TOKEN_STRIDE_FIELD_NUMBER: _ClassVar[int]
    ELEMENT_STRIDE_FIELD_NUMBER: _ClassVar[int]
    offset: int
    head_stride: int
    token_stride: int
    element_stride: int
    def __init__(self, offset: _Optional[int] = ..., head_stride: _Optional[int] = ..., token_stride: _Optional[int] = ..., element_stride: _Optional[int] = ...) -> None: ...

class SessionKey(_message.Message):
    __slots__ = ("executor_id", "executor_epoch", "session_id")
    EXECUTOR_ID_FIELD_NUMBER: _ClassVar[int]
    EXECUTOR_EPOCH_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    executor_id: str
    executor_epoch: int
    session_id: int
    def __init__(self, executor_id: _Optional[str] = ..., executor_epoch: _Optional[int] = ..., session_id: _Optional[int] = ...) -> None: ...

class SessionStep(_message.Message):
    __slots__ = ("session", "step_id")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    STEP_ID_FIELD_NUMBER: _ClassVar[int]
    session: SessionKey
    step_id: int
    def __init__(self, session: _Optional[_Union[SessionKey, _Mapping]] = ..., step_id: _Optional[int] = ...) -> None: ...

class LeaseHeader(_message.Message):
    __slots__ = ("lease_id", "sequence_number", "acknowledged")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_NUMBER_FIELD_NUMBER: _ClassVar[int]
    ACKNOWLEDGED_FIELD_NUMBER: _ClassVar[int]
    lease_id: int
    sequence_number: int
    acknowledged: _containers.RepeatedCompositeFieldContainer[SessionStep]
    def __init__(self, lease_id: _Optional[int] = ..., sequence_number: _Optional[int] = ..., acknowledged: _Optional[_Iterable[_Union[SessionStep, _Mapping]]] = ...) -> None: ...

class OpenLeaseRequest(_message.Message):
    __slots__ = ("client_id", "client_epoch", "ttl")
    CLIENT_ID_FIELD_NUMBER: _ClassVar[int]
    CLIENT_EPOCH_FIELD_NUMBER: _ClassVar[int]
    TTL_FIELD_NUMBER: _ClassVar[int]
    client_id: str
    client_epoch: int
    ttl: _duration_pb2.Duration
    def __init__(self, client_id: _Optional[str] = ..., client_epoch: _Optional[int] = ..., ttl: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class OpenLeaseResponse(_message.Message):
    __slots__ = ("lease_id", "ttl", "last_sequence_number", "client_epoch")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    TTL_FIELD_NUMBER: _ClassVar[int]
    LAST_SEQUENCE_NUMBER_FIELD_NUMBER: _ClassVar[int]
    CLIENT_EPOCH_FIELD_NUMBER: _ClassVar[int]
    lease_id: int
    ttl: _duration_pb2.Duration
    last_sequence_number: int
    client_epoch: int
    def __init__(self, lease_id: _Optional[int] = ..., ttl: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., last_sequence_number: _Optional[int] = ..., client_epoch: _Optional[int] = ...) -> None: ...

class KeepLeaseAliveRequest(_message.Message):
    __slots__ = ("lease_id", "acknowledged")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    ACKNOWLEDGED_FIELD_NUMBER: _ClassVar[int]
    lease_id: int
    acknowledged: _containers.RepeatedCompositeFieldContainer[SessionStep]
    def __init__(self, lease_id: _Optional[int] = ..., acknowledged: _Optional[_Iterable[_Union[SessionStep, _Mapping]]] = ...) -> None: ...

class KeepLeaseAliveResponse(_message.Message):
    __slots__ = ("ttl",)
    TTL_FIELD_NUMBER: _ClassVar[int]
    ttl: _duration_pb2.Duration
    def __init__(self, ttl: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class CloseLeaseRequest(_message.Message):
    __slots__ = ("lease_id", "free_after")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    FREE_AFTER_FIELD_NUMBER: _ClassVar[int]
    lease_id: int
    free_after: _containers.RepeatedCompositeFieldContainer[SessionStep]
    def __init__(self, lease_id: _Optional[int] = ..., free_after: _Optional[_Iterable[_Union[SessionStep, _Mapping]]] = ...) -> None: ...

class CloseLeaseResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class KeyExtras(_message.Message):
    __slots__ = ("model", "revision", "kv_dtype", "adapter", "tenant", "salt", "image_hashes")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    KV_DTYPE_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    SALT_FIELD_NUMBER: _ClassVar[int]
    IMAGE_HASHES_FIELD_NUMBER: _ClassVar[int]
    model: str
    revision: str
    kv_dtype: str
    adapter: str
    tenant: str
    salt: str
    image_hashes: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, model: _Optional[str] = ..., revision: _Optional[str] = ..., kv_dtype: _Optional[str] = ..., adapter: _Optional[str] = ..., tenant: _Optional[str] = ..., salt: _Optional[str] = ..., image_hashes: _Optional[_Iterable[bytes]] = ...) -> None: ...

class BlockTable(_message.Message):
    __slots__ = ("kv_group", "block_ids")
    KV_GROUP_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    kv_group: int
    block_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, kv_group: _Optional[int] = ..., block_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class MatchPrefixRequest(_message.Message):
    __slots__ = ("arena_id", "token_ids", "extras")
    ARENA_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    EXTRAS_FIELD_NUMBER: _ClassVar[int]
    arena_id: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    extras: KeyExtras
    def __init__(self, arena_id: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., extras: _Optional[_Union[KeyExtras, _Mapping]] = ...) -> None: ...

class MatchPrefixResponse(_message.Message):
    __slots__ = ("num_cached_tokens",)
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    num_cached_tokens: int
    def __init__(self, num_cached_tokens: _Optional[int] = ...) -> None: ...

class AllocateSequencesRequest(_message.Message):
    __slots__ = ("header", "arena_id", "allocations")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    ARENA_ID_FIELD_NUMBER: _ClassVar[int]
    ALLOCATIONS_FIELD_NUMBER: _ClassVar[int]
    header: LeaseHeader
    arena_id: str
    allocations: _containers.RepeatedCompositeFieldContainer[SequenceAllocation]
    def __init__(self, header: _Optional[_Union[LeaseHeader, _Mapping]] = ..., arena_id: _Optional[str] = ..., allocations: _Optional[_Iterable[_Union[SequenceAllocation, _Mapping]]] = ...) -> None: ...

class SequenceAllocation(_message.Message):
    __slots__ = ("sequence_id", "token_ids", "extras", "slack_blocks", "bypass_cache", "request")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    EXTRAS_FIELD_NUMBER: _ClassVar[int]
    SLACK_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BYPASS_CACHE_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    sequence_id: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    extras: KeyExtras
    slack_blocks: int
    bypass_cache: bool
    request: RequestTag
    def __init__(self, sequence_id: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., extras: _Optional[_Union[KeyExtras, _Mapping]] = ..., slack_blocks: _Optional[int] = ..., bypass_cache: bool = ..., request: _Optional[_Union[RequestTag, _Mapping]] = ...) -> None: ...

class RequestTag(_message.Message):
    __slots__ = ("request_id", "traceparent", "tracestate")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    TRACESTATE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    traceparent: str
    tracestate: str
    def __init__(self, request_id: _Optional[str] = ..., traceparent: _Optional[str] = ..., tracestate: _Optional[str] = ...) -> None: ...

class AllocateSequencesResponse(_message.Message):
    __slots__ = ("sequences",)
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    sequences: _containers.RepeatedCompositeFieldContainer[AllocatedSequence]
    def __init__(self, sequences: _Optional[_Iterable[_Union[AllocatedSequence, _Mapping]]] = ...) -> None: ...

class AllocatedSequence(_message.Message):
    __slots__ = ("status", "tables", "num_cached_tokens")
    STATUS_FIELD_NUMBER: _ClassVar[int]
    TABLES_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    status: _status_pb2.Status
    tables: _containers.RepeatedCompositeFieldContainer[BlockTable]
    num_cached_tokens: int
    def __init__(self, status: _Optional[_Union[_status_pb2.Status, _Mapping]] = ..., tables: _Optional[_Iterable[_Union[BlockTable, _Mapping]]] = ..., num_cached_tokens: _Optional[int] = ...) -> None: ...

class ExtendSequencesRequest(_message.Message):
    __slots__ = ("header", "extensions")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    EXTENSIONS_FIELD_NUMBER: _ClassVar[int]
    header: LeaseHeader
    extensions: _containers.RepeatedCompositeFieldContainer[SequenceExtension]
    def __init__(self, header: _Optional[_Union[LeaseHeader, _Mapping]] = ..., extensions: _Optional[_Iterable[_Union[SequenceExtension, _Mapping]]] = ...) -> None: ...

class SequenceExtension(_message.Message):
    __slots__ = ("sequence_id", "have_blocks", "need_blocks", "want_blocks")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    HAVE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NEED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    WANT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    sequence_id: int
    have_blocks: int
    need_blocks: int
    want_blocks: int
    def __init__(self, sequence_id: _Optional[int] = ..., have_blocks: _Optional[int] = ..., need_blocks: _Optional[int] = ..., want_blocks: _Optional[int] = ...) -> None: ...

class ExtendSequencesResponse(_message.Message):
    __slots__ = ("sequences",)
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    sequences: _containers.RepeatedCompositeFieldContainer[ExtendedSequence]
    def __init__(self, sequences: _Optional[_Iterable[_Union[ExtendedSequence, _Mapping]]] = ...) -> None: ...

class ExtendedSequence(_message.Message):
    __slots__ = ("status", "tables")
    STATUS_FIELD_NUMBER: _ClassVar[int]
    TABLES_FIELD_NUMBER: _ClassVar[int]
    status: _status_pb2.Status
    tables: _containers.RepeatedCompositeFieldContainer[BlockTable]
    def __init__(self, status: _Optional[_Union[_status_pb2.Status, _Mapping]] = ..., tables: _Optional[_Iterable[_Union[BlockTable, _Mapping]]] = ...) -> None: ...

class CommitBlocksRequest(_message.Message):
    __slots__ = ("header", "commits")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    COMMITS_FIELD_NUMBER: _ClassVar[int]
    header: LeaseHeader
    commits: _containers.RepeatedCompositeFieldContainer[SequenceCommit]
    def __init__(self, header: _Optional[_Union[LeaseHeader, _Mapping]] = ..., commits: _Optional[_Iterable[_Union[SequenceCommit, _Mapping]]] = ...) -> None: ...

class SequenceCommit(_message.Message):
    __slots__ = ("sequence_id", "num_computed_tokens", "token_offset", "token_ids")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_OFFSET_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    sequence_id: int
    num_computed_tokens: int
    token_offset: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, sequence_id: _Optional[int] = ..., num_computed_tokens: _Optional[int] = ..., token_offset: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class CommitBlocksResponse(_message.Message):
    __slots__ = ("statuses",)
    STATUSES_FIELD_NUMBER: _ClassVar[int]
    statuses: _containers.RepeatedCompositeFieldContainer[_status_pb2.Status]
    def __init__(self, statuses: _Optional[_Iterable[_Union[_status_pb2.Status, _Mapping]]] = ...) -> None: ...

class ForkSequencesRequest(_message.Message):
    __slots__ = ("header", "forks", "releases")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    FORKS_FIELD_NUMBER: _ClassVar[int]
    RELEASES_FIELD_NUMBER: _ClassVar[int]
    header: LeaseHeader
    forks: _containers.RepeatedCompositeFieldContainer[SequenceFork]
    releases: _containers.RepeatedCompositeFieldContainer[SequenceRelease]
    def __init__(self, header: _Optional[_Union[LeaseHeader, _Mapping]] = ..., forks: _Optional[_Iterable[_Union[SequenceFork, _Mapping]]] = ..., releases: _Optional[_Iterable[_Union[SequenceRelease, _Mapping]]] = ...) -> None: ...

class SequenceFork(_message.Message):
    __slots__ = ("parent_sequence_id", "child_sequence_ids", "commit")
    PARENT_SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    CHILD_SEQUENCE_IDS_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    parent_sequence_id: int
    child_sequence_ids: _containers.RepeatedScalarFieldContainer[int]
    commit: SequenceCommit
    def __init__(self, parent_sequence_id: _Optional[int] = ..., child_sequence_ids: _Optional[_Iterable[int]] = ..., commit: _Optional[_Union[SequenceCommit, _Mapping]] = ...) -> None: ...

class ForkSequencesResponse(_message.Message):
    __slots__ = ("forks", "release_statuses")
    FORKS_FIELD_NUMBER: _ClassVar[int]
    RELEASE_STATUSES_FIELD_NUMBER: _ClassVar[int]
    forks: _containers.RepeatedCompositeFieldContainer[ForkedSequence]
    release_statuses: _containers.RepeatedCompositeFieldContainer[_status_pb2.Status]
    def __init__(self, forks: _Optional[_Iterable[_Union[ForkedSequence, _Mapping]]] = ..., release_statuses: _Optional[_Iterable[_Union[_status_pb2.Status, _Mapping]]] = ...) -> None: ...

class ForkedSequence(_message.Message):
    __slots__ = ("status", "child_tables", "copy_sources", "copy_targets")
    STATUS_FIELD_NUMBER: _ClassVar[int]
    CHILD_TABLES_FIELD_NUMBER: _ClassVar[int]
    COPY_SOURCES_FIELD_NUMBER: _ClassVar[int]
    COPY_TARGETS_FIELD_NUMBER: _ClassVar[int]
    status: _status_pb2.Status
    child_tables: _containers.RepeatedCompositeFieldContainer[BlockTable]
    copy_sources: _containers.RepeatedScalarFieldContainer[int]
    copy_targets: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, status: _Optional[_Union[_status_pb2.Status, _Mapping]] = ..., child_tables: _Optional[_Iterable[_Union[BlockTable, _Mapping]]] = ..., copy_sources: _Optional[_Iterable[int]] = ..., copy_targets: _Optional[_Iterable[int]] = ...) -> None: ...

class ReleaseSequencesRequest(_message.Message):
    __slots__ = ("header", "releases")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    RELEASES_FIELD_NUMBER: _ClassVar[int]
    header: LeaseHeader
    releases: _containers.RepeatedCompositeFieldContainer[SequenceRelease]
    def __init__(self, header: _Optional[_Union[LeaseHeader, _Mapping]] = ..., releases: _Optional[_Iterable[_Union[SequenceRelease, _Mapping]]] = ...) -> None: ...

class SequenceRelease(_message.Message):
    __slots__ = ("sequence_id", "commit", "free_after")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    FREE_AFTER_FIELD_NUMBER: _ClassVar[int]
    sequence_id: int
    commit: SequenceCommit
    free_after: _containers.RepeatedCompositeFieldContainer[SessionStep]
    def __init__(self, sequence_id: _Optional[int] = ..., commit: _Optional[_Union[SequenceCommit, _Mapping]] = ..., free_after: _Optional[_Iterable[_Union[SessionStep, _Mapping]]] = ...) -> None: ...

class ReleaseSequencesResponse(_message.Message):
    __slots__ = ("statuses",)
    STATUSES_FIELD_NUMBER: _ClassVar[int]
    statuses: _containers.RepeatedCompositeFieldContainer[_status_pb2.Status]
    def __init__(self, statuses: _Optional[_Iterable[_Union[_status_pb2.Status, _Mapping]]] = ...) -> None: ...

class ReconcileRequest(_message.Message):
    __slots__ = ("header", "sequences", "sent")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    SENT_FIELD_NUMBER: _ClassVar[int]
    header: LeaseHeader
    sequences: _containers.RepeatedCompositeFieldContainer[SequenceSnapshot]
    sent: _containers.RepeatedCompositeFieldContainer[SessionStep]
    def __init__(self, header: _Optional[_Union[LeaseHeader, _Mapping]] = ..., sequences: _Optional[_Iterable[_Union[SequenceSnapshot, _Mapping]]] = ..., sent: _Optional[_Iterable[_Union[SessionStep, _Mapping]]] = ...) -> None: ...

class SequenceSnapshot(_message.Message):
    __slots__ = ("sequence_id", "arena_id", "token_ids", "extras", "num_computed_tokens", "tables", "bypass_cache", "copy_source")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    ARENA_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    EXTRAS_FIELD_NUMBER: _ClassVar[int]
    NUM_COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TABLES_FIELD_NUMBER: _ClassVar[int]
    BYPASS_CACHE_FIELD_NUMBER: _ClassVar[int]
    COPY_SOURCE_FIELD_NUMBER: _ClassVar[int]
    sequence_id: int
    arena_id: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    extras: KeyExtras
    num_computed_tokens: int
    tables: _containers.RepeatedCompositeFieldContainer[BlockTable]
    bypass_cache: bool
    copy_source: int
    def __init__(self, sequence_id: _Optional[int] = ..., arena_id: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., extras: _Optional[_Union[KeyExtras, _Mapping]] = ..., num_computed_tokens: _Optional[int] = ..., tables: _Optional[_Iterable[_Union[BlockTable, _Mapping]]] = ..., bypass_cache: bool = ..., copy_source: _Optional[int] = ...) -> None: ...

class ReconcileResponse(_message.Message):
    __slots__ = ("statuses",)
    STATUSES_FIELD_NUMBER: _ClassVar[int]
    statuses: _containers.RepeatedCompositeFieldContainer[_status_pb2.Status]
    def __init__(self, statuses: _Optional[_Iterable[_Union[_status_pb2.Status, _Mapping]]] = ...) -> None: ...

class WatchBlockEventsRequest(_message.Message):
    __slots__ = ("arena_id", "stream_id", "last_number")
    ARENA_ID_FIELD_NUMBER: _ClassVar[int]
    STREAM_ID_FIELD_NUMBER: _ClassVar[int]
    LAST_NUMBER_FIELD_NUMBER: _ClassVar[int]
    arena_id: str
    stream_id: str
    last_number: int
    def __init__(self, arena_id: _Optional[str] = ..., stream_id: _Optional[str] = ..., last_number: _Optional[int] = ...) -> None: ...

class WatchBlockEventsResponse(_message.Message):
    __slots__ = ("stream_id", "last_number", "begins_snapshot", "events")
    STREAM_ID_FIELD_NUMBER: _ClassVar[int]
    LAST_NUMBER_FIELD_NUMBER: _ClassVar[int]
    BEGINS_SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    stream_id: str
    last_number: int
    begins_snapshot: bool
    events: _containers.RepeatedCompositeFieldContainer[BlockEvent]
    def __init__(self, stream_id: _Optional[str] = ..., last_number: _Optional[int] = ..., begins_snapshot: bool = ..., events: _Optional[_Iterable[_Union[BlockEvent, _Mapping]]] = ...) -> None: ...

class BlockEvent(_message.Message):
    __slots__ = ("stored", "removed")
    STORED_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    stored: BlockStored
    removed: BlockRemoved
    def __init__(self, stored: _Optional[_Union[BlockStored, _Mapping]] = ..., removed: _Optional[_Union[BlockRemoved, _Mapping]] = ...) -> None: ...

class BlockStored(_message.Message):
    __slots__ = ("key", "parent_key", "token_ids")
    KEY_FIELD_NUMBER: _ClassVar[int]
    PARENT_KEY_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    key: bytes
    parent_key: bytes
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, key: _Optional[bytes] = ..., parent_key: _Optional[bytes] = ..., token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class BlockRemoved(_message.Message):
    __slots__ = ("key",)
    KEY_FIELD_NUMBER: _ClassVar[int]
    key: bytes
    def __init__(self, key: _Optional[bytes] = ...) -> None: ...

class GetStatsRequest(_message.Message):
    __slots__ = ("arena_id", "self_check")
    ARENA_ID_FIELD_NUMBER: _ClassVar[int]
    SELF_CHECK_FIELD_NUMBER: _ClassVar[int]
    arena_id: str
    self_check: bool
    def __init__(self, arena_id: _Optional[str] = ..., self_check: bool = ...) -> None: ...

class GetStatsResponse(_message.Message):
    __slots__ = ("arenas", "num_leases", "num_executors")
    ARENAS_FIELD_NUMBER: _ClassVar[int]
    NUM_LEASES_FIELD_NUMBER: _ClassVar[int]
    NUM_EXECUTORS_FIELD_NUMBER: _ClassVar[int]
    arenas: _containers.RepeatedCompositeFieldContainer[ArenaStats]
    num_leases: int
    num_executors: int
    def __init__(self, arenas: _Optional[_Iterable[_Union[ArenaStats, _Mapping]]] = ..., num_leases: _Optional[int] = ..., num_executors: _Optional[int] = ...) -> None: ...

class ArenaStats(_message.Message):
    __slots__ = ("arena_id", "total_blocks", "free_blocks", "cached_blocks", "used_blocks", "fenced_blocks", "reserved_blocks", "num_sequences", "queried_tokens", "hit_tokens", "evicted_blocks", "allocated_blocks", "copied_blocks", "violations")
    ARENA_ID_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CACHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    USED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FENCED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    RESERVED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    QUERIED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    EVICTED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    ALLOCATED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    COPIED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    VIOLATIONS_FIELD_NUMBER: _ClassVar[int]
    arena_id: str
    total_blocks: int
    free_blocks: int
    cached_blocks: int
    used_blocks: int
    fenced_blocks: int
    reserved_blocks: int
    num_sequences: int
    queried_tokens: int
    hit_tokens: int
    evicted_blocks: int
    allocated_blocks: int
    copied_blocks: int
    violations: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, arena_id: _Optional[str] = ..., total_blocks: _Optional[int] = ..., free_blocks: _Optional[int] = ..., cached_blocks: _Optional[int] = ..., used_blocks: _Optional[int] = ..., fenced_blocks: _Optional[int] = ..., reserved_blocks: _Optional[int] = ..., num_sequences: _Optional[int] = ..., queried_tokens: _Optional[int] = ..., hit_tokens: _Optional[int] = ..., evicted_blocks: _Optional[int] = ..., allocated_blocks: _Optional[int] = ..., copied_blocks: _Optional[int] = ..., violations: _Optional[_Iterable[str]] = ...) -> None: ...
