"""How a request's row samples: what the client asked for, in the words of a step."""

from collections.abc import Sequence

from octavo.errors import FieldViolation, invalid_argument
from router.live import Choice
from router.model import Model
from router.request import CheckedRequest
from router.step import RowSampling


def row_sampling(live: Choice, eos_token_ids: frozenset[int], vocabulary_size: int) -> RowSampling:
    """Sampling of a row; until `min_tokens` are there, what would end the answer cannot be sampled."""
    sampling, stopping, output = live.checked.sampling, live.checked.stopping, live.checked.output
    suppressed = ending_ids(live.checked, eos_token_ids) if stopping.min_tokens else frozenset()
    num_prompt, scored = live.spec.num_prompt_tokens, live.stream.prompt_offset
    beams = live.request.beams
    scores_prompt = live.checked.scores_prompt and scored < num_prompt
    return RowSampling(
        temperature=sampling.temperature if beams is None else 0.0,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        seed=sampling.seed,
        choice_index=live.index,
        num_samples=live.num_samples,
        suppressed_token_ids=tuple(sorted(suppressed)),
        suppress_until=num_prompt + stopping.min_tokens if suppressed else 0,
        logprobs=output.logprobs or sampling.is_ranked,
        num_top_logprobs=output.top_logprobs,
        num_prompt_tokens=num_prompt,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        logit_bias=sampling.logit_bias,
        allowed_token_ids=sampling.allowed_token_ids,
        banned=live.spec.banned,
        prompt_logprobs_from=scored if scores_prompt else 0,
        prompt_logprobs_until=num_prompt if scores_prompt else 0,
        grammar=live.spec.grammar,
        num_candidates=min(beams.search.rules.num_candidates, vocabulary_size) if beams is not None else 0,
    )


def check_leaves_a_token(checked: CheckedRequest, banned: Sequence[Sequence[int]], model: Model) -> None:
    """Refuse rules that could leave nothing to sample: the last id of every banned sequence counts as out.

    Raises:
        OctavoError: INVALID_ARGUMENT.
    """
    allowed, min_tokens = checked.sampling.allowed_token_ids, checked.stopping.min_tokens
    out = {sequence[-1] for sequence in banned}
    if min_tokens:
        out |= ending_ids(checked, model.eos_token_ids)
    if len(out) < (len(allowed) or model.vocabulary_size) or not out.issuperset(
        allowed or range(model.vocabulary_size)
    ):
        return
    culprits = ["sampling.allowed_token_ids"] * bool(allowed) + ["sampling.bad_words"] * bool(banned)
    field = [*culprits, "stopping.stop_token_ids"][0]
    others = "stop_token_ids and end-of-sequence ids before min_tokens, and last tokens of bad_words, are out"
    raise invalid_argument(FieldViolation(field, f"leaves no token to generate; {others}"))


def ending_ids(checked: CheckedRequest, eos_token_ids: frozenset[int]) -> frozenset[int]:
    """Ids that end this answer."""
    stopping = checked.stopping
    return stopping.stop_token_ids | (frozenset() if stopping.ignore_eos else eos_token_ids)
