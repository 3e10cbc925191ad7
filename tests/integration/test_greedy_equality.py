"""Greedy answers through all three processes equal `transformers` `generate`, token for token.

The full grid runs on two tiny random models: chunk sizes x (alone, batch of 8, prefix hits). What the grid adds to the
executor's own tests is everything else: router, cache service, and the protocols between them.
"""

import asyncio
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.engines import RunningEngine, running_engine, running_router
from tests.oracle import Comparison, Oracle
from tests.tiny_models import save_tiny_gemma3

NUM_TOKENS = 64
BLOCK = 16  # the engines' default
CHUNKS = (1, 7, 16, 33, 2048)
LENGTHS = (1, BLOCK - 1, BLOCK, 2 * BLOCK, BLOCK + 1, 37, 70, 3 * BLOCK + 2)  # every second one alone, too


@dataclass(frozen=True)
class Case:
    """A served model, its oracle, and prompts."""

    engine: RunningEngine
    oracle: Oracle
    prompts: list[list[int]]


@pytest.fixture(scope="module")
def tiny_gemma3(tmp_path_factory) -> Path:
    return save_tiny_gemma3(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def gemma3_engine(tiny_gemma3) -> Iterator[RunningEngine]:
    with running_engine(str(tiny_gemma3), "--executor.threads=1", "--executor.kv-memory-mib=16") as engine:
        yield engine


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def case(request) -> Case:
    folder: Path = request.getfixturevalue(f"tiny_{request.param}")
    engine: RunningEngine = request.getfixturevalue(f"{request.param}_engine")
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    rng = random.Random(0)
    prompts = [[rng.randrange(3, model.config.vocab_size) for _ in range(length)] for length in LENGTHS]
    return Case(engine, Oracle(model), prompts)


@pytest.mark.parametrize("chunk", CHUNKS)
async def test_every_answer_is_the_oracles(case: Case, chunk: int):
    comparison = Comparison()
    async with running_router(case.engine, max_tokens_per_step=chunk) as client:

        async def check(prompt: list[int], variant: str, cached: int) -> None:
            answer = await client.generate(
                prompt, temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, cache_salt=f"{variant} {chunk}"
            )
            assert answer.usage.cached_tokens == cached
            right = case.oracle.greedy(prompt, NUM_TOKENS)
            comparison.check(answer.choices[0].token_ids, right, f"{variant}, chunk {chunk}, {len(prompt)} tokens")

        for prompt in case.prompts[::2]:
            await check(prompt, "alone", 0)
        await asyncio.gather(*(check(prompt, "batch", 0) for prompt in case.prompts))
        # The very prompts that the batch left in the cache.
        await asyncio.gather(*(check(prompt, "batch", (len(prompt) - 1) // BLOCK * BLOCK) for prompt in case.prompts))
    assert comparison.answers == 2.5 * len(case.prompts)
    assert comparison.excused <= 2, f"{comparison.excused} of {comparison.answers} answers left the oracle in doubt"


async def test_a_longer_prompt_hits_what_a_shorter_one_and_its_answer_left(case: Case):
    """The answer's own blocks are findable too: a conversation's next turn computes only what is new."""
    prompt = case.prompts[-1]
    async with running_router(case.engine) as client:
        first = await client.generate(prompt, temperature=0, max_tokens=40, ignore_eos=True, cache_salt="turns")
        longer = [*prompt, *first.choices[0].token_ids, 5, 6, 7]
        second = await client.generate(longer, temperature=0, max_tokens=8, ignore_eos=True, cache_salt="turns")
    computed = len(prompt) + 40 - 1  # the last token of an answer has no KV
    assert second.usage.cached_tokens == computed // BLOCK * BLOCK
    Comparison().check(second.choices[0].token_ids, case.oracle.greedy(longer, 8), "second turn")


@pytest.mark.parametrize("chunk", [7, 2048])
async def test_every_greedy_choice_is_the_oracles(case: Case, chunk: int):
    """n greedy answers are n times the same one: forks share, copy and go on right at every prompt length."""
    comparison = Comparison()
    async with running_router(case.engine, max_tokens_per_step=chunk) as client:

        async def check(prompt: list[int]) -> None:
            answer = await client.generate(
                prompt, n=2, temperature=0, max_tokens=24, ignore_eos=True, cache_salt=f"choices {chunk}"
            )
            assert (answer.usage.prompt_tokens, answer.usage.generated_tokens) == (len(prompt), 48)
            right = case.oracle.greedy(prompt, 24)
            for choice in answer.choices:
                comparison.check(choice.token_ids, right, f"choice {choice.index}, chunk {chunk}, {len(prompt)} tokens")

        await asyncio.gather(*map(check, case.prompts))
    assert comparison.excused <= 1


async def test_seeded_choices_differ_and_come_again(case: Case):
    """Field failure 24: four answers, the first of them that of n=1, also beside others and from the cache."""
    async with running_router(case.engine) as client:

        async def ask(n: int, seed: int = 42) -> list[tuple[int, ...]]:
            answer = await client.generate(
                case.prompts[5], n=n, seed=seed, temperature=1.0, max_tokens=16, ignore_eos=True
            )
            return [tuple(choice.token_ids) for choice in answer.choices]

        four = await ask(4)
        assert len(set(four)) == 4
        (single,), again, other = await asyncio.gather(ask(1), ask(4), ask(3, seed=7))
        assert (single, again) == (four[0], four)
        assert not set(other) & set(four)
