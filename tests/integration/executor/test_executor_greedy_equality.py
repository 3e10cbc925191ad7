"""The session protocol on a real model equals `transformers` `generate`, token for token. No cache service: the arena
is this process's own, full of NaN."""

import random
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from executor.arena import KvGeometry, private_arena
from executor.attention_choice import choose_attention
from executor.ids import SessionId
from executor.model.forward import CausalModel
from executor.model.loader import load_model
from executor.model.rewrite import rewrite_model
from executor.runner import Runner
from executor.session import Session
from executor.step import BlockTable, RowSampling, RowStart, StepResult, TableExtension
from executor.step_check import StepLimits
from octavo.model_source import resolve_model
from tests.executor_cases import ints, process, row, step
from tests.oracle import Comparison, Oracle
from tests.tiny_models import VOCABULARY_SIZE, save_tiny_gemma2, save_tiny_gemma3, save_tiny_llama

BLOCK = 4
NUM_BLOCKS = 200
NUM_TOKENS = 32
REWRITTEN = "rewritten"
LENGTHS = (1, BLOCK + 1, 3 * BLOCK, 40)


@dataclass(frozen=True)
class Case:
    """A loaded model, its oracle, and prompts."""

    model: CausalModel
    rewritten: CausalModel
    oracle: Oracle
    prompts: list[list[int]]

    def session(self, attention: str = REWRITTEN) -> Session:
        """attention: a back end's name, or REWRITTEN: the default, where the layers are one call with attention."""
        arena = private_arena(KvGeometry(BLOCK, "float32", self.model.layers), NUM_BLOCKS)
        limits = StepLimits(BLOCK, NUM_BLOCKS, VOCABULARY_SIZE, 512, 2048)
        model = self.rewritten if attention == REWRITTEN else self.model
        backend = choose_attention("cpu" if attention == REWRITTEN else attention, "cpu")
        return Session(SessionId(1), 8, limits, Runner(model, arena, backend))


@pytest.fixture(
    scope="module", params=[save_tiny_llama, save_tiny_gemma3, save_tiny_gemma2], ids=["llama", "gemma3", "gemma2"]
)
def case(request, tmp_path_factory) -> Case:
    folder: Path = request.param(tmp_path_factory.mktemp("model"))
    rng = random.Random(1)
    prompts = [[rng.randrange(5, VOCABULARY_SIZE) for _ in range(length)] for length in LENGTHS]
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model = load_model(resolve_model(str(folder)), "float32")
    geometry = KvGeometry(BLOCK, "float32", model.layers)
    rewritten = rewrite_model(model, choose_attention("cpu", "cpu"), geometry)
    assert rewritten.rewritten is not None
    return Case(model, rewritten, Oracle(plain), prompts)


def blocks_of(slot: int, num_tokens: int) -> list[int]:
    """Scattered blocks that no other slot has."""
    return [1 + slot + 8 * index for index in range(-(-num_tokens // BLOCK))][::-1]


def generate(session: Session, prompts: list[list[int]], chunk: int, num_tokens: int = NUM_TOKENS) -> list[list[int]]:
    """Greedy answers of all prompts at once, prefilled in chunks; every row has all its blocks from the start."""
    rows = [row(slot, prompt, blocks_of(slot, len(prompt) + num_tokens)) for slot, prompt in enumerate(prompts)]
    computed, known = [0] * len(prompts), [len(prompt) for prompt in prompts]
    answers: list[list[int]] = [[] for _ in prompts]
    step_id = 1
    while any(len(answer) < num_tokens for answer in answers):
        live = [slot for slot, answer in enumerate(answers) if len(answer) < num_tokens]
        runs = [(slot, computed[slot], min(chunk, known[slot] - computed[slot])) for slot in live]
        started = tuple(rows) if step_id == 1 else ()
        outcome = process(session, step(step_id, runs, started_rows=started, acknowledged_step=step_id - 1))
        assert isinstance(outcome, StepResult), outcome
        tokens = iter(outcome.token_ids.tolist())
        for (slot, _, count), num_sampled in zip(runs, outcome.num_sampled.tolist(), strict=True):
            computed[slot] += count
            known[slot] += num_sampled
            answers[slot] += [next(tokens) for _ in range(num_sampled)]
        step_id += 1
    return answers


@pytest.mark.parametrize(
    ("attention", "chunk"),
    [*((REWRITTEN, chunk) for chunk in (1, 7, 16, 2048)), ("cpu", 7), ("torch", 7), ("torch", 16)],
)
def test_a_batch_of_four_equals_the_oracle(case: Case, attention: str, chunk: int):
    """Field failure 16: every chunk size gives the same tokens, prefill mixed with decodes."""
    comparison = Comparison()
    for prompt, answer in zip(case.prompts, generate(case.session(attention), case.prompts, chunk), strict=True):
        what = f"{attention}, chunk {chunk}, {len(prompt)} tokens"
        comparison.check(answer, case.oracle.greedy(prompt, NUM_TOKENS), what)
    assert comparison.excused <= 2


def test_the_triton_kernels_equal_the_oracle(case: Case):
    """In Triton's interpreter, and so with few tokens: chunks of prompts beside decodes, as above."""
    comparison = Comparison()
    answers = generate(case.session("triton-interpret"), case.prompts, chunk=7, num_tokens=4)
    for prompt, answer in zip(case.prompts, answers, strict=True):
        comparison.check(answer, case.oracle.greedy(prompt, 4), f"triton-interpret, {len(prompt)} tokens")
    assert comparison.excused == 0


def test_alone_equals_the_oracle(case: Case):
    comparison = Comparison()
    for prompt in case.prompts:
        (answer,) = generate(case.session(), [prompt], 2048)
        comparison.check(answer, case.oracle.greedy(prompt, NUM_TOKENS), f"alone, {len(prompt)} tokens")
    assert comparison.excused <= 2


def run_greedy(session: Session, first_step: int, slot: int, start: int, number: int) -> list[int]:
    """Decode `number` tokens of one row whose next token to compute is at `start`."""
    tokens = []
    for index in range(number):
        outcome = process(session, step(first_step + index, [(slot, start + index, 1)]))
        assert isinstance(outcome, StepResult), outcome
        tokens += outcome.token_ids.tolist()
    return tokens


def test_a_row_that_starts_on_computed_blocks_continues_the_sequence(case: Case):
    """What a prefix hit and a recovery do: history and blocks come in, only the rest is computed."""
    prompt = case.prompts[-1]
    expected = case.oracle.greedy(prompt, NUM_TOKENS).token_ids
    session, blocks = case.session(), blocks_of(0, len(prompt) + NUM_TOKENS)
    process(session, step(1, [(0, 0, len(prompt))], started_rows=(row(0, prompt, blocks),)))
    run_greedy(session, 2, 0, len(prompt), 9)
    history = prompt + expected[:10]
    again = row(3, history, blocks, computed=len(history) - 2)  # one token is computed twice, as after a lost step
    outcome = process(session, step(11, [(3, len(history) - 2, 2)], retired_slots=ints(0), started_rows=(again,)))
    assert isinstance(outcome, StepResult), outcome
    assert outcome.token_ids.tolist() + run_greedy(session, 12, 3, len(history), 21) == expected[10:NUM_TOKENS]


@pytest.mark.parametrize("attention", ["torch", "cpu", REWRITTEN, "triton-interpret"])
def test_a_copied_block_continues_apart_from_its_source(case: Case, attention: str):
    """Field failure 9: copies come before the forward pass, and read every source before any target is written."""
    prompt = case.prompts[1]  # one full block, and one token in the second
    session = case.session(attention)
    process(session, step(1, [(0, 0, len(prompt))], started_rows=(row(0, prompt, [2, 3, 4]),)))
    token = case.oracle.greedy(prompt, 1).token_ids[0]
    child = row(1, [*prompt, token], [2, 5, 6], computed=len(prompt))
    other = row(2, [*prompt, 77], [2, 9, 10], computed=len(prompt))
    copies = {"copy_sources": ints(3, 3), "copy_targets": ints(5, 9)}
    runs = [(0, len(prompt), 1), (1, len(prompt), 1), (2, len(prompt), 1)]
    outcome = process(session, step(2, runs, started_rows=(child, other), **copies))
    assert isinstance(outcome, StepResult), outcome
    expected = case.oracle.greedy(prompt, 2).token_ids[1]
    different = case.oracle.greedy([*prompt, 77], 1).token_ids[0]
    assert outcome.token_ids.tolist() == [expected, expected, different]


@pytest.mark.parametrize("attention", ["torch", "cpu", REWRITTEN, "triton-interpret"])
def test_swapped_blocks_swap_their_sequences(case: Case, attention: str):
    """Field failure 9: a copy whose source is another copy's target."""
    left, right = case.prompts[1][:BLOCK], case.prompts[2][:BLOCK]
    session = case.session(attention)
    rows = (row(0, left, [1]), row(1, right, [2]))
    process(session, step(1, [(0, 0, BLOCK), (1, 0, BLOCK)], started_rows=rows))
    again = (row(0, [*left, 9], [2, 3], computed=BLOCK), row(1, [*right, 9], [1, 4], computed=BLOCK))
    swap = {"copy_sources": ints(1, 2), "copy_targets": ints(2, 1)}
    runs = [(0, BLOCK, 1), (1, BLOCK, 1)]
    outcome = process(session, step(2, runs, retired_slots=ints(0, 1), started_rows=again, **swap))
    assert isinstance(outcome, StepResult), outcome
    assert outcome.token_ids.tolist() == [case.oracle.greedy([*prompt, 9], 1).token_ids[0] for prompt in (left, right)]


def seeded(session: Session, slot: int, neighbours: int, number: int = 20) -> list[int]:
    """A seeded row in any slot, with greedy and seeded neighbours that join."""

    def start(at: int, seed: int, temperature: float) -> RowStart:
        sampling = RowSampling(temperature=temperature, top_p=0.95, seed=seed)
        return RowStart(at, 1, ints(11, 12, 13), 0, (BlockTable(0, ints(*blocks_of(at, 8))),), sampling)

    others = [other for other in range(4) if other != slot][:neighbours]
    rows = (start(slot, 42, 0.8), *(start(other, other, other % 2) for other in others))
    runs = [(each.slot, 0, 3) for each in rows]
    tokens: list[int] = []
    for index in range(number):
        extensions = (TableExtension(0, ints(slot), ints(4), ints(100, 101, 102, 103)),) if index == 2 else ()
        request = step(index + 1, runs, started_rows=rows if index == 0 else (), extensions=extensions)
        outcome = process(session, request)
        assert isinstance(outcome, StepResult), outcome
        tokens.append(int(outcome.token_ids[0]))
        runs = [(slot, 3 + index, 1)] + [(other, 3 + index, 1) for other in others if index < 3]
    return tokens


def test_a_seeded_row_says_the_same_in_any_company(case: Case):
    """Field failure 24: alone, beside greedy and seeded rows, in any slot."""
    alone = seeded(case.session(), slot=0, neighbours=0)
    assert len(set(alone)) > 5
    assert all(seeded(case.session(), slot, neighbours) == alone for slot, neighbours in [(0, 1), (1, 3), (3, 2)])


def test_a_broken_model_spoils_the_step_and_nothing_else(case: Case, monkeypatch):
    """An exception in the forward pass is the step's failure; the session lives, its state as before."""
    prompt = case.prompts[2]
    session = case.session()
    process(session, step(1, [(0, 0, len(prompt))], started_rows=(row(0, prompt, blocks_of(0, 60)),)))
    with monkeypatch.context() as patch:
        patch.setattr(CausalModel, "forward", lambda *_: (_ for _ in ()).throw(RuntimeError("not enough memory: gone")))
        assert process(session, step(2, [(0, len(prompt), 1)])).reason == "OUT_OF_MEMORY"
        patch.setattr(CausalModel, "forward", lambda *_: 1 / 0)
        failed = process(session, step(2, [(0, len(prompt), 1)]))
        assert (failed.reason, failed.message) == ("MODEL_ERROR", "ZeroDivisionError: division by zero")
    expected = case.oracle.greedy(prompt, 4).token_ids
    assert run_greedy(session, 2, 0, len(prompt), 3) == expected[1:]


def test_kv_of_another_row_that_is_not_finite_spoils_that_row_alone(case: Case):
    """A poisoned block makes one row's logits NaN; its neighbour's answer stands."""
    prompt = case.prompts[2]
    session = case.session()
    poisoned = row(1, prompt, blocks_of(1, 60), computed=len(prompt) - 1)  # claims KV that nobody wrote
    runs = [(0, 0, len(prompt)), (1, len(prompt) - 1, 1)]
    outcome = process(session, step(1, runs, started_rows=(row(0, prompt, blocks_of(0, 60)), poisoned)))
    assert isinstance(outcome, StepResult), outcome
    assert np.array_equal(outcome.num_sampled, [1, 0])
    assert [failure.row for failure in outcome.failures] == [1]
    assert outcome.token_ids.tolist() == case.oracle.greedy(prompt, 1).token_ids
