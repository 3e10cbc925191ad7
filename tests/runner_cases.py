"""Steps that every runner answers alike: prompts, decodes, all kinds of sampling, on a model with real blocks."""

import numpy as np
import torch

from executor.arena import Arena, KvGeometry, private_arena
from executor.begun import BegunStep
from executor.ids import SessionId
from executor.model.forward import CausalModel
from executor.runner import Runner
from executor.session import Session
from executor.step import RowSampling, Step, StepResult
from executor.step_check import StepLimits
from tests.executor_cases import BLOCK, ints, row, step

CONTEXT = 24
LIMITS = StepLimits(
    block_size=BLOCK, num_blocks=24, vocabulary_size=300, max_context_tokens=CONTEXT, max_tokens_per_step=64
)
# Rows of every kind: greedy, random with filters, with rules, with log-probabilities.
SAMPLINGS = (
    RowSampling(),
    RowSampling(temperature=0.8, top_k=20, top_p=0.9, min_p=0.01, seed=7),
    RowSampling(temperature=1.3, seed=2**63 + 5, presence_penalty=0.5, bias_token_ids=ints(9), biases=np.float32([2])),
    RowSampling(logprobs=True, num_top_logprobs=3, prompt_logprobs_from=1, prompt_logprobs_until=5),
    RowSampling(temperature=1.0, top_p=0.5, seed=3, allowed_token_ids=ints(5, 80, 81, 90)),
)


def make_arena(model: CausalModel, device: torch.device | str = "cpu", dtype: str = "float32") -> Arena:
    """Blocks full of NaN."""
    return private_arena(KvGeometry(BLOCK, dtype, model.layers), LIMITS.num_blocks, device)


def session_of(runner: Runner) -> Session:
    return Session(SessionId(1), 8, LIMITS, runner)


def process_ahead(session: Session, steps: list[Step]) -> list[StepResult]:
    """Each step begins before the one before is finished, where the session allows it."""
    begun = [session.begin(each) for each in steps]
    results = [session.finish(each) if isinstance(each, BegunStep) else each for each in begun]
    assert all(isinstance(result, StepResult) for result in results), results
    return results  # type: ignore[return-value]


def serve(session: Session, num_decodes: int = 2) -> list[StepResult]:
    """Five prompts in one step, then decodes, in the last of which two rows run alone."""
    lengths = [6, 3, 9, 5, 4]
    rng = np.random.default_rng(0)
    rows = [
        row(slot, rng.integers(3, 300, length).tolist(), range(1 + 4 * slot, 5 + 4 * slot), sampling=sampling)
        for slot, (length, sampling) in enumerate(zip(lengths, SAMPLINGS, strict=True))
    ]
    prompts = [(slot, 0, length) for slot, length in enumerate(lengths)]
    steps = [step(1, prompts, started_rows=tuple(rows))]
    for number in range(num_decodes):
        running = range(5) if number < num_decodes - 1 else (1, 3)
        decodes = [(slot, lengths[slot] + number, 1) for slot in running]
        steps.append(step(2 + number, decodes))
    return process_ahead(session, steps)


def assert_same(found: list[StepResult], expected: list[StepResult]) -> None:
    """Tokens alike; log-probabilities within rounding."""
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.token_ids.tolist() == theirs.token_ids.tolist()
        assert mine.num_sampled.tolist() == theirs.num_sampled.tolist()
        for kind in ("sampled_logprobs", "prompt_logprobs"):
            one, other = getattr(mine, kind), getattr(theirs, kind)
            assert (one is None) == (other is None)
            if one is not None:
                assert one.rows.tolist() == other.rows.tolist()
                assert one.ranks.tolist() == other.ranks.tolist()
                np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-3)
