from octavo.v1 import cache_pb2 as _cache_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GetExecutorInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetExecutorInfoResponse(_message.Message):
    __slots__ = ("executor_id", "executor_epoch", "model", "arena_id", "block_size", "num_blocks", "kv_dtype", "device", "attention", "weights_dtype", "max_rows", "max_tokens_per_step", "max_steps_in_flight", "version", "draining")
    EXECUTOR_ID_FIELD_NUMBER: _ClassVar[int]
    EXECUTOR_EPOCH_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    ARENA_ID_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    KV_DTYPE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    ATTENTION_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_DTYPE_FIELD_NUMBER: _ClassVar[int]
    MAX_ROWS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_PER_STEP_FIELD_NUMBER: _ClassVar[int]
    MAX_STEPS_IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    executor_id: str
    executor_epoch: int
    model: ModelDescription
    arena_id: str
    block_size: int
    num_blocks: int
    kv_dtype: str
    device: str
    attention: str
    weights_dtype: str
    max_rows: int
    max_tokens_per_step: int
    max_steps_in_flight: int
    version: str
    draining: bool
    def __init__(self, executor_id: _Optional[str] = ..., executor_epoch: _Optional[int] = ..., model: _Optional[_Union[ModelDescription, _Mapping]] = ..., arena_id: _Optional[str] = ..., block_size: _Optional[int] = ..., num_blocks: _Optional[int] = ..., kv_dtype: _Optional[str] = ..., device: _Optional[str] = ..., attention: _Optional[str] = ..., weights_dtype: _Optional[str] = ..., max_rows: _Optional[int] = ..., max_tokens_per_step: _Optional[int] = ..., max_steps_in_flight: _Optional[int] = ..., version: _Optional[str] = ..., draining: bool = ...) -> None: ...

class ModelDescription(_message.Message):
    __slots__ = ("name", "source", "revision", "fingerprint", "architecture", "vocabulary_size", "max_context_tokens", "eos_token_ids")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    ARCHITECTURE_FIELD_NUMBER: _ClassVar[int]
    VOCABULARY_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    name: str
    source: str
    revision: str
    fingerprint: str
    architecture: str
    vocabulary_size: int
    max_context_tokens: int
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, name: _Optional[str] = ..., source: _Optional[str] = ..., revision: _Optional[str] = ..., fingerprint: _Optional[str] = ..., architecture: _Optional[str] = ..., vocabulary_size: _Optional[int] = ..., max_context_tokens: _Optional[int] = ..., eos_token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class SessionRequest(_message.Message):
    __slots__ = ("open", "step", "acknowledge", "close")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    ACKNOWLEDGE_FIELD_NUMBER: _ClassVar[int]
    CLOSE_FIELD_NUMBER: _ClassVar[int]
    open: Open
    step: Step
    acknowledge: Acknowledge
    close: Close
    def __init__(self, open: _Optional[_Union[Open, _Mapping]] = ..., step: _Optional[_Union[Step, _Mapping]] = ..., acknowledge: _Optional[_Union[Acknowledge, _Mapping]] = ..., close: _Optional[_Union[Close, _Mapping]] = ...) -> None: ...

class SessionResponse(_message.Message):
    __slots__ = ("opened", "result", "failed", "gap", "draining")
    OPENED_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    GAP_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    opened: Opened
    result: StepResult
    failed: StepFailed
    gap: StepGap
    draining: Draining
    def __init__(self, opened: _Optional[_Union[Opened, _Mapping]] = ..., result: _Optional[_Union[StepResult, _Mapping]] = ..., failed: _Optional[_Union[StepFailed, _Mapping]] = ..., gap: _Optional[_Union[StepGap, _Mapping]] = ..., draining: _Optional[_Union[Draining, _Mapping]] = ...) -> None: ...

class Open(_message.Message):
    __slots__ = ("router_id", "router_epoch", "takeover", "last_seen_step")
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    ROUTER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    TAKEOVER_FIELD_NUMBER: _ClassVar[int]
    LAST_SEEN_STEP_FIELD_NUMBER: _ClassVar[int]
    router_id: str
    router_epoch: int
    takeover: bool
    last_seen_step: int
    def __init__(self, router_id: _Optional[str] = ..., router_epoch: _Optional[int] = ..., takeover: bool = ..., last_seen_step: _Optional[int] = ...) -> None: ...

class Opened(_message.Message):
    __slots__ = ("executor_epoch", "session_id", "last_applied_step")
    EXECUTOR_EPOCH_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    LAST_APPLIED_STEP_FIELD_NUMBER: _ClassVar[int]
    executor_epoch: int
    session_id: int
    last_applied_step: int
    def __init__(self, executor_epoch: _Optional[int] = ..., session_id: _Optional[int] = ..., last_applied_step: _Optional[int] = ...) -> None: ...

class Acknowledge(_message.Message):
    __slots__ = ("step_id",)
    STEP_ID_FIELD_NUMBER: _ClassVar[int]
    step_id: int
    def __init__(self, step_id: _Optional[int] = ...) -> None: ...

class Close(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Draining(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Step(_message.Message):
    __slots__ = ("step_id", "acknowledged_step", "retired_slots", "started_rows", "extensions", "copy_sources", "copy_targets", "slots", "start_positions", "num_tokens", "appended_slots", "appended_token_ids")
    STEP_ID_FIELD_NUMBER: _ClassVar[int]
    ACKNOWLEDGED_STEP_FIELD_NUMBER: _ClassVar[int]
    RETIRED_SLOTS_FIELD_NUMBER: _ClassVar[int]
    STARTED_ROWS_FIELD_NUMBER: _ClassVar[int]
    EXTENSIONS_FIELD_NUMBER: _ClassVar[int]
    COPY_SOURCES_FIELD_NUMBER: _ClassVar[int]
    COPY_TARGETS_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    START_POSITIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    APPENDED_SLOTS_FIELD_NUMBER: _ClassVar[int]
    APPENDED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    step_id: int
    acknowledged_step: int
    retired_slots: _containers.RepeatedScalarFieldContainer[int]
    started_rows: _containers.RepeatedCompositeFieldContainer[RowStart]
    extensions: _containers.RepeatedCompositeFieldContainer[TableExtension]
    copy_sources: _containers.RepeatedScalarFieldContainer[int]
    copy_targets: _containers.RepeatedScalarFieldContainer[int]
    slots: _containers.RepeatedScalarFieldContainer[int]
    start_positions: _containers.RepeatedScalarFieldContainer[int]
    num_tokens: _containers.RepeatedScalarFieldContainer[int]
    appended_slots: _containers.RepeatedScalarFieldContainer[int]
    appended_token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, step_id: _Optional[int] = ..., acknowledged_step: _Optional[int] = ..., retired_slots: _Optional[_Iterable[int]] = ..., started_rows: _Optional[_Iterable[_Union[RowStart, _Mapping]]] = ..., extensions: _Optional[_Iterable[_Union[TableExtension, _Mapping]]] = ..., copy_sources: _Optional[_Iterable[int]] = ..., copy_targets: _Optional[_Iterable[int]] = ..., slots: _Optional[_Iterable[int]] = ..., start_positions: _Optional[_Iterable[int]] = ..., num_tokens: _Optional[_Iterable[int]] = ..., appended_slots: _Optional[_Iterable[int]] = ..., appended_token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class RowStart(_message.Message):
    __slots__ = ("slot", "incarnation", "token_ids", "num_computed_tokens", "tables", "sampling", "request")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TABLES_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    slot: int
    incarnation: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    num_computed_tokens: int
    tables: _containers.RepeatedCompositeFieldContainer[_cache_pb2.BlockTable]
    sampling: RowSampling
    request: _cache_pb2.RequestTag
    def __init__(self, slot: _Optional[int] = ..., incarnation: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., num_computed_tokens: _Optional[int] = ..., tables: _Optional[_Iterable[_Union[_cache_pb2.BlockTable, _Mapping]]] = ..., sampling: _Optional[_Union[RowSampling, _Mapping]] = ..., request: _Optional[_Union[_cache_pb2.RequestTag, _Mapping]] = ...) -> None: ...

class RowSampling(_message.Message):
    __slots__ = ("temperature", "top_k", "top_p", "min_p", "seed", "choice_index", "suppressed_token_ids", "suppress_until", "num_samples", "num_prompt_tokens", "presence_penalty", "frequency_penalty", "repetition_penalty", "bias_token_ids", "biases", "allowed_token_ids", "banned_lengths", "banned_token_ids", "logprobs", "num_top_logprobs", "prompt_logprobs_from", "prompt_logprobs_until", "grammar", "num_candidates")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    CHOICE_INDEX_FIELD_NUMBER: _ClassVar[int]
    SUPPRESSED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SUPPRESS_UNTIL_FIELD_NUMBER: _ClassVar[int]
    NUM_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    BIAS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BIASES_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BANNED_LENGTHS_FIELD_NUMBER: _ClassVar[int]
    BANNED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FROM_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_UNTIL_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    NUM_CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    choice_index: int
    suppressed_token_ids: _containers.RepeatedScalarFieldContainer[int]
    suppress_until: int
    num_samples: int
    num_prompt_tokens: int
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    bias_token_ids: _containers.RepeatedScalarFieldContainer[int]
    biases: _containers.RepeatedScalarFieldContainer[float]
    allowed_token_ids: _containers.RepeatedScalarFieldContainer[int]
    banned_lengths: _containers.RepeatedScalarFieldContainer[int]
    banned_token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: bool
    num_top_logprobs: int
    prompt_logprobs_from: int
    prompt_logprobs_until: int
    grammar: str
    num_candidates: int
    def __init__(self, temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., seed: _Optional[int] = ..., choice_index: _Optional[int] = ..., suppressed_token_ids: _Optional[_Iterable[int]] = ..., suppress_until: _Optional[int] = ..., num_samples: _Optional[int] = ..., num_prompt_tokens: _Optional[int] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., bias_token_ids: _Optional[_Iterable[int]] = ..., biases: _Optional[_Iterable[float]] = ..., allowed_token_ids: _Optional[_Iterable[int]] = ..., banned_lengths: _Optional[_Iterable[int]] = ..., banned_token_ids: _Optional[_Iterable[int]] = ..., logprobs: bool = ..., num_top_logprobs: _Optional[int] = ..., prompt_logprobs_from: _Optional[int] = ..., prompt_logprobs_until: _Optional[int] = ..., grammar: _Optional[str] = ..., num_candidates: _Optional[int] = ...) -> None: ...

class TableExtension(_message.Message):
    __slots__ = ("kv_group", "slots", "counts", "block_ids")
    KV_GROUP_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    kv_group: int
    slots: _containers.RepeatedScalarFieldContainer[int]
    counts: _containers.RepeatedScalarFieldContainer[int]
    block_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, kv_group: _Optional[int] = ..., slots: _Optional[_Iterable[int]] = ..., counts: _Optional[_Iterable[int]] = ..., block_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class StepResult(_message.Message):
    __slots__ = ("step_id", "num_sampled", "token_ids", "failures", "execute_microseconds", "began_unix_microseconds", "sampled_logprobs", "prompt_logprobs", "candidates")
    STEP_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_SAMPLED_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    EXECUTE_MICROSECONDS_FIELD_NUMBER: _ClassVar[int]
    BEGAN_UNIX_MICROSECONDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLED_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    step_id: int
    num_sampled: _containers.RepeatedScalarFieldContainer[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    failures: _containers.RepeatedCompositeFieldContainer[RowFailure]
    execute_microseconds: int
    began_unix_microseconds: int
    sampled_logprobs: Logprobs
    prompt_logprobs: Logprobs
    candidates: Candidates
    def __init__(self, step_id: _Optional[int] = ..., num_sampled: _Optional[_Iterable[int]] = ..., token_ids: _Optional[_Iterable[int]] = ..., failures: _Optional[_Iterable[_Union[RowFailure, _Mapping]]] = ..., execute_microseconds: _Optional[int] = ..., began_unix_microseconds: _Optional[int] = ..., sampled_logprobs: _Optional[_Union[Logprobs, _Mapping]] = ..., prompt_logprobs: _Optional[_Union[Logprobs, _Mapping]] = ..., candidates: _Optional[_Union[Candidates, _Mapping]] = ...) -> None: ...

class Candidates(_message.Message):
    __slots__ = ("rows", "counts", "token_ids", "scores")
    ROWS_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SCORES_FIELD_NUMBER: _ClassVar[int]
    rows: _containers.RepeatedScalarFieldContainer[int]
    counts: _containers.RepeatedScalarFieldContainer[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    scores: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, rows: _Optional[_Iterable[int]] = ..., counts: _Optional[_Iterable[int]] = ..., token_ids: _Optional[_Iterable[int]] = ..., scores: _Optional[_Iterable[float]] = ...) -> None: ...

class Logprobs(_message.Message):
    __slots__ = ("rows", "token_ids", "logprobs", "ranks", "num_top", "top_token_ids", "top_logprobs")
    ROWS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOP_FIELD_NUMBER: _ClassVar[int]
    TOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    rows: _containers.RepeatedScalarFieldContainer[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedScalarFieldContainer[float]
    ranks: _containers.RepeatedScalarFieldContainer[int]
    num_top: _containers.RepeatedScalarFieldContainer[int]
    top_token_ids: _containers.RepeatedScalarFieldContainer[int]
    top_logprobs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, rows: _Optional[_Iterable[int]] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[float]] = ..., ranks: _Optional[_Iterable[int]] = ..., num_top: _Optional[_Iterable[int]] = ..., top_token_ids: _Optional[_Iterable[int]] = ..., top_logprobs: _Optional[_Iterable[float]] = ...) -> None: ...

class RowFailure(_message.Message):
    __slots__ = ("row", "reason", "message")
    ROW_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    row: int
    reason: str
    message: str
    def __init__(self, row: _Optional[int] = ..., reason: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...

class StepFailed(_message.Message):
    __slots__ = ("step_id", "reason", "message")
    STEP_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    step_id: int
    reason: str
    message: str
    def __init__(self, step_id: _Optional[int] = ..., reason: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...

class StepGap(_message.Message):
    __slots__ = ("last_applied_step",)
    LAST_APPLIED_STEP_FIELD_NUMBER: _ClassVar[int]
    last_applied_step: int
    def __init__(self, last_applied_step: _Optional[int] = ...) -> None: ...

class ExecuteStepRequest(_message.Message):
    __slots__ = ("open", "step")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    open: Open
    step: Step
    def __init__(self, open: _Optional[_Union[Open, _Mapping]] = ..., step: _Optional[_Union[Step, _Mapping]] = ...) -> None: ...

class ExecuteStepResponse(_message.Message):
    __slots__ = ("result", "failed", "gap")
    RESULT_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    GAP_FIELD_NUMBER: _ClassVar[int]
    result: StepResult
    failed: StepFailed
    gap: StepGap
    def __init__(self, result: _Optional[_Union[StepResult, _Mapping]] = ..., failed: _Optional[_Union[StepFailed, _Mapping]] = ..., gap: _Optional[_Union[StepGap, _Mapping]] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ("num_sessions",)
    NUM_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    num_sessions: int
    def __init__(self, num_sessions: _Optional[int] = ...) -> None: ...
