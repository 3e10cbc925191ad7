"""Whether a row may sample as a router asks: numbers in range, ids in the vocabulary, and a token left to choose.

Part of `step_check`. It changes nothing.
"""

import math

import numpy as np

from executor.step import Ints, RowSampling, invalid_step


def check_sampling(where: str, sampling: RowSampling, num_tokens: int, vocabulary_size: int) -> None:
    """Raise for the first rule that is broken.

    Args:
        where: path of the sampling, for the message.
        num_tokens: of the row's history.

    Raises:
        StepError: INVALID_STEP.
    """
    _check_filters(where, sampling)
    _check_penalties(where, sampling, num_tokens)
    for name in ("suppressed_token_ids", "bias_token_ids", "allowed_token_ids", "banned_token_ids"):
        _check_ids(f"{where}.{name}", getattr(sampling, name), vocabulary_size)
    _check_lists(where, sampling)
    if not _leaves_a_token(sampling, vocabulary_size):
        raise invalid_step(f"{where}: allowed, suppressed and banned ids together leave no token to sample")
    first, end = sampling.prompt_logprobs_from, sampling.prompt_logprobs_until
    if end and not (first >= 1 and end <= num_tokens):
        raise invalid_step(f"{where}.prompt_logprobs_from: [{first}, {end}); allowed is within [1, {num_tokens})")


def _check_filters(where: str, sampling: RowSampling) -> None:
    if not (math.isfinite(sampling.temperature) and sampling.temperature >= 0):
        raise invalid_step(f"{where}.temperature: {sampling.temperature}; allowed are 0 and above")
    if sampling.temperature > 0:
        if not 0 < sampling.top_p <= 1:
            raise invalid_step(f"{where}.top_p: {sampling.top_p}; allowed is (0, 1], 1 is off")
        if not 0 <= sampling.min_p <= 1:
            raise invalid_step(f"{where}.min_p: {sampling.min_p}; allowed is [0, 1], 0 is off")


def _check_penalties(where: str, sampling: RowSampling, num_tokens: int) -> None:
    for name in ("presence_penalty", "frequency_penalty"):
        if not math.isfinite(getattr(sampling, name)):
            raise invalid_step(f"{where}.{name}: {getattr(sampling, name)} is not finite")
    if not (math.isfinite(sampling.repetition_penalty) and sampling.repetition_penalty > 0):
        raise invalid_step(f"{where}.repetition_penalty: {sampling.repetition_penalty}; allowed are those above 0")
    if sampling.num_prompt_tokens > num_tokens:
        raise invalid_step(f"{where}.num_prompt_tokens: {sampling.num_prompt_tokens}; the history has {num_tokens}")


def _check_ids(field: str, token_ids: Ints, vocabulary_size: int) -> None:
    if token_ids.size and token_ids.max() >= vocabulary_size:
        raise invalid_step(f"{field}: {token_ids.max()} is not below {vocabulary_size}")


def _check_lists(where: str, sampling: RowSampling) -> None:
    num_ids, num_biases = len(sampling.bias_token_ids), len(sampling.biases)
    if num_ids != num_biases or len(np.unique(sampling.bias_token_ids)) != num_ids:
        raise invalid_step(f"{where}.bias_token_ids: {num_ids} ids, {num_biases} biases; one per id, each id once")
    if not np.isfinite(sampling.biases).all():
        raise invalid_step(f"{where}.biases: only finite numbers are allowed")
    lengths = sampling.banned_lengths
    if lengths.sum() != len(sampling.banned_token_ids) or (lengths < 1).any():
        raise invalid_step(
            f"{where}.banned_lengths: they add up to {lengths.sum()}, with {len(sampling.banned_token_ids)} ids; "
            "none may be 0"
        )


def _leaves_a_token(sampling: RowSampling, vocabulary_size: int) -> bool:
    """Whether a token is left at every length, whatever is generated: every last id of a sequence counts as out."""
    lasts = sampling.banned_token_ids[np.cumsum(sampling.banned_lengths) - 1]
    out = np.union1d(sampling.suppressed_token_ids, lasts)
    if not sampling.allowed_token_ids.size:
        return len(out) < vocabulary_size
    return bool(np.setdiff1d(sampling.allowed_token_ids, out).size)
