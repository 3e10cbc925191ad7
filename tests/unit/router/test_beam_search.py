"""The search against its definition, by enumeration, and against `transformers` itself, on vocabularies of six tokens.

The definition keeps whole token sequences and scores each from the beginning; nothing of `router.beam` is in it.
"""

import functools
import itertools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from transformers import GenerationConfig, GenerationMixin, PretrainedConfig, PreTrainedModel

from router.beam import Candidate, Search, SearchRules

VOCABULARY = 6
Sequence = tuple[int, ...]
Model = Callable[[Sequence], list[float]]  # log-probabilities of the next token


def scripted(seed: int) -> Model:
    """Each history has a distribution of its own, the same every time."""

    @functools.cache
    def model(history: Sequence) -> list[float]:
        logits = random.Random(f"{seed} {history}")
        values = [3 * logits.random() for _ in range(VOCABULARY)]
        norm = math.log(sum(map(math.exp, values)))
        return [value - norm for value in values]

    return model


def uniform(history: Sequence) -> list[float]:
    return [-math.log(VOCABULARY)] * VOCABULARY


@dataclass(frozen=True)
class Case:
    width: int
    penalty: float
    early: bool
    eos: tuple[int, ...]
    max_tokens: int = 5

    @property
    def rules(self) -> SearchRules:
        return SearchRules(self.width, self.penalty, self.early, frozenset(self.eos), self.max_tokens)


def total(model: Model, tokens: Sequence) -> float:
    return sum(model(tokens[:place])[token] for place, token in enumerate(tokens))


def score(model: Model, tokens: Sequence, penalty: float) -> float:
    return total(model, tokens) / len(tokens) ** penalty


def searched(model: Model, case: Case) -> tuple[list[tuple[Sequence, float]], int]:
    """What `router.beam` finds, and in how many steps."""
    search, steps = Search(case.rules), 0
    while not search.is_done:
        best = []
        for beam in search.beams:
            logprobs = model(tuple(beam.token_ids()))
            order = sorted(range(VOCABULARY), key=lambda token: (-logprobs[token], token))
            best.append([Candidate(token, logprobs[token]) for token in order[: case.rules.num_candidates]])
        before = [tuple(beam.token_ids()) for beam in search.beams]
        moves = search.advance(best)
        assert [(*before[beam], token) for beam, token in moves] == [tuple(beam.token_ids()) for beam in search.beams]
        steps += 1
    return [(tuple(found.beam.token_ids()), found.score) for found in search.best(case.width)], steps


def defined(model: Model, case: Case) -> tuple[list[tuple[Sequence, float]], int]:
    """All continuations of all beams, ranked; the first `width` that go on, and those of the first `width` that end."""
    beams: list[Sequence] = [()]
    finished: list[Sequence] = []
    for step in itertools.count(1):
        everything = [(*beam, token) for beam in beams for token in range(VOCABULARY)]
        everything.sort(key=lambda tokens: -total(model, tokens))  # stable: of equals the lower beam, then token
        ends = [step == case.max_tokens or tokens[-1] in case.eos for tokens in everything]
        finished += [tokens for tokens, is_end in zip(everything[: case.width], ends, strict=False) if is_end]
        finished = sorted(finished, key=lambda tokens: -score(model, tokens, case.penalty))[: case.width]
        beams = [tokens for tokens, is_end in zip(everything, ends, strict=True) if not is_end][: case.width]
        is_full = len(finished) == case.width
        if not beams or (is_full and case.early):
            break
        if is_full and score(model, beams[0], case.penalty) <= score(model, finished[-1], case.penalty):
            break
    return [(tokens, score(model, tokens, case.penalty)) for tokens in finished], step


GRID = list(itertools.product((1, 2, 4, VOCABULARY + 3), (-1.0, 0.0, 1.0, 2.0), (False, True), ((), (3,), (1, 3, 5))))


@pytest.mark.parametrize("seed", range(2))
def test_every_width_penalty_and_ending_is_the_definitions(seed: int) -> None:
    """Widths below and above the vocabulary, several ends of sequence, of which some come at step 1."""
    model, ends_at_once = scripted(seed), 0
    for width, penalty, early, eos in GRID:
        case = Case(width, penalty, early, eos)
        found, steps = searched(model, case)
        expected, expected_steps = defined(model, case)
        assert steps == expected_steps, case
        assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected], case
        assert [value for _, value in found] == pytest.approx([value for _, value in expected]), case
        ends_at_once += any(len(tokens) == 1 for tokens, _ in found)
    assert ends_at_once > 10, "the grid has answers that end at step 1"


def test_a_beam_as_wide_as_everything_finds_the_best_of_all() -> None:
    """No sequence is ever dropped: what comes back is every sequence there is, by its score."""
    model, eos, max_tokens = scripted(7), (2,), 3
    every: list[Sequence] = []
    for length in range(1, max_tokens + 1):
        for tokens in itertools.product(range(VOCABULARY), repeat=length):
            is_whole = tokens[-1] in eos or length == max_tokens
            if is_whole and not set(tokens[:-1]) & set(eos):
                every.append(tokens)
    for penalty in (-1.0, 0.0, 1.0, 2.0):
        case = Case(VOCABULARY**max_tokens, penalty, False, eos, max_tokens)
        found, _ = searched(model, case)
        expected = sorted(every, key=lambda tokens: -score(model, tokens, penalty))
        assert sorted(tokens for tokens, _ in found) == sorted(expected)
        assert [value for _, value in found] == pytest.approx([score(model, each, penalty) for each in expected])


def test_of_equal_sums_the_lower_beam_then_the_lower_token() -> None:
    found, _ = searched(uniform, Case(3, 0.0, False, (), 2))
    assert [tokens for tokens, _ in found] == [(0, 0), (0, 1), (0, 2)]


def test_what_is_out_is_never_chosen_and_beams_are_fewer() -> None:
    """One token alone may come, so there is one beam, and one answer."""
    search = Search(Case(4, 1.0, False, (), 2).rules)
    search.advance([[Candidate(5, -1.0)]])
    assert len(search.beams) == 1
    search.advance([[Candidate(5, -2.0)]])
    (found,) = search.best(4)
    assert search.is_done
    assert (found.beam.token_ids(), found.score) == ([5, 5], -1.5)


def test_a_search_that_is_cut_gives_its_beams_as_they_are() -> None:
    search = Search(Case(2, 1.0, False, (5,), 9).rules)
    assert [found.beam.token_ids() for found in search.best(2)] == [[]]
    search.advance([[Candidate(5, -0.25), Candidate(1, -0.5), Candidate(2, -2.0)]])
    search.advance([[Candidate(1, -0.1), Candidate(2, -3.0)], [Candidate(1, -1.0), Candidate(2, -1.1)]])
    best = search.best(3)
    assert [(found.beam.token_ids(), found.is_cut) for found in best] == [([5], False), ([1, 1], True), ([2, 1], True)]
    assert search.num_tokens == 5


# ------------------------------------------------------------------------------------------------------- transformers


class Scripted(PreTrainedModel, GenerationMixin):
    """A model of `transformers` whose logits follow a script."""

    config_class = PretrainedConfig
    _supports_cache_class = False

    def __init__(self, config: PretrainedConfig, model: Model) -> None:
        super().__init__(config)
        self.model_of_test = model
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def forward(self, input_ids: torch.Tensor, **_: object) -> SimpleNamespace:
        rows = [self.model_of_test(tuple(row[1:])) for row in input_ids.tolist()]
        return Output(logits=torch.tensor(rows)[:, None])

    def prepare_inputs_for_generation(self, input_ids: torch.Tensor, **_: object) -> dict[str, torch.Tensor]:
        return {"input_ids": input_ids}


class Output(dict):
    """As a model's output: fields and keys."""

    def __getattr__(self, name: str) -> object:
        return self.get(name)


def test_answers_and_scores_are_those_of_transformers() -> None:
    """The very code that the definition above describes."""
    model = scripted(11)
    config = PretrainedConfig(vocab_size=VOCABULARY, is_encoder_decoder=False)
    theirs = Scripted(config, model).eval()
    for width, penalty, early, eos in GRID:
        if not 1 < width <= VOCABULARY:
            continue  # one beam is greedy there, and beams above the vocabulary are copies of each other
        case = Case(width, penalty, early, eos, max_tokens=4)
        asked = GenerationConfig(
            num_beams=width,
            num_return_sequences=width,
            length_penalty=penalty,
            early_stopping=early,
            do_sample=False,
            max_new_tokens=case.max_tokens,
            eos_token_id=list(eos) or None,
            pad_token_id=0,
            use_cache=False,
            return_dict_in_generate=True,
            output_scores=True,
        )
        answer = theirs.generate(torch.tensor([[0]]), generation_config=asked)
        found, _ = searched(model, case)
        for (tokens, value), right, right_value in zip(
            found, answer.sequences[:, 1:].tolist(), answer.sequences_scores.tolist(), strict=True
        ):
            assert list(tokens) == right[: len(tokens)], case
            assert value == pytest.approx(right_value, abs=1e-5), case
