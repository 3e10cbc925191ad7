"""Triton's kernels under a whole server: `--attention triton-interpret` through real processes, greedy, one answer.

What there is to vary varies in the executor's own tests; here is shown that the option alone does it, in a process
whose environment says nothing of Triton.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.engines import RunningEngine, running_engine, running_router
from tests.oracle import Comparison, Oracle
from tests.tiny_models import save_tiny_llama

NUM_TOKENS = 8


@dataclass(frozen=True)
class Case:
    """A model, and an engine that serves it through the interpreter."""

    model: PreTrainedModel
    engine: RunningEngine


@pytest.fixture(scope="module")
def case(tmp_path_factory) -> Iterator[Case]:
    folder = save_tiny_llama(tmp_path_factory.mktemp("model"))
    torch.set_num_threads(1)
    options = ("--executor.attention=triton-interpret", "--executor.threads=1", "--executor.kv-memory-mib=4")
    with running_engine(str(folder), *options) as engine:
        yield Case(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), engine)


async def test_an_answer_through_the_triton_kernels_is_the_oracles(case: Case):
    rng = random.Random(0)
    prompt = [rng.randrange(3, case.model.config.vocab_size) for _ in range(37)]
    async with running_router(case.engine, max_tokens_per_step=16) as client:
        (served,) = await client.models()
        answer = await client.generate(prompt, temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
        again = await client.generate(prompt, temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    assert served.attention == "triton-interpret"
    assert (answer.usage.cached_tokens, again.usage.cached_tokens) == (0, 32)
    comparison = Comparison()
    for one in (answer, again):
        comparison.check(one.choices[0].token_ids, Oracle(case.model).greedy(prompt, NUM_TOKENS), "triton-interpret")
    assert comparison.excused == 0
