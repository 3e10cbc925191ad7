"""Fields of sampling and output through all three processes, on a tiny model, against a direct computation.

The direct computation runs the model of `transformers` over the whole history for each token and applies each rule by
its definition. Where its two best candidates lie closer than rounding, the rest of an answer is not compared.
"""

import asyncio
import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from octavo import AsyncClient
from octavo.results import Generation
from tests.engines import RunningEngine, running_router
from tests.logit_rules import Asked, adjusted_directly
from tests.oracle import Comparison, OracleAnswer
from tests.tiny_models import EOS, VOCABULARY_SIZE, tiny_tokenizer

NUM_TOKENS = 16
CHUNKS = (1, 7, 2048)
TOLERANCE = 1e-3
TOP = 5


@dataclass(frozen=True)
class Case:
    """A served model, the same model here, and prompts."""

    engine: RunningEngine
    model: PreTrainedModel
    prompts: list[list[int]]

    @torch.inference_mode()
    def logits(self, history: Sequence[int]) -> torch.Tensor:
        """[len(history), vocabulary_size] float32"""
        return self.model(torch.tensor([list(history)])).logits[0]

    def greedy(self, prompt: list[int], asked: Asked) -> OracleAnswer:
        """By definition."""
        generated: list[int] = []
        gaps = []
        for _ in range(NUM_TOKENS):
            logits = adjusted_directly(self.logits([*prompt, *generated])[-1].tolist(), asked, prompt, generated)
            best, second = sorted(range(len(logits)), key=lambda token: (-logits[token], token))[:2]
            generated.append(best)
            gaps.append(logits[best] - logits[second])
        return OracleAnswer(generated, gaps)


@pytest.fixture(scope="module")
def case(llama_engine: RunningEngine, tiny_llama: Path) -> Case:
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32).eval()
    rng = random.Random(1)
    prompts = [[rng.randrange(5, 261) for _ in range(length)] for length in (1, 16, 37)]
    return Case(llama_engine, model, prompts)


async def answer(client: AsyncClient, prompt: Sequence[int], **options: Any) -> Generation:
    fixed = {"max_tokens": NUM_TOKENS, "ignore_eos": True}
    return await client.generate(list(prompt), **(fixed | options))


def tokens_of(generation: Generation) -> tuple[int, ...]:
    return generation.choices[0].token_ids


# ------------------------------------------------------------------------------------------- rules of the logits

RULES: dict[str, tuple[Asked, dict[str, Any]]] = {
    "presence": (Asked({"presence_penalty": 1.0}), {"presence_penalty": 1.0}),
    "frequency": (Asked({"frequency_penalty": -0.5}), {"frequency_penalty": -0.5}),
    "repetition": (Asked({"repetition_penalty": 1.5}), {"repetition_penalty": 1.5}),
    "bias": (Asked(bias={7: 3.5, 8: 3.0, 200: -100.0}), {"logit_bias": {7: 3.5, 8: 3.0, 200: -100.0}}),
    "allowed": (Asked(allowed=[30, 31, 32, 40]), {"allowed_token_ids": [40, 30, 31, 32]}),
    "all": (
        Asked(
            {"presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.25},
            bias={7: 2.0},
            allowed=list(range(150)),
        ),
        {
            "presence_penalty": 0.5,
            "frequency_penalty": 0.5,
            "repetition_penalty": 1.25,
            "logit_bias": {7: 2.0},
            "allowed_token_ids": list(range(150)),
        },
    ),
}


async def test_each_rule_on_the_wire(case: Case) -> None:
    """All rules of all prompts at once, so that rows with different rules share steps."""
    comparison = Comparison()
    async with running_router(case.engine) as client:

        async def check(name: str, prompt: list[int]) -> None:
            asked, options = RULES[name]
            found = await answer(client, prompt, temperature=0, **options)
            comparison.check(tokens_of(found), case.greedy(prompt, asked), f"{name}, {len(prompt)} tokens")

        await asyncio.gather(*(check(name, prompt) for name in RULES for prompt in case.prompts))
    assert comparison.answers == len(RULES) * len(case.prompts)
    assert comparison.excused <= 2


async def test_bad_words_do_not_appear(case: Case) -> None:
    """A word of one token and one of two, both of which the answer would have had."""
    tokenizer, comparison = tiny_tokenizer(), Comparison()
    prompt = case.prompts[1]
    plain = case.greedy(prompt, Asked()).token_ids
    pairs = [tokenizer.decode(pair) for pair in itertools.pairwise(plain)]
    word = next(text for text in pairs if text.isascii() and len(text) == 2)
    single = next(text for text in map(tokenizer.decode, plain) if text.isascii() and len(text) == 1)
    async with running_router(case.engine) as client:
        for words in ([word], [single], [word, single]):
            encoded = [tokenizer.encode(text, add_special_tokens=False) for text in words]
            found = await answer(client, prompt, temperature=0, bad_words=words)
            comparison.check(tokens_of(found), case.greedy(prompt, Asked(banned=encoded)), repr(words))
            assert not any(banned in found.text for banned in words)


async def test_min_tokens_holds_back_every_end(case: Case) -> None:
    """Field failure 22: two end-of-sequence ids and a stop id, all of them made the likeliest by a bias."""
    bias = {EOS: 100.0, 4: 99.0, 77: 98.0}
    async with running_router(case.engine) as client:
        for min_tokens in (0, 1, 4):
            options = {"logit_bias": bias, "stop_token_ids": [77], "min_tokens": min_tokens, "max_tokens": 9}
            found = await client.generate(case.prompts[1], temperature=0, **options)
            assert found.finish_reason == "eos"
            assert len(tokens_of(found)) == min_tokens + 1
            assert not set(tokens_of(found)[:-1]) & set(bias)


# ------------------------------------------------------------------------------------------------ log-probabilities


def check_logprobs(found: Sequence[Any], logits: torch.Tensor, token_ids: Sequence[int]) -> None:
    """logits: [len(token_ids), vocabulary_size], those before each token."""
    right = torch.log_softmax(logits.double(), dim=-1)
    assert [entry.token_id for entry in found] == list(token_ids)
    for entry, row in zip(found, right, strict=True):
        assert entry.logprob == pytest.approx(row[entry.token_id].item(), abs=TOLERANCE)
        assert 1 + (row > row[entry.token_id] + TOLERANCE).sum() <= entry.rank
        assert entry.rank <= (row >= row[entry.token_id] - TOLERANCE).sum()
        values = [top.logprob for top in entry.top]
        assert values == sorted(values, reverse=True)
        assert values == pytest.approx(row.topk(TOP).values.tolist(), abs=TOLERANCE)
        for top in entry.top:
            assert top.logprob == pytest.approx(row[top.token_id].item(), abs=TOLERANCE)


async def test_logprobs_are_the_models(case: Case) -> None:
    """Whatever rules and temperature the tokens were sampled by."""
    async with running_router(case.engine) as client:
        for prompt in case.prompts:
            for options in ({"temperature": 0}, {"temperature": 1.5, "seed": 5, **RULES["all"][1]}):
                found = await answer(client, prompt, logprobs=True, top_logprobs=TOP, **options)
                assert tokens_of(found) == tokens_of(await answer(client, prompt, **options))
                history = [*prompt, *tokens_of(found)]
                check_logprobs(found.choices[0].logprobs, case.logits(history)[len(prompt) - 1 : -1], tokens_of(found))


async def test_prompt_logprobs_cold_cached_and_in_any_chunks(case: Case) -> None:
    """Field failure 23: the same numbers each time; of other chunks, within rounding."""
    for chunk in CHUNKS:
        async with running_router(case.engine, max_tokens_per_step=chunk) as client:
            for prompt in case.prompts:
                await answer(client, prompt, temperature=0)  # leaves the prompt in the cache
                options = {"temperature": 0, "prompt_logprobs": True, "top_logprobs": TOP}
                first = await answer(client, prompt, **options)
                second = await answer(client, prompt, **options)
                assert first.usage.cached_tokens == second.usage.cached_tokens == 0
                assert first.prompt_logprobs == second.prompt_logprobs
                check_logprobs(first.prompt_logprobs, case.logits(prompt)[:-1], prompt[1:])
                stream = client.stream(prompt, max_tokens=2, **options)
                assert (await stream.result()).prompt_logprobs == first.prompt_logprobs


# ---------------------------------------------------------------------------------------------- seeds and filters


async def test_seed_42_whatever_runs_beside_it(case: Case) -> None:
    """Field failure 24: alone, beside others of every kind, in rows 0 to 3, joining late, leaving early."""
    prompt = case.prompts[1]
    seeded = {"temperature": 1.0, "seed": 42, "frequency_penalty": 0.5}
    neighbours: list[dict[str, Any]] = [
        {"temperature": 1.0},
        {"temperature": 0},
        {"temperature": 1.3, "seed": 7, "top_k": 5},
        {"temperature": 0.7, "repetition_penalty": 1.4, "logprobs": True},
    ]
    async with running_router(case.engine) as client:
        alone = tokens_of(await answer(client, prompt, **seeded))
        assert alone != tokens_of(await answer(client, prompt, **(seeded | {"seed": 43})))
        for row in range(4):
            for num_others in (3, 60):  # that end before it, and after it
                others = [
                    asyncio.create_task(answer(client, case.prompts[2], max_tokens=num_others, **options))
                    for options in neighbours
                ]
                await asyncio.sleep(0.05 * row)
                found = await answer(client, prompt, **seeded)
                assert tokens_of(found) == alone, (row, num_others)
                await asyncio.gather(*others)


async def test_filters_at_their_edges(case: Case) -> None:
    """Field failure 26: what is off is off, what leaves one token is greedy, one after another and all in one batch."""
    prompt = case.prompts[2]
    off = [{"top_k": top_k} for top_k in (0, -1, VOCABULARY_SIZE, VOCABULARY_SIZE + 1)]
    off += [{}, {"min_p": 0.0}, {"top_p": 1.0}, {"presence_penalty": 0.0, "repetition_penalty": 1.0}]
    one = [{"top_k": 1}, {"min_p": 1.0}, {"top_p": 1e-6}, {"temperature": 1e-6}]
    seeded = {"temperature": 1.0, "seed": 9}
    async with running_router(case.engine) as client:
        plain = tokens_of(await answer(client, prompt, **seeded))
        greedy = tokens_of(await answer(client, prompt, temperature=0))
        assert plain != greedy
        for options in off:
            assert tokens_of(await answer(client, prompt, **(seeded | options))) == plain, options
        for options in one:
            assert tokens_of(await answer(client, prompt, **(seeded | options))) == greedy, options
        mixed = await asyncio.gather(*(answer(client, prompt, **(seeded | options)) for options in [*off, *one]))
        assert [tokens_of(found) for found in mixed] == [plain] * len(off) + [greedy] * len(one)


async def test_four_answers_with_a_seed(case: Case) -> None:
    """Field failures 23, 24: four different ones, the same each time, with the prompt scored beside them or not."""
    prompt = case.prompts[2]
    options = {"temperature": 1.0, "seed": 42, "n": 4, "frequency_penalty": 0.5, "logprobs": True, "top_logprobs": TOP}
    async with running_router(case.engine) as client:
        first = await answer(client, prompt, **options)
        assert len({choice.token_ids for choice in first.choices}) == 4
        again, scored = await asyncio.gather(
            answer(client, prompt, **options), answer(client, prompt, prompt_logprobs=True, **options)
        )
        for other in (again, scored):
            assert [choice.token_ids for choice in other.choices] == [choice.token_ids for choice in first.choices]
        check_logprobs(scored.prompt_logprobs, case.logits(prompt)[:-1], prompt[1:])
        for choice in first.choices:
            logits = case.logits([*prompt, *choice.token_ids])[len(prompt) - 1 : -1]
            check_logprobs(choice.logprobs, logits, choice.token_ids)
        alone = await answer(client, prompt, **(options | {"n": 1}))
        assert tokens_of(alone) == first.choices[0].token_ids
