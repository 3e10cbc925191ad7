"""Biases, penalties and masks by their definition: plain Python over the whole history, one token after another.

Written apart from the executor, which keeps counts and works on all rows at once.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Asked:
    """A row's rules; `rules` holds those that are numbers, by their names in the executor."""

    rules: dict[str, Any] = field(default_factory=dict)
    banned: Sequence[Sequence[int]] = ()
    bias: dict[int, float] = field(default_factory=dict)
    allowed: Sequence[int] = ()
    suppressed: Sequence[int] = ()


def adjusted_directly(
    logits: Sequence[float], asked: Asked, prompt: Sequence[int], generated: Sequence[int]
) -> list[float]:
    """Logits as they are sampled from, in float32."""
    f32 = np.float32
    repetition, adjusted = f32(asked.rules.get("repetition_penalty", 1)), []
    frequency, presence = (f32(asked.rules.get(f"{name}_penalty", 0)) for name in ("frequency", "presence"))
    is_early = len(prompt) + len(generated) < asked.rules.get("suppress_until", 0)
    for token, logit in enumerate(logits):
        value = f32(logit) + f32(asked.bias.get(token, 0))
        if token in prompt or token in generated:
            value = value / repetition if value > 0 else value * repetition
        count = list(generated).count(token)
        value = value - frequency * f32(count) - presence * f32(count > 0)
        out = (asked.allowed and token not in asked.allowed) or (is_early and token in asked.suppressed)
        for sequence in asked.banned:
            out = out or [*generated, token][-len(sequence) :] == list(sequence)
        adjusted.append(-math.inf if out else float(value))
    return adjusted
