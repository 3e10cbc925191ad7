"""Sampling against a direct computation of its definition, row by row in float64, written apart from the sampler."""

import math

import numpy as np
import pytest
import torch

from executor import sampler
from executor.sampler import SamplingBatch, gumbel, sample

VOCABULARY = 97
SEEDS = (0, 42, 2**32 - 1, 2**64 - 1)


def batch(rows: list[dict]) -> SamplingBatch:
    """rows: fields that differ from greedy, position 10, seed 1."""

    def column(name: str, default: float, dtype: torch.dtype) -> torch.Tensor:
        values = [row.get(name, default) for row in rows]
        return torch.tensor(values, dtype=dtype)

    seeds = np.array([row.get("seed", 1) for row in rows], dtype=np.uint64).astype(np.int64)
    return SamplingBatch(
        temperature=column("temperature", 0, torch.float32),
        top_k=column("top_k", 0, torch.int64),
        top_p=column("top_p", 1, torch.float32),
        min_p=column("min_p", 0, torch.float32),
        seed=torch.from_numpy(seeds),
        position=column("position", 10, torch.int64),
        choice_index=column("choice", 0, torch.int64),
    )


def kept_directly(logits: list[float], row: dict) -> list[int]:
    """The ids that the filters leave, by their definition."""
    size, temperature = len(logits), row["temperature"]
    scaled = [logit / temperature for logit in logits]
    order = sorted((i for i in range(size) if logits[i] > -math.inf), key=lambda i: (-scaled[i], i))
    top_k = row.get("top_k", 0)
    if 0 < top_k < size:
        order = order[:top_k]
    weights = {i: math.exp(scaled[i] - scaled[order[0]]) for i in order}
    total, before, kept = sum(weights.values()), 0.0, []
    for i in order:
        if row.get("top_p", 1) < 1 and kept and before >= row["top_p"] * total:
            break
        kept.append(i)
        before += weights[i]
    return sorted(i for i in kept if weights[i] >= row.get("min_p", 0))


def sampled_directly(logits: torch.Tensor, row: dict) -> int:
    values = logits.tolist()
    if not row.get("temperature"):
        return max(range(len(values)), key=lambda i: (values[i], -i))
    seed = torch.tensor(np.array(row.get("seed", 1), dtype=np.uint64).astype(np.int64))
    ids = torch.arange(len(values))
    noise = gumbel(seed, ids, torch.tensor(row.get("position", 10)), torch.tensor(row.get("choice", 0)))
    scaled = torch.tensor(values) / torch.tensor(row["temperature"])
    scores = (scaled + noise).tolist()
    return max(kept_directly(values, row), key=lambda i: (scores[i], -i))


def rows_of_every_kind() -> list[dict]:
    kinds = [{"temperature": 0}]
    for temperature in (0.2, 1.0, 2.0):
        for top_k in (0, 1, 2, 40, VOCABULARY, VOCABULARY + 1):
            for top_p in (1.0, 0.9, 0.3, 1e-6):
                for min_p in (0.0, 0.05, 1.0):
                    kinds.append({"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p})
    return [kind | {"seed": SEEDS[i % 4], "position": i, "choice": i % 3} for i, kind in enumerate(kinds)]


def test_every_combination_of_filters_equals_the_direct_computation():
    """Field failure 26: top_k 0, 1, V, V+1, min_p 0 and 1, and mixed rows in one batch."""
    rows = rows_of_every_kind()
    logits = torch.randn(len(rows), VOCABULARY, generator=torch.Generator().manual_seed(3)) * 3
    expected = [sampled_directly(logits[i], row) for i, row in enumerate(rows)]
    assert sample(logits.clone(), batch(rows)).tolist() == expected
    assert len(set(expected)) > 30  # the rows do not all say the same


@pytest.mark.parametrize("num_candidates", [1, 2, 16, VOCABULARY])
def test_filters_do_not_depend_on_how_many_candidates_are_sorted_first(monkeypatch, num_candidates):
    """Field failure 26: a top-p set larger than the candidates falls back to the whole row, with the same answer."""
    monkeypatch.setattr(sampler, "_NUM_CANDIDATES", num_candidates)
    rows = rows_of_every_kind()
    logits = torch.randn(len(rows), VOCABULARY, generator=torch.Generator().manual_seed(4))
    expected = [sampled_directly(logits[i], row) for i, row in enumerate(rows)]
    assert sample(logits.clone(), batch(rows)).tolist() == expected


def test_a_row_does_not_depend_on_its_batch():
    """Field failures 24 and 26: alone, in any row, beside any neighbours: the same token."""
    rows = rows_of_every_kind()
    logits = torch.randn(len(rows), VOCABULARY, generator=torch.Generator().manual_seed(5))
    together = sample(logits.clone(), batch(rows)).tolist()
    alone = [sample(logits[i : i + 1].clone(), batch([row])).item() for i, row in enumerate(rows)]
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(6)).tolist()
    shuffled = sample(logits[order].clone(), batch([rows[i] for i in order])).tolist()
    assert alone == together
    assert shuffled == [together[i] for i in order]


def test_five_equal_logits_keep_the_two_lowest_ids():
    """Field failure 26: exactly k under a fixed tie rule."""
    logits = torch.full((200, VOCABULARY), -5.0)
    logits[:, 20:25] = 3.0
    rows = [{"temperature": 1.0, "top_k": 2, "position": i} for i in range(200)]
    assert set(sample(logits, batch(rows)).tolist()) == {20, 21}


@pytest.mark.parametrize(
    ("top_p", "kept"), [(0.5, {3}), (0.51, {3, 5}), (0.75, {3, 5}), (0.76, {3, 5, 8}), (1.0, {3, 5, 8})]
)
def test_top_p_exactly_on_a_cumulative_sum(top_p, kept):
    """Field failure 26: probabilities 1/2, 1/4, 1/4; the token that crosses belongs, the one after does not."""
    logits = torch.full((400, VOCABULARY), -torch.inf)
    logits[:, [3, 5, 8]] = torch.log(torch.tensor([0.5, 0.25, 0.25]))
    rows = [{"temperature": 1.0, "top_p": top_p, "position": i} for i in range(400)]
    assert set(sample(logits, batch(rows)).tolist()) == kept


def test_top_p_takes_what_top_k_left_as_the_whole():
    """Field failure 26: of 0.4, 0.3, 0.2, 0.1 top-k 2 leaves 4/7 and 3/7, so that top-p 0.5 keeps one."""
    logits = torch.full((400, VOCABULARY), -torch.inf)
    logits[:, :4] = torch.log(torch.tensor([0.4, 0.3, 0.2, 0.1]))
    rows = [{"temperature": 1.0, "top_k": 2, "top_p": 0.5, "position": i} for i in range(400)]
    assert set(sample(logits, batch(rows)).tolist()) == {0}


def test_greedy_ties_go_to_the_lowest_id():
    logits = torch.zeros(3, VOCABULARY)
    logits[1, 50:] = 1
    logits[2, [7, 90]] = 2
    assert sample(logits, batch([{}, {}, {}])).tolist() == [0, 50, 7]


def test_what_is_minus_infinity_cannot_be_sampled():
    """Field failure 22: ids that are out, greedy and random."""
    logits = torch.zeros(300, VOCABULARY)
    logits[:, [4, 5]] = -torch.inf
    rows = [{"temperature": i % 2, "position": i} for i in range(300)]
    assert not {4, 5} & set(sample(logits, batch(rows)).tolist())


def test_frequencies_follow_the_probabilities():
    """20,000 positions: each frequency within five standard deviations."""
    probabilities = torch.tensor([0.5, 0.3, 0.15, 0.05])
    number = 20_000
    logits = torch.log(probabilities).repeat(number, 1)
    rows = [{"temperature": 1.0, "position": i, "seed": 5} for i in range(number)]
    counts = torch.bincount(sample(logits, batch(rows)), minlength=4)
    deviation = (number * probabilities * (1 - probabilities)).sqrt()
    assert ((counts - number * probabilities).abs() < 5 * deviation).all()


def test_seed_position_and_choice_each_change_the_noise():
    ids = torch.arange(50)

    def noise(seed: int, position: int, choice: int) -> list[float]:
        return gumbel(torch.tensor(seed), ids, torch.tensor(position), torch.tensor(choice)).tolist()

    assert len({tuple(noise(*case)) for case in [(1, 2, 3), (1 + 2**32, 2, 3), (2, 2, 3), (1, 3, 3), (1, 2, 4)]}) == 5


def test_the_largest_random_word_gives_finite_noise(monkeypatch):
    """0.5 + (2^24 - 1) rounds to 2^24 in float32: without care that id would win against every logit."""
    monkeypatch.setattr(sampler, "philox4x32", lambda counter, key: (torch.tensor([0xFFFFFFFF, 0]),) * 4)
    noise = gumbel(torch.tensor(0), torch.tensor([0, 1]), torch.tensor(0), torch.tensor(0))
    assert torch.isfinite(noise).all()
    assert noise[0] - noise[1] < sampler._NOISE_SPAN


def test_the_noise_span_leaves_no_winner_out():
    """Tokens further below the best than the noise can lift are skipped; one just inside can still win."""
    logits = torch.full((1, VOCABULARY), -19.0)
    logits[0, 0] = 0.0
    rows = [{"temperature": 1.0, "position": i} for i in range(500)]
    expected = [sampled_directly(logits[0], row) for row in rows]
    assert sample(logits.repeat(500, 1), batch(rows)).tolist() == expected


@pytest.mark.parametrize("temperature", [1e-38, 1e-30, 1e-6])
def test_a_tiny_temperature_is_greedy(temperature):
    logits = torch.randn(20, VOCABULARY, generator=torch.Generator().manual_seed(7)) * 30
    rows = [{"temperature": temperature, "top_p": 0.9, "position": i} for i in range(20)]
    assert sample(logits.clone(), batch(rows)).tolist() == logits.argmax(dim=-1).tolist()
