"""Greedy answers of a real model, SmolLM2-135M-Instruct, equal `transformers` `generate`, token for token.

Twenty real prompts of 1 to 600 tokens, in four variants of the grid that the tiny models run in full.
"""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from octavo.model_source import resolve_model
from tests.engines import RunningEngine, running_engine, running_router
from tests.oracle import Comparison, Oracle
from tests.prompts import real_prompts

NUM_TOKENS = 64
MAX_EXCUSED = 2

pytestmark = pytest.mark.timeout(1500)


@dataclass(frozen=True)
class Case:
    engine: RunningEngine
    oracle: Oracle
    prompts: list[list[int]]


@pytest.fixture(scope="module")
def case() -> Iterator[Case]:
    """The oracle's answers are computed before the engine starts: two models never compute at once."""
    torch.set_num_threads(2)
    name, arguments = resolve_model("demo").pretrained_arguments()
    tokenizer = AutoTokenizer.from_pretrained(name, **arguments)
    model = AutoModelForCausalLM.from_pretrained(
        name, **arguments, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
    )
    oracle, prompts = Oracle(model), real_prompts(tokenizer)
    for prompt in prompts:
        oracle.greedy(prompt, NUM_TOKENS)
    torch.set_num_threads(1)
    with running_engine("demo", "--executor.threads=2") as engine:
        yield Case(engine, oracle, prompts)


@pytest.mark.parametrize(
    ("variant", "chunk", "batch", "warm"),
    [
        ("all at once", 2048, 20, False),
        ("a batch of eight", 2048, 8, False),
        ("chunks of 33 in a batch", 33, 8, False),
        ("prefix hits in a batch", 2048, 8, True),
    ],
    ids=lambda value: str(value).replace(" ", "-") if isinstance(value, str) else None,
)
async def test_every_answer_is_the_oracles(case: Case, variant: str, chunk: int, batch: int, warm: bool):
    comparison, gate, cached = Comparison(), asyncio.Semaphore(batch), 0

    async with running_router(case.engine, max_tokens_per_step=chunk) as client:

        async def check(prompt: list[int]) -> int:
            async with gate:
                if warm:
                    await client.generate(prompt, temperature=0, max_tokens=1, ignore_eos=True, cache_salt=variant)
                answer = await client.generate(
                    prompt, temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, cache_salt=variant
                )
            right = case.oracle.greedy(prompt, NUM_TOKENS)
            comparison.check(answer.choices[0].token_ids, right, f"{variant}, {len(prompt)} tokens")
            return answer.usage.cached_tokens

        cached = sum(await asyncio.gather(*map(check, case.prompts)))
    # Some of the prompts are pieces of one text, but none begins with a whole block of another.
    assert cached == (sum((len(prompt) - 1) // 16 * 16 for prompt in case.prompts) if warm else 0)
    assert comparison.answers == len(case.prompts)
    assert comparison.excused <= MAX_EXCUSED, f"{comparison.excused} of {comparison.answers} left the oracle in doubt"
