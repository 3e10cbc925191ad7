"""Steps and outcomes of a session as messages of executor.proto. Translation only."""

import itertools
from collections.abc import Mapping
from dataclasses import replace

from octavo.errors import Code, OctavoError
from octavo.v1 import cache_pb2, executor_pb2
from router.beam import Candidate
from router.clients.lease_messages import tag_message
from router.ids import StepId
from router.logprob import TokenLogprob
from router.step import Outcome, RowFailure, RowSampling, RowStart, Step, StepFailed, StepGap, StepResult


def step_message(step: Step) -> executor_pb2.Step:
    """To the wire."""
    message = executor_pb2.Step(
        step_id=step.step_id,
        acknowledged_step=step.acknowledged_step,
        retired_slots=step.retired_slots,
        started_rows=[_row_start_message(start) for start in step.started_rows],
        copy_sources=[source for source, _ in step.copies],
        copy_targets=[target for _, target in step.copies],
        slots=[run.slot for run in step.runs],
        start_positions=[run.start for run in step.runs],
        num_tokens=[run.num_tokens for run in step.runs],
        appended_slots=[slot for slot, _ in step.appended],
        appended_token_ids=[token_id for _, token_id in step.appended],
    )
    if step.extensions:
        message.extensions.add(
            slots=[extension.slot for extension in step.extensions],
            counts=[len(extension.block_ids) for extension in step.extensions],
            block_ids=[block_id for extension in step.extensions for block_id in extension.block_ids],
        )
    return message


def _row_start_message(start: RowStart) -> executor_pb2.RowStart:
    return executor_pb2.RowStart(
        slot=start.slot,
        incarnation=start.incarnation,
        token_ids=start.token_ids,
        num_computed_tokens=start.num_computed_tokens,
        tables=[cache_pb2.BlockTable(block_ids=start.block_ids)],
        sampling=_sampling_message(start.sampling),
        request=tag_message(start.tag),
    )


def _sampling_message(sampling: RowSampling) -> executor_pb2.RowSampling:
    return executor_pb2.RowSampling(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        seed=sampling.seed,
        choice_index=sampling.choice_index,
        num_samples=sampling.num_samples,
        suppressed_token_ids=sampling.suppressed_token_ids,
        suppress_until=sampling.suppress_until,
        logprobs=sampling.logprobs,
        num_top_logprobs=sampling.num_top_logprobs,
        num_prompt_tokens=sampling.num_prompt_tokens,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        bias_token_ids=[token_id for token_id, _ in sampling.logit_bias],
        biases=[bias for _, bias in sampling.logit_bias],
        allowed_token_ids=sampling.allowed_token_ids,
        banned_lengths=[len(sequence) for sequence in sampling.banned],
        banned_token_ids=[token_id for sequence in sampling.banned for token_id in sequence],
        prompt_logprobs_from=sampling.prompt_logprobs_from,
        prompt_logprobs_until=sampling.prompt_logprobs_until,
        grammar=sampling.grammar,
        num_candidates=sampling.num_candidates,
    )


def outcome_of(response: executor_pb2.SessionResponse) -> Outcome:
    """From the wire.

    Raises:
        OctavoError: it is no outcome.
    """
    kind = response.WhichOneof("message")
    if kind == "result":
        return _result_of(response.result)
    if kind == "failed":
        return StepFailed(StepId(response.failed.step_id), response.failed.reason, response.failed.message)
    if kind == "gap":
        return StepGap(StepId(response.gap.last_applied_step))
    raise OctavoError(Code.INTERNAL, "UNEXPECTED_MESSAGE", f"the executor sent {kind} in the middle of a session")


def _result_of(result: executor_pb2.StepResult) -> StepResult:
    logprobs = _logprobs_of(result.sampled_logprobs)
    return StepResult(
        StepId(result.step_id),
        tuple(result.num_sampled),
        tuple(result.token_ids),
        tuple(RowFailure(failure.row, failure.reason, failure.message) for failure in result.failures),
        result.execute_microseconds / 1e6,
        result.began_unix_microseconds / 1e6,
        logprobs,
        _logprobs_of(result.prompt_logprobs),
        _candidates_of(result.candidates, logprobs),
    )


def _candidates_of(
    packed: executor_pb2.Candidates, logprobs: Mapping[int, tuple[TokenLogprob, ...]]
) -> dict[int, tuple[Candidate, ...]]:
    """By running row of the step. The alternatives, which come once, are those of each candidate of a row."""
    by_row: dict[int, tuple[Candidate, ...]] = {}
    scores = zip(packed.token_ids, packed.scores, strict=True)
    for row, count in zip(packed.rows, packed.counts, strict=True):
        told = logprobs.get(row, ())
        entries = (replace(entry, top=told[0].top) for entry in told) if told else itertools.repeat(None, count)
        found = zip(itertools.islice(scores, count), entries, strict=True)
        by_row[row] = tuple(Candidate(token_id, score, entry) for (token_id, score), entry in found)
    return by_row


def _logprobs_of(packed: executor_pb2.Logprobs) -> dict[int, tuple[TokenLogprob, ...]]:
    """By running row of the step; empty where no row asked."""
    by_row: dict[int, list[TokenLogprob]] = {}
    top = zip(packed.top_token_ids, packed.top_logprobs, strict=True)
    entries = zip(packed.rows, packed.token_ids, packed.logprobs, packed.ranks, packed.num_top, strict=True)
    for row, token_id, logprob, rank, num_top in entries:
        alternatives = tuple(itertools.islice(top, num_top))
        by_row.setdefault(row, []).append(TokenLogprob(token_id, logprob, rank, alternatives))
    return {row: tuple(logprobs) for row, logprobs in by_row.items()}
