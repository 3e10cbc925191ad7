"""Greedy answers of a real model, SmolLM2-135M-Instruct, equal `transformers` `generate`, token for token.

Twenty real prompts of 1 to 600 tokens, in variants of the grid that the tiny models run in full. `generate` takes
two minutes for all of them, so it says what is right for every fifth; the answers to the others are judged by the same
model in one pass each, and a longer test has `generate` say it for all.
"""

import asyncio
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from octavo.model_source import resolve_model
from tests.engines import RunningEngine, running_engine, running_router
from tests.oracle import Comparison, Oracle, OracleAnswer
from tests.prompts import real_prompts

NUM_TOKENS = 64
MAX_EXCUSED = 2
GENERATED = slice(None, None, 5)  # prompts that `generate` answers

pytestmark = pytest.mark.timeout(1500)


@dataclass(frozen=True)
class Case:
    engine: RunningEngine
    oracle: Oracle
    prompts: list[list[int]]

    def right(self, prompt: list[int], answer: Sequence[int]) -> OracleAnswer:
        """What the oracle says, from `generate` where it has."""
        if prompt in self.prompts[GENERATED]:
            return self.oracle.greedy(prompt, NUM_TOKENS)
        return self.oracle.judge(prompt, answer)


@pytest.fixture(scope="module")
def case() -> Iterator[Case]:
    """Both models are loaded side by side; the oracle computes while the engine is idle."""
    with ThreadPoolExecutor(1) as thread, ExitStack() as stack:
        starting = thread.submit(stack.enter_context, running_engine("demo", "--executor.threads=2"))
        name, arguments = resolve_model("demo").pretrained_arguments()
        tokenizer = AutoTokenizer.from_pretrained(name, **arguments)
        model = AutoModelForCausalLM.from_pretrained(
            name, **arguments, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
        )
        oracle, prompts, engine = Oracle(model), real_prompts(tokenizer), starting.result()
        torch.set_num_threads(2)
        for prompt in prompts[GENERATED]:
            oracle.greedy(prompt, NUM_TOKENS)
        yield Case(engine, oracle, prompts)
        torch.set_num_threads(1)


@pytest.mark.parametrize(
    ("variant", "chunk", "batch", "warm"),
    [
        pytest.param("all at once", 2048, 20, False, marks=pytest.mark.long),
        pytest.param("a batch of eight", 2048, 8, False, marks=pytest.mark.long),
        ("chunks of 33 in a batch", 33, 8, False),
        ("prefix hits in a batch", 2048, 8, True),
    ],
    ids=lambda value: str(value).replace(" ", "-") if isinstance(value, str) else None,
)
async def test_every_answer_is_the_oracles(case: Case, variant: str, chunk: int, batch: int, warm: bool):
    comparison, gate = Comparison(), asyncio.Semaphore(batch)
    answers: list[tuple[list[int], Sequence[int]]] = []

    async with running_router(case.engine, max_tokens_per_step=chunk) as client:

        async def ask(prompt: list[int]) -> int:
            async with gate:
                if warm:
                    await client.generate(prompt, temperature=0, max_tokens=1, ignore_eos=True, cache_salt=variant)
                answer = await client.generate(
                    prompt, temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, cache_salt=variant
                )
            answers.append((prompt, answer.choices[0].token_ids))
            return answer.usage.cached_tokens

        cached = sum(await asyncio.gather(*map(ask, case.prompts)))
    for prompt, answer in answers:  # now that the engine is idle
        comparison.check(answer, case.right(prompt, answer), f"{variant}, {len(prompt)} tokens")
    # Some of the prompts are pieces of one text, but none begins with a whole block of another.
    assert cached == (sum((len(prompt) - 1) // 16 * 16 for prompt in case.prompts) if warm else 0)
    assert comparison.answers == len(case.prompts)
    assert comparison.excused <= MAX_EXCUSED, f"{comparison.excused} of {comparison.answers} left the oracle in doubt"


@pytest.mark.long
async def test_every_answer_is_that_of_generate(case: Case):
    comparison = Comparison()
    async with running_router(case.engine) as client:
        asked = [
            client.generate(prompt, temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True) for prompt in case.prompts
        ]
        answers = [answer.choices[0].token_ids for answer in await asyncio.gather(*asked)]
    for prompt, answer in zip(case.prompts, answers, strict=True):
        comparison.check(answer, case.oracle.greedy(prompt, NUM_TOKENS), f"{len(prompt)} tokens")
    assert comparison.excused <= MAX_EXCUSED
