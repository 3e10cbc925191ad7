"""Int8 through all three processes, weights and KV: an answer depends on its prompt alone, and is near that of float32.

Integer products are exact and every row's arithmetic is fixed by its positions, so the promise is the same tokens, not
nearly the same; the executor's own tests hold the logits to it, bit by bit.
"""

import asyncio
import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from octavo import AsyncClient
from tests.engines import RunningEngine, router_in_front_of, running_engine, running_router
from tests.preempting import preempt_at

NUM_TOKENS = 40
CHUNKS = (7, 16, 2048)
LENGTHS = (1, 16, 37)


@pytest.fixture(scope="module")
def int8_engine(tiny_llama: Path) -> Iterator[RunningEngine]:
    options = ("--executor.threads=1", "--executor.kv-memory-mib=16", "--executor.weights=int8")
    options += ("--executor.kv-dtype=int8",)
    with running_engine(str(tiny_llama), *options) as engine:
        yield engine


def some_prompts() -> list[list[int]]:
    rng = random.Random(5)
    return [[rng.randrange(3, 200) for _ in range(length)] for length in LENGTHS]


async def ask(client: AsyncClient, prompt: list[int], salt: str) -> tuple[int, ...]:
    answer = await client.generate(prompt, temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, cache_salt=salt)
    return tuple(answer.choices[0].token_ids)


async def test_alone_in_a_batch_in_chunks_from_the_cache_and_after_preemptions(int8_engine: RunningEngine):
    prompts = some_prompts()
    answers: dict[str, list[tuple[int, ...]]] = {}
    for chunk in CHUNKS:
        async with running_router(int8_engine, max_tokens_per_step=chunk) as client:
            answers[f"alone, {chunk}"] = [await ask(client, prompt, f"alone {chunk}") for prompt in prompts]
            for place in ("batch", "prefix hits"):
                asked = (ask(client, prompt, f"batch {chunk}") for prompt in prompts)
                answers[f"{place}, {chunk}"] = await asyncio.gather(*asked)
    async with router_in_front_of(int8_engine) as router, AsyncClient(f"127.0.0.1:{router.port}") as client:
        (backend,) = router.fleet.backends
        points = [1, 9, 30]
        done = preempt_at(backend.engine, points)
        answers["preempted"] = [await ask(client, prompt, "preempted") for prompt in prompts]
        assert len(done) >= len(points) * len(prompts)
        shared = await client.generate(prompts[2], temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, n=3)
        for choice in shared.choices:  # they share the prompt's blocks, the last one until they write into it
            answers[f"choice {choice.index}"] = [*answers["preempted"][:2], tuple(choice.token_ids)]
    right = answers["alone, 2048"]
    assert all(len(tokens) == NUM_TOKENS for tokens in right)
    assert [place for place, given in answers.items() if list(given) != right] == []


async def test_it_says_that_it_is_int8_and_stays_near_float32(int8_engine: RunningEngine, llama_engine: RunningEngine):
    """The distribution of the first token: another one by a little, and not the same."""
    found = {}
    for engine in (int8_engine, llama_engine):
        async with running_router(engine) as client:
            (model,) = await client.models()
            wanted = {"temperature": 0, "max_tokens": 1, "logprobs": True, "top_logprobs": 20}
            answer = await client.generate(some_prompts()[2], **wanted)
        found[model.weights_dtype] = {each.token_id: each.logprob for each in answer.choices[0].logprobs[0].top}
    coded, exact = found["int8"], found["float32"]
    shared = coded.keys() & exact.keys()
    assert len(shared) > 10
    assert 0 < max(abs(coded[token] - exact[token]) for token in shared) < 0.2


async def test_codes_and_scales_outlive_the_executor_that_wrote_them(int8_engine: RunningEngine):
    """Field failure 38: its successor reads them from the same blocks."""
    prompt = some_prompts()[2]
    async with running_router(int8_engine) as client:
        before = await client.generate(prompt, temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
        os.kill(int8_engine.child("executor"), signal.SIGKILL)
        after = await client.generate(prompt, temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    assert after.usage.cached_tokens == 32
    assert after.choices[0].token_ids == before.choices[0].token_ids
