"""What benchmarks ask of a server: prompts, lengths of answers and times of arrival, as plain data.

Pure and seeded, so that two servers get the same work. Not here: sending it (`load`), which of it runs (`bench`).
"""

import math
import random
from dataclasses import dataclass

TOKEN_IDS = range(1000, 40000)
W_TOKENS = 128  # of a prompt of workload W, and of its answer
SHAREGPT_PROMPT_TOKENS, SHAREGPT_OUTPUT_TOKENS = 161, 338  # means
_SPREAD = 1.0  # standard deviation of the logarithm
_SHORTEST, _LONGEST = 4, 1024


@dataclass(frozen=True)
class Ask:
    """One request."""

    prompt: list[int]
    num_generated: int
    at_s: float = 0.0  # after the begin of the load


@dataclass(frozen=True)
class Load:
    """Requests in order of arrival."""

    name: str
    asks: list[Ask]
    max_streams: int  # asks at a time; more wait in the client, untimed
    use_cache: bool = False


def workload_w(streams: int, requests: int, seed: int) -> Load:
    """Random prompts of 128 tokens, exactly 128 generated, `streams` of them at a time."""
    rng = random.Random(seed)
    return Load(f"W, {streams}", [Ask(_prompt(rng, W_TOKENS), W_TOKENS) for _ in range(requests)], streams)


def sharegpt_shaped(requests: int, per_s: float, seed: int, scale: float = 1.0) -> Load:
    """Log-normal lengths with ShareGPT's means, Poisson arrivals.

    Args:
        per_s: mean rate of arrivals.
        scale: of both means.
    """
    rng = random.Random(seed)
    asks, now = [], 0.0
    for _ in range(requests):
        now += rng.expovariate(per_s)
        prompt = _prompt(rng, _length(rng, SHAREGPT_PROMPT_TOKENS * scale))
        asks.append(Ask(prompt, _length(rng, SHAREGPT_OUTPUT_TOKENS * scale), now))
    return Load("ShareGPT-shaped", asks, requests)


def shared_prefix(requests: int, num_shared: int, num_prompt: int, num_generated: int, seed: int) -> Load:
    """Prompts of which the first `num_shared` tokens are the same, one at a time."""
    rng = random.Random(seed)
    head = _prompt(rng, num_shared)
    asks = [Ask([*head, *_prompt(rng, num_prompt - num_shared)], num_generated) for _ in range(requests)]
    share = round(100 * num_shared / num_prompt)
    return Load(f"prefix, {share} % shared", asks, 1, use_cache=True)


def _prompt(rng: random.Random, length: int) -> list[int]:
    return [rng.choice(TOKEN_IDS) for _ in range(length)]


def _length(rng: random.Random, mean: float) -> int:
    drawn = rng.lognormvariate(math.log(mean) - _SPREAD**2 / 2, _SPREAD)
    return max(_SHORTEST, min(_LONGEST, round(drawn)))
