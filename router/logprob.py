"""The log-probability of a token, as executors report it and clients get it. A value; nothing is computed here."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """By the model's own distribution. `rank` 1 is the likeliest; `top`: ids and log-probabilities, likeliest first."""

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()
