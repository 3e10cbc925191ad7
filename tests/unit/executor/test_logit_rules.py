"""Biases, penalties, masks and log-probabilities against a direct computation, over sessions on scripted logits.

The direct computation keeps the whole history and starts over at every token, in plain Python on the same float32
numbers; the executor keeps counts. Rows, chunks and neighbours change nothing.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from executor.step import RowSampling, StepResult, TableExtension, TokenLogprobs
from tests.executor_cases import BLOCK, ints, process, row, step, table_session
from tests.logit_rules import Asked, adjusted_directly

SIZE = 100
PROMPT = [10, 20, 30, 20, 40]


def table() -> torch.Tensor:
    """Logits in steps of an eighth with many ties, positive and negative, and ten ids that are always likely."""
    numbers = torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(3))
    numbers[:, 40:80:4] += 2
    return (numbers * 6).round() / 8


TABLE = table()


def sampling_of(asked: Asked) -> RowSampling:
    """The rules in the executor's words, for a row that starts with the prompt."""
    return RowSampling(
        num_prompt_tokens=len(PROMPT),
        bias_token_ids=ints(*asked.bias),
        biases=np.array(list(asked.bias.values()), dtype=np.float32),
        allowed_token_ids=ints(*asked.allowed),
        suppressed_token_ids=ints(*asked.suppressed),
        banned_lengths=ints(*map(len, asked.banned)),
        banned_token_ids=ints(*(token for sequence in asked.banned for token in sequence)),
        **asked.rules,
    )


def greedy_directly(asked: Asked, num_tokens: int, prompt: list[int] = PROMPT) -> list[int]:
    generated: list[int] = []
    for _ in range(num_tokens):
        logits = adjusted_directly(TABLE[[*prompt, *generated][-1]].tolist(), asked, prompt, generated)
        generated.append(max(range(SIZE), key=lambda token: (logits[token], -token)))
    return generated


CASES = {
    "plain": Asked(),
    "presence": Asked({"presence_penalty": 0.5}),
    "presence below 0": Asked({"presence_penalty": -1.0}),
    "frequency": Asked({"frequency_penalty": 0.3}),
    "frequency below 0": Asked({"frequency_penalty": -2.0}),
    "repetition": Asked({"repetition_penalty": 1.15}),
    "repetition below 1": Asked({"repetition_penalty": 0.6}),
    "all penalties": Asked({"presence_penalty": 0.3, "frequency_penalty": 0.2, "repetition_penalty": 1.1}),
    "bias": Asked(bias={5: 3.0, 6: -100.0, 99: 2.5}),
    "bias and repetition": Asked({"repetition_penalty": 1.9}, bias={10: 4.0, 7: 4.0}),
    "allowed": Asked(allowed=[3, 50, 51, 52]),
    "allowed with bias": Asked(allowed=[3, 50, 51, 52], bias={50: 6.0, 4: 100.0}),
    "suppressed": Asked({"suppress_until": 11}, suppressed=list(range(0, SIZE, 2))),
    "all at once": Asked(
        {"presence_penalty": 0.3, "frequency_penalty": 0.9, "repetition_penalty": 1.3, "suppress_until": 9},
        bias={1: 5.0},
        allowed=list(range(60)),
        suppressed=[1],
        banned=[[2], [1, 3]],
    ),
}


def blocks_of(slot: int) -> list[int]:
    """Seven blocks, 28 tokens."""
    return list(range(1 + 7 * slot, 8 + 7 * slot))


class Rows:
    """Rows of one session, driven step by step; each has blocks enough from the start."""

    def __init__(self) -> None:
        self.session = table_session(TABLE, num_blocks=100)
        self.computed: dict[int, int] = {}
        self.lengths: dict[int, int] = {}
        self.tokens: dict[int, list[int]] = {}
        self.results: list[StepResult] = []
        self._step = 0

    def run(self, starts: dict[int, RowSampling] | None = None, chunk: int = 99, retire: Sequence[int] = ()) -> None:
        """Start rows with the prompt, then let every row compute up to `chunk` tokens."""
        rows = [row(slot, PROMPT, blocks_of(slot), sampling=sampling) for slot, sampling in (starts or {}).items()]
        for slot in retire:
            del self.computed[slot]
        for slot in starts or {}:
            self.computed[slot], self.lengths[slot], self.tokens[slot] = 0, len(PROMPT), []
        runs = [(slot, done, min(chunk, self.lengths[slot] - done)) for slot, done in sorted(self.computed.items())]
        self._step += 1
        result = process(self.session, step(self._step, runs, started_rows=tuple(rows), retired_slots=ints(*retire)))
        assert isinstance(result, StepResult), result
        tokens = iter(result.token_ids.tolist())
        for (slot, _, count), num_sampled in zip(runs, result.num_sampled.tolist(), strict=True):
            self.computed[slot] += count
            new = [next(tokens) for _ in range(num_sampled)]
            self.tokens[slot] += new
            self.lengths[slot] += num_sampled
        self.results.append(result)


@pytest.mark.parametrize("name", CASES)
def test_each_field_against_its_definition(name: str) -> None:
    rows = Rows()
    rows.run({0: sampling_of(CASES[name])})
    for _ in range(19):
        rows.run()
    assert rows.tokens[0] == greedy_directly(CASES[name], 20)


def test_the_cases_really_differ() -> None:
    """No case is the plain answer in disguise, else it would prove nothing."""
    answers = {name: tuple(greedy_directly(asked, 20)) for name, asked in CASES.items()}
    plain = answers.pop("plain")
    assert plain not in answers.values()
    assert len(set(answers.values())) >= len(answers) - 2


def test_bad_sequences_are_matched_in_what_was_generated() -> None:
    """A sequence that begins in the prompt does not count; its last token alone is free."""
    plain = greedy_directly(Asked(), 6)
    for banned in ([plain[2:3]], [plain[1:4]], [[PROMPT[-1], plain[0]]], [plain[0:2], plain[3:5]]):
        asked = Asked(banned=banned)
        rows = Rows()
        rows.run({0: sampling_of(asked)})
        for _ in range(9):
            rows.run()
        assert rows.tokens[0] == greedy_directly(asked, 10)
    assert greedy_directly(Asked(banned=[[PROMPT[-1], plain[0]]]), 6) == plain
    assert greedy_directly(Asked(banned=[plain[1:4]]), 6)[:3] == plain[:3]
    assert greedy_directly(Asked(banned=[plain[1:4]]), 6)[3] != plain[3]


def random_too(asked: Asked, seed: int) -> RowSampling:
    return sampling_of(replace(asked, rules=asked.rules | {"temperature": 0.8, "seed": seed}))


@pytest.mark.parametrize("chunk", [1, 2, 99])
def test_neighbours_rows_chunks_and_time_change_nothing(chunk: int) -> None:
    """Field failure 24: seed 42 and every rule, alone, in each row, beside others, joining late, leaving early."""
    for name in ("plain", "all penalties", "all at once"):
        alone = Rows()
        alone.run({0: random_too(CASES[name], 42)})
        for _ in range(11):
            alone.run()
        for slot in range(4):
            rows = Rows()
            others = {other: random_too(asked, other) for other, asked in enumerate(list(CASES.values())[:6])}
            others.pop(slot)
            rows.run(others, chunk)
            rows.run({slot: random_too(CASES[name], 42)}, chunk)
            for index in range(16):
                leavers = [other for other in (0, 5) if other != slot and other in rows.computed]
                rows.run(chunk=chunk, retire=leavers if index == 3 else ())
            assert rows.tokens[slot][:12] == alone.tokens[0][:12], (name, slot)


def test_a_row_that_is_sent_again_counts_what_it_generated() -> None:
    """Field failure 25: after a preemption the history is prompt and answer, and penalties go on as before."""
    asked = CASES["all penalties"]
    right = greedy_directly(asked, 15)
    for cut in (1, BLOCK - 1, BLOCK, 7):
        session = table_session(TABLE)
        history = [*PROMPT, *right[:cut]]
        start = row(0, history, list(range(1, 8)), sampling=sampling_of(asked))
        found = [process(session, step(1, [(0, 0, len(history))], started_rows=(start,)))]
        for index in range(5):
            found.append(process(session, step(2 + index, [(0, len(history) + index, 1)])))
        assert [result.token_ids.item() for result in found] == right[cut : cut + 6]


def test_a_step_that_fails_takes_its_counts_back() -> None:
    asked = CASES["all penalties"]
    rows = Rows()
    rows.run({0: sampling_of(asked)})
    bad = step(rows._step + 1, [(0, rows.computed[0], 1)], extensions=(TableExtension(0, ints(3), ints(1), ints(9)),))
    process(rows.session, bad)
    for _ in range(8):
        rows.run()
    assert rows.tokens[0] == greedy_directly(asked, 9)


# ------------------------------------------------------------------------------------------------- log-probabilities


def logprobs_directly(token_before: int, token: int, num_top: int) -> tuple[float, int, list[int]]:
    logits = TABLE[token_before].double()
    order = sorted(range(SIZE), key=lambda other: (-logits[other].item(), other))
    logprob = (logits[token] - logits.logsumexp(0)).item()
    return logprob, order.index(token) + 1, order[:num_top]


def check_logprobs(found: TokenLogprobs, before: Sequence[int], tokens: Sequence[int], num_top: int) -> None:
    assert found.token_ids.tolist() == list(tokens)
    top_ids = found.top_token_ids.reshape(len(tokens), num_top)
    top = found.top_logprobs.reshape(len(tokens), num_top)
    for index, (token_before, token) in enumerate(zip(before, tokens, strict=True)):
        logprob, rank, order = logprobs_directly(token_before, token, num_top)
        assert found.logprobs[index] == pytest.approx(logprob, abs=1e-5)
        assert found.ranks[index] == rank
        assert top_ids[index].tolist() == order
        for column, other in enumerate(order):
            assert top[index, column] == pytest.approx(logprobs_directly(token_before, other, 0)[0], abs=1e-5)


@pytest.mark.parametrize("num_top", [0, 1, 5, SIZE, SIZE + 1])
@pytest.mark.parametrize("temperature", [0.0, 1.3])
def test_logprobs_are_of_the_models_own_distribution(num_top: int, temperature: float) -> None:
    """Before bias, penalties, masks and temperature; equal logits are ranked by id."""
    asked = Asked(CASES["all at once"].rules | {"temperature": temperature}, bias={1: 5.0}, allowed=list(range(60)))
    sampling = sampling_of(replace(asked, rules=asked.rules | {"logprobs": True, "num_top_logprobs": num_top}))
    rows, silent = Rows(), Rows()
    rows.run({0: sampling})
    silent.run({0: sampling_of(asked)})
    for _ in range(5):
        rows.run()
        silent.run()
    assert rows.tokens == silent.tokens, "asking changes no token"
    before = [PROMPT[-1], *rows.tokens[0]]
    for index, result in enumerate(rows.results):
        assert result.sampled_logprobs is not None
        check_logprobs(result.sampled_logprobs, before[index : index + 1], before[index + 1 :][:1], min(num_top, SIZE))
    assert all(result.sampled_logprobs is None for result in silent.results)


def test_rows_that_ask_for_different_numbers_share_a_step() -> None:
    rows = Rows()
    asks = {slot: RowSampling(logprobs=slot != 1, num_top_logprobs=slot) for slot in range(4)}
    rows.run(asks)
    found = rows.results[0].sampled_logprobs
    assert found is not None
    assert found.rows.tolist() == [0, 2, 3]
    assert found.num_top.tolist() == [0, 2, 3]
    assert len(found.top_token_ids) == len(found.top_logprobs) == 5


@pytest.mark.parametrize("chunk", [1, 2, 3, 99])
def test_prompt_logprobs_come_with_the_chunks(chunk: int) -> None:
    """Field failure 23: the same numbers in whatever chunks, each token once, nothing for the first."""
    rows = Rows()
    scored = RowSampling(prompt_logprobs_from=1, prompt_logprobs_until=len(PROMPT), num_top_logprobs=3)
    rows.run({0: RowSampling(), 1: scored}, chunk)
    while not rows.tokens[1]:
        rows.run(chunk=chunk)
    rows.run()
    found = [result.prompt_logprobs for result in rows.results if result.prompt_logprobs is not None]
    assert {number for part in found for number in part.rows.tolist()} == {1}
    whole = TokenLogprobs(
        *(np.concatenate([getattr(part, name) for part in found]) for name in TokenLogprobs.__slots__)
    )
    check_logprobs(whole, PROMPT[:-1], PROMPT[1:], 3)


def test_prompt_logprobs_go_on_where_they_were() -> None:
    """A row that is sent again asks for the rest alone."""
    rows = Rows()
    rows.run({0: RowSampling(prompt_logprobs_from=3, prompt_logprobs_until=5)})
    found = rows.results[0].prompt_logprobs
    assert found is not None
    assert found.token_ids.tolist() == PROMPT[3:5]


def test_a_row_that_is_not_finite_gets_no_logprobs() -> None:
    table = TABLE.clone()
    table[20, 7] = torch.nan
    session = table_session(table)
    ask = RowSampling(logprobs=True, num_top_logprobs=2)
    starts = (row(0, [10, 20], [1], sampling=ask), row(1, [10, 30], [2], sampling=ask))
    result = process(session, step(1, [(0, 0, 2), (1, 0, 2)], started_rows=starts))
    assert isinstance(result, StepResult)
    assert result.num_sampled.tolist() == [0, 1]
    assert result.sampled_logprobs is not None
    assert result.sampled_logprobs.rows.tolist() == [1]
    assert len(result.sampled_logprobs.top_token_ids) == 2
