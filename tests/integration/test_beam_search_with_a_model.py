"""Beam search through all three processes equals `transformers` `generate(num_beams=...)`, tokens and scores."""

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.engines import RunningEngine, running_router

BLOCK = 16
NUM_TOKENS = 14
EOS = [2, 4]
Answers = list[tuple[list[int], float]]

# Names of ours, and what is the same there.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "two": ({"beam_width": 2}, {"num_beams": 2}),
    "four": ({"beam_width": 4, "n": 4}, {"num_beams": 4}),
    "long ones": ({"beam_width": 4, "n": 2, "length_penalty": 2.0}, {"num_beams": 4, "length_penalty": 2.0}),
    "no penalty": ({"beam_width": 3, "n": 3, "length_penalty": 0.0}, {"num_beams": 3, "length_penalty": 0.0}),
    "early": (
        {
            "beam_width": 5,
            "n": 5,
            "early_stopping": True,
            "length_penalty": -1.0,
            "stop_token_ids": list(range(20, 80)),
        },
        {"num_beams": 5, "early_stopping": True, "length_penalty": -1.0, "eos_token_id": [*EOS, *range(20, 80)]},
    ),
    "rules": (
        {
            "beam_width": 4,
            "n": 4,
            "repetition_penalty": 1.3,
            "min_tokens": 6,
            "stop_token_ids": list(range(100, 150)),
            "logit_bias": {7: 2.0, 8: -1.0},
        },
        {
            "num_beams": 4,
            "repetition_penalty": 1.3,
            "min_new_tokens": 6,
            "eos_token_id": [*EOS, *range(100, 150)],
            "sequence_bias": [[[7], 2.0], [[8], -1.0]],
        },
    ),
}


@pytest.fixture(scope="module")
def oracle(tiny_llama: Path) -> PreTrainedModel:
    torch.set_num_threads(1)
    return AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32).eval()


answers_by_case: dict[str, Answers] = {}


@torch.inference_mode()
def right(model: PreTrainedModel, prompt: list[int], count: int, **options: Any) -> Answers:
    """The answers of `transformers`, without padding; remembered, for each costs more than ours."""
    key = repr((prompt, count, options))
    if key in answers_by_case:
        return answers_by_case[key]
    ids = torch.tensor([prompt])
    options = {"eos_token_id": EOS} | options
    found = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=NUM_TOKENS,
        do_sample=False,
        pad_token_id=0,
        num_return_sequences=count,
        return_dict_in_generate=True,
        output_scores=True,
        **options,
    )
    answers = []
    for tokens, score in zip(found.sequences[:, len(prompt) :].tolist(), found.sequences_scores.tolist(), strict=True):
        ends = [place + 1 for place, token in enumerate(tokens) if token in options["eos_token_id"]]
        answers.append((tokens[: min(ends, default=len(tokens))], score))
    answers_by_case[key] = answers
    return answers


@pytest.mark.parametrize("chunk", [7, 2048])
async def test_answers_and_scores_are_those_of_transformers(
    llama_engine: RunningEngine, oracle: PreTrainedModel, chunk: int
) -> None:
    """Alone, beside each other, in chunks, and from the cache."""
    rng, num_ended = random.Random(5), 0
    prompts = [[rng.randrange(5, 260) for _ in range(length)] for length in (1, BLOCK, 2 * BLOCK + 1, 45)]
    async with running_router(llama_engine, max_tokens_per_step=chunk) as client:

        async def check(prompt: list[int], name: str) -> None:
            nonlocal num_ended
            ours, theirs = CASES[name]
            answer = await client.generate(
                prompt, **ours, max_tokens=NUM_TOKENS, cache_salt=f"beams {chunk}", logprobs=True
            )
            expected = right(oracle, prompt, ours.get("n", 1), **theirs)
            what = f"{name}, chunk {chunk}, {len(prompt)} tokens"
            for choice, (tokens, score) in zip(answer.choices, expected, strict=True):
                assert list(choice.token_ids) == tokens, what
                assert choice.beam is not None
                assert choice.beam.score == pytest.approx(score, abs=2e-4), what
                num_ended += len(tokens) < NUM_TOKENS
                if name != "rules":
                    total = sum(entry.logprob for entry in choice.logprobs)
                    assert choice.beam.cumulative_logprob == pytest.approx(total, abs=1e-3)

        await asyncio.gather(*(check(prompt, "four") for prompt in prompts))
        for prompt in prompts[1::2] if chunk == 7 else prompts[3:]:
            await asyncio.gather(*(check(prompt, name) for name in CASES))
        again = await client.generate(prompts[3], beam_width=4, max_tokens=4, cache_salt=f"beams {chunk}")
        assert again.usage.cached_tokens == 2 * BLOCK
    assert num_ended > 3
