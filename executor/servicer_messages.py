"""Messages of executor.proto into the executor's own words, and back. Translation only; checks are `step_check`'s."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from executor.ids import RouterEpoch, RouterId, StepId
from executor.model.description import ModelDescription
from executor.sessions import Opening
from executor.step import (
    BlockTable,
    Candidates,
    Ints,
    RowSampling,
    RowStart,
    Step,
    StepFailed,
    StepGap,
    StepOutcome,
    StepResult,
    TableExtension,
    TokenLogprobs,
)
from octavo.v1 import executor_pb2 as pb


@dataclass(frozen=True, slots=True)
class ExecutorDescription:
    """What `GetExecutorInfo` answers."""

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


def opening_of(message: pb.Open) -> Opening:
    """From the wire."""
    return Opening(
        RouterId(message.router_id),
        RouterEpoch(message.router_epoch),
        message.takeover,
        StepId(message.last_seen_step),
    )


def step_of(message: pb.Step) -> Step:
    """From the wire."""
    return Step(
        step_id=StepId(message.step_id),
        acknowledged_step=StepId(message.acknowledged_step),
        retired_slots=_ints(message.retired_slots),
        started_rows=tuple(_row_start_of(row) for row in message.started_rows),
        extensions=tuple(_extension_of(extension) for extension in message.extensions),
        copy_sources=_ints(message.copy_sources),
        copy_targets=_ints(message.copy_targets),
        slots=_ints(message.slots),
        start_positions=_ints(message.start_positions),
        num_tokens=_ints(message.num_tokens),
        appended_slots=_ints(message.appended_slots),
        appended_token_ids=_ints(message.appended_token_ids),
    )


def outcome_response(outcome: StepOutcome) -> pb.SessionResponse:
    """To the wire, in a stream."""
    if isinstance(outcome, StepResult):
        return pb.SessionResponse(result=_result_message(outcome))
    if isinstance(outcome, StepFailed):
        return pb.SessionResponse(failed=_failed_message(outcome))
    return pb.SessionResponse(gap=_gap_message(outcome))


def execute_response(outcome: StepOutcome) -> pb.ExecuteStepResponse:
    """To the wire, for the unary twin."""
    if isinstance(outcome, StepResult):
        return pb.ExecuteStepResponse(result=_result_message(outcome))
    if isinstance(outcome, StepFailed):
        return pb.ExecuteStepResponse(failed=_failed_message(outcome))
    return pb.ExecuteStepResponse(gap=_gap_message(outcome))


def info_message(description: ExecutorDescription, *, is_draining: bool) -> pb.GetExecutorInfoResponse:
    """To the wire."""
    model = description.model
    return pb.GetExecutorInfoResponse(
        executor_id=description.executor_id,
        executor_epoch=description.executor_epoch,
        model=pb.ModelDescription(
            name=model.name,
            source=model.source,
            revision=model.revision,
            fingerprint=model.fingerprint,
            architecture=model.architecture,
            vocabulary_size=model.vocabulary_size,
            max_context_tokens=model.max_context_tokens,
            eos_token_ids=model.eos_token_ids,
        ),
        arena_id=description.arena_id,
        block_size=description.block_size,
        num_blocks=description.num_blocks,
        kv_dtype=description.kv_dtype,
        device=description.device,
        attention=description.attention,
        weights_dtype=description.weights_dtype,
        max_rows=description.max_rows,
        max_tokens_per_step=description.max_tokens_per_step,
        max_steps_in_flight=description.max_steps_in_flight,
        version=description.version,
        draining=is_draining,
    )


def _row_start_of(message: pb.RowStart) -> RowStart:
    return RowStart(
        slot=message.slot,
        incarnation=message.incarnation,
        token_ids=_ints(message.token_ids),
        num_computed_tokens=message.num_computed_tokens,
        tables=tuple(BlockTable(table.kv_group, _ints(table.block_ids)) for table in message.tables),
        sampling=_sampling_of(message.sampling) if message.HasField("sampling") else RowSampling(),
    )


def _sampling_of(message: pb.RowSampling) -> RowSampling:
    return RowSampling(
        temperature=message.temperature,
        top_k=message.top_k,
        top_p=message.top_p,
        min_p=message.min_p,
        seed=message.seed,
        choice_index=message.choice_index,
        num_samples=message.num_samples,
        suppressed_token_ids=_ints(message.suppressed_token_ids),
        suppress_until=message.suppress_until,
        num_prompt_tokens=message.num_prompt_tokens,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        repetition_penalty=message.repetition_penalty or 1.0,
        bias_token_ids=_ints(message.bias_token_ids),
        biases=np.array(message.biases, dtype=np.float32),
        allowed_token_ids=_ints(message.allowed_token_ids),
        banned_lengths=_ints(message.banned_lengths),
        banned_token_ids=_ints(message.banned_token_ids),
        logprobs=message.logprobs,
        num_top_logprobs=message.num_top_logprobs,
        prompt_logprobs_from=message.prompt_logprobs_from,
        prompt_logprobs_until=message.prompt_logprobs_until,
        grammar=message.grammar,
        num_candidates=message.num_candidates,
    )


def _extension_of(message: pb.TableExtension) -> TableExtension:
    return TableExtension(message.kv_group, _ints(message.slots), _ints(message.counts), _ints(message.block_ids))


def _result_message(result: StepResult) -> pb.StepResult:
    failures = [pb.RowFailure(row=each.row, reason=each.reason, message=each.message) for each in result.failures]
    return pb.StepResult(
        step_id=result.step_id,
        num_sampled=result.num_sampled.tolist(),
        token_ids=result.token_ids.tolist(),
        failures=failures,
        execute_microseconds=result.execute_microseconds,
        began_unix_microseconds=result.began_unix_microseconds,
        sampled_logprobs=_logprobs_message(result.sampled_logprobs),
        prompt_logprobs=_logprobs_message(result.prompt_logprobs),
        candidates=_candidates_message(result.candidates),
    )


def _logprobs_message(found: TokenLogprobs | None) -> pb.Logprobs | None:
    if found is None or not len(found.rows):
        return None
    return pb.Logprobs(
        rows=found.rows.tolist(),
        token_ids=found.token_ids.tolist(),
        logprobs=found.logprobs.tolist(),
        ranks=found.ranks.tolist(),
        num_top=found.num_top.tolist(),
        top_token_ids=found.top_token_ids.tolist(),
        top_logprobs=found.top_logprobs.tolist(),
    )


def _candidates_message(found: Candidates | None) -> pb.Candidates | None:
    if found is None or not len(found.rows):
        return None
    return pb.Candidates(
        rows=found.rows.tolist(),
        counts=found.counts.tolist(),
        token_ids=found.token_ids.tolist(),
        scores=found.scores.tolist(),
    )


def _failed_message(failed: StepFailed) -> pb.StepFailed:
    return pb.StepFailed(step_id=failed.step_id, reason=failed.reason, message=failed.message)


def _gap_message(gap: StepGap) -> pb.StepGap:
    return pb.StepGap(last_applied_step=gap.last_applied_step)


def _ints(numbers: Sequence[int]) -> Ints:
    return np.fromiter(numbers, dtype=np.int64, count=len(numbers))
