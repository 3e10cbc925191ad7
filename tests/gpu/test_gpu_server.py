"""A whole server on a device: random weights, greedy, every token that of `transformers`."""

import asyncio
import os
import random
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.engines import RunningEngine, running_engine, running_router
from tests.oracle import Comparison, Oracle
from tests.tiny_models import save_tiny_llama

NUM_TOKENS = 24
# Llama-shaped, head size 64, four query heads to a KV head.
SHAPE = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
}


@dataclass(frozen=True)
class Case:
    """A model, and an engine that serves it on the device."""

    model: PreTrainedModel
    engine: RunningEngine


@pytest.fixture(scope="module", params=["graphs", "no graphs"])
def case(request, tmp_path_factory) -> Iterator[Case]:
    folder = save_tiny_llama(tmp_path_factory.mktemp("model"), **SHAPE)
    options = ["--executor.device=cuda:0", "--executor.kv-memory-mib=256"]
    if request.param == "no graphs":
        options.append("--executor.max-graph-rows=0")
    with running_engine(str(folder), *options) as engine:
        yield Case(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), engine)


def prompts(case: Case, number: int) -> list[list[int]]:
    rng = random.Random(0)
    lengths = [1, 15, 16, 17, 33, 100, 200, *(rng.randrange(2, 120) for _ in range(number))][:number]
    return [[rng.randrange(3, case.model.config.vocab_size) for _ in range(length)] for length in lengths]


async def test_greedy_answers_are_those_of_transformers(case: Case):
    """Side by side, in chunks, and a second time from the prefix cache."""
    comparison, oracle = Comparison(), Oracle(case.model)
    asked = prompts(case, 16)
    async with running_router(case.engine, max_tokens_per_step=64) as client:
        (served,) = await client.models()
        assert served.attention == "triton"
        for _ in "12":
            answers = await asyncio.gather(
                *(client.generate(each, temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True) for each in asked)
            )
            for prompt, answer in zip(asked, answers, strict=True):
                comparison.check(answer.choices[0].token_ids, oracle.greedy(prompt, NUM_TOKENS), "cuda")
        assert max(answer.usage.cached_tokens for answer in answers) > 0
    print(f"compared {comparison.answers} answers, {comparison.tokens} tokens, excused {comparison.excused}")


async def test_sampled_answers_do_not_hang_on_their_neighbours(case: Case):
    asked = prompts(case, 8)
    options = {"temperature": 0.9, "top_k": 40, "top_p": 0.9, "seed": 5, "max_tokens": NUM_TOKENS, "ignore_eos": True}
    async with running_router(case.engine) as client:
        alone = [(await client.generate(each, **options)).choices[0].token_ids for each in asked]
        together = await asyncio.gather(*(client.generate(each, **options) for each in asked))
    same = sum(one == other.choices[0].token_ids for one, other in zip(alone, together, strict=True))
    # Logits move by rounding with the shape of the batch; a random draw may then fall on the other side.
    assert same >= len(asked) - 1


async def test_an_executor_that_is_killed_is_followed_by_one_that_maps_the_same_arena(case: Case):
    """Field failure 5. The next process finds prefixes of the one that died, and they are right."""
    prompt = prompts(case, 7)[6]
    comparison, oracle = Comparison(), Oracle(case.model)
    async with running_router(case.engine) as client:
        await client.generate(prompt, temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
        dead = case.engine.child("executor")
        os.kill(dead, signal.SIGKILL)
        deadline_s = time.monotonic() + 90
        while True:
            try:
                answer = await client.generate(prompt, temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
                break
            except Exception:
                if time.monotonic() > deadline_s:
                    raise
                await asyncio.sleep(0.5)
        assert case.engine.child("executor") != dead
    comparison.check(answer.choices[0].token_ids, oracle.greedy(prompt, NUM_TOKENS), "after a kill")
    assert answer.usage.cached_tokens > 0
