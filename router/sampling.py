"""How a request's row samples: what the client asked for, in the words of a step."""

from router.live import LiveRequest
from router.step import RowSampling


def row_sampling(live: LiveRequest, eos_token_ids: frozenset[int]) -> RowSampling:
    """Sampling of a row; until `min_tokens` are there, what would end the answer cannot be sampled."""
    sampling, stopping, output = live.checked.sampling, live.checked.stopping, live.checked.output
    suppressed = ending_ids(live, eos_token_ids) if stopping.min_tokens else frozenset()
    return RowSampling(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        seed=sampling.seed,
        suppressed_token_ids=tuple(sorted(suppressed)),
        suppress_until=live.spec.num_prompt_tokens + stopping.min_tokens if suppressed else 0,
        logprobs=output.logprobs,
        num_top_logprobs=output.top_logprobs,
    )


def ending_ids(live: LiveRequest, eos_token_ids: frozenset[int]) -> frozenset[int]:
    """Ids that end this answer."""
    stopping = live.checked.stopping
    return stopping.stop_token_ids | (frozenset() if stopping.ignore_eos else eos_token_ids)
