"""Sampling against its plain-torch definition, which is written in the order in which it is stated."""

import math

import pytest
import torch
import triton
import triton.language as tl

from kernels.reference import sampling as reference
from kernels.sampling import PARAMETER_DTYPES, sample
from kernels.sampling_noise import gumbel_noise

DEFAULTS = {
    "temperatures": 1.0,
    "top_ks": 0,
    "top_ps": 1.0,
    "min_ps": 0.0,
    "seeds": 0,
    "positions": 0,
    "choice_indices": 0,
}


def parameters_of(num_rows: int, device: str, **changes: object) -> dict[str, torch.Tensor]:
    """Every parameter as a tensor of its dtype: a list gives each row its own, a number is for all."""
    values = {**DEFAULTS, **changes}
    return {
        name: torch.tensor(value if isinstance(value, list) else [value] * num_rows, dtype=PARAMETER_DTYPES[name]).to(
            device
        )
        for name, value in values.items()
    }


def draw(logits: torch.Tensor, **changes: object) -> list[int]:
    out = torch.full((logits.shape[0],), -7, dtype=torch.int64, device=logits.device)
    return sample(out, logits, **parameters_of(logits.shape[0], logits.device.type, **changes)).tolist()


def expected(logits: torch.Tensor, **changes: object) -> list[int]:
    parameters = parameters_of(logits.shape[0], "cpu", **changes)
    return [
        reference.sample_row(logits[row].cpu(), *(parameters[name][row].item() for name in PARAMETER_DTYPES))
        for row in range(logits.shape[0])
    ]


def support(logits: list[float], draws: int = 10, **changes: object) -> set[int]:
    """Ids that come up over many seeds: the kept set, for logits this close together."""
    rows = torch.tensor([logits]).repeat(draws, 1)
    return set(draw(rows, seeds=list(range(draws)), **changes))


@triton.jit
def noise_kernel(out, seed, token_ids, position, choice_index, N: tl.constexpr):  # noqa: N803
    lane = tl.arange(0, N)
    noise = gumbel_noise(tl.load(seed), tl.load(token_ids + lane), tl.load(position), tl.load(choice_index))
    tl.store(out + lane, noise)


def test_philox_known_answers():
    """The three published vectors of Philox-4x32-10 (Random123, kat_vectors)."""
    vectors = [
        ((0,) * 4, (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ]
    for counter, key, words in vectors:
        result = reference.philox_4x32_10([torch.tensor([word]) for word in counter], key)
        assert tuple(word.item() for word in result) == words


@pytest.mark.parametrize("seed", [0, 42, -1, 2**63 - 1, -(2**63), 0x0123456789ABCDEF])
@pytest.mark.parametrize(("position", "choice"), [(0, 0), (7, 3), (2**31 - 1, 1)])
def test_noise_is_philox_of_seed_id_position_and_choice(seed, position, choice, device):
    token_ids = torch.arange(1000, 1064)
    out = torch.empty(64, device=device)
    scalars = [torch.tensor([word], dtype=torch.int32, device=device) for word in (position, choice)]
    noise_kernel[(1,)](out, torch.tensor([seed], device=device), token_ids.int().to(device), *scalars, N=64)
    torch.testing.assert_close(
        out.cpu(), reference.gumbel_noise(seed, token_ids, position, choice), rtol=1e-5, atol=1e-6
    )


def test_noise_is_finite_for_the_largest_word(device):
    """(2^24 - 1) + 0.5 rounds to 2^24 in fp32: unclamped, u is 1, the noise infinite, and the token wins for it.

    Seed 0 gives id 38471471 the word 0xffffffec, the first id whose upper 24 bits are all ones.
    """
    token_ids = torch.arange(38471471, 38471471 + 16)
    word = reference.philox_4x32_10([token_ids, *[torch.zeros_like(token_ids)] * 3], (0, 0))[0]
    assert word[0] == 0xFFFFFFEC
    out = torch.empty(16, device=device)
    zero = torch.zeros(1, dtype=torch.int32, device=device)
    noise_kernel[(1,)](out, zero.long(), token_ids.int().to(device), zero, zero, N=16)
    assert out[0].item() == pytest.approx(-math.log(-math.log(1 - 2.0**-24)))
    assert reference.gumbel_noise(0, token_ids, 0, 0)[0].item() == pytest.approx(out[0].item())


ROWS = [
    {},
    {"temperatures": 0.0},
    {"temperatures": 0.7, "top_ks": 5},
    {"top_ks": 1},
    {"top_ks": 50, "top_ps": 0.8},
    {"top_ps": 0.9},
    {"top_ps": 0.3, "min_ps": 0.1},
    {"min_ps": 0.05},
    {"temperatures": 1.5, "top_ks": 40, "top_ps": 0.95, "min_ps": 0.02},
    {"top_ks": 999, "top_ps": 0.5},
]


def mixed_rows(count: int) -> dict[str, list]:
    """`count` rows that cycle through ROWS, each with seed, position and choice of its own."""
    rows = [ROWS[row % len(ROWS)] for row in range(count)]
    changes = {name: [row.get(name, default) for row in rows] for name, default in DEFAULTS.items()}
    changes["seeds"] = [row * 0x9E3779B97F4A7C15 % 2**63 for row in range(count)]
    changes["positions"] = [row * 17 for row in range(count)]
    changes["choice_indices"] = [row % 3 for row in range(count)]
    return changes


@pytest.mark.parametrize(
    ("vocab_size", "dtype"), [(7, torch.float32), (1000, torch.float16), (1025, torch.bfloat16), (4097, torch.float32)]
)
def test_mixed_rows_equal_the_definition(vocab_size, dtype, device):
    logits = torch.randn(10, vocab_size + 3, generator=torch.Generator().manual_seed(vocab_size)) * 3
    logits[:, vocab_size:] = float("nan")
    logits = logits.to(dtype).to(device)[:, :vocab_size]
    assert draw(logits, **mixed_rows(10)) == expected(logits, **mixed_rows(10))


def test_a_row_draws_the_same_in_every_batch(device):
    """Field failure 26: the same for every batch size and row."""
    logits = torch.randn(10, 300, generator=torch.Generator().manual_seed(5)).to(device)
    changes = mixed_rows(10)
    together = draw(logits, **changes)
    for row in range(10):
        alone = {name: [values[row]] for name, values in changes.items()}
        assert draw(logits[row : row + 1], **alone) == together[row : row + 1]


class TestFilters:
    """Field failure 26: what each filter keeps, to the token."""

    def test_top_k_keeps_exactly_k_and_ties_go_to_the_lower_id(self):
        assert support([1.0] * 5, top_ks=2) == {0, 1}
        assert support([0.5, 1.0, 0.5, 1.0, 0.5], top_ks=3) == {0, 1, 3}

    def test_zero_and_minus_zero_tie(self):
        assert support([0.0, -0.0, 0.0], top_ks=2) == {0, 1}

    @pytest.mark.parametrize("top_k", [0, -1, 4, 5])
    def test_top_k_of_nothing_or_everything_is_off(self, top_k):
        assert support([1.0] * 4, top_ks=top_k) == {0, 1, 2, 3}

    def test_the_token_that_crosses_top_p_belongs(self):
        halves = [math.log(weight) for weight in (0.5, 0.25, 0.25)]
        assert support(halves, top_ps=0.5) == {0}
        assert support(halves, top_ps=0.51) == {0, 1}
        assert support(halves, top_ps=0.75) == {0, 1}
        assert support(halves, top_ps=0.76) == {0, 1, 2}
        assert support(halves, top_ps=0.0) == {0}

    def test_top_p_is_over_the_renormalized_survivors_of_top_k(self):
        """Of four equal tokens the two that top-k leaves have half the mass each: 0.5 keeps one, 0.6 both."""
        assert support([1.0] * 4, top_ks=2, top_ps=0.5) == {0}
        assert support([1.0] * 4, top_ks=2, top_ps=0.6) == {0, 1}

    def test_top_p_may_end_above_the_top_k_threshold(self):
        assert support([3.0, 2.9, 0.0, 0.0], top_ks=3, top_ps=0.9) == {0, 1}

    def test_min_p(self):
        weights = [math.log(weight) for weight in (0.8, 0.4, 0.2)]
        assert support(weights, min_ps=0.0) == {0, 1, 2}
        assert support(weights, min_ps=0.4) == {0, 1}
        assert support(weights, min_ps=1.0) == {0}
        assert support([1.0, 1.0], min_ps=1.0) == {0, 1}

    def test_temperature_comes_first(self):
        """At temperature 2 the second token's weight is sqrt(1/16) of the first's and passes min_p 0.2."""
        weights = [0.0, math.log(1 / 16)]
        assert support(weights, min_ps=0.2) == {0}
        assert support(weights, min_ps=0.2, temperatures=2.0) == {0, 1}


def test_greedy_takes_the_lowest_id_on_ties(device):
    logits = torch.tensor([[0.0, 3.0, 3.0], [-1.0, -1.0, -2.0]], device=device)
    assert draw(logits, temperatures=0.0, top_ks=1, top_ps=0.1) == [1, 0]


def test_masked_tokens_are_never_drawn_and_infinite_ones_always(device):
    masked = torch.full((1, 50), float("-inf"), device=device)
    masked[0, 33] = -5.0
    assert draw(masked, top_ks=10) == [33]
    assert draw(masked, top_ps=0.9) == [33]
    masked[0, 20] = float("inf")
    assert draw(masked, top_ps=0.9) == [20]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nan_counts_as_masked_and_a_row_of_nothing_gives_minus_one(temperature, device):
    logits = torch.full((2, 5), float("nan"), device=device)
    logits[1, 3] = 0.0
    assert draw(logits, temperatures=temperature) == [-1, 3]


def test_draws_follow_the_softmax(device):
    """100 seeds over four tokens; the largest deviation allowed is three standard errors."""
    draws = 100
    probabilities = torch.tensor([0.5, 0.25, 0.15, 0.1])
    counts = torch.bincount(
        torch.tensor(draw(probabilities.log().repeat(draws, 1).to(device), seeds=list(range(draws)))), minlength=4
    )
    error = (counts / draws - probabilities).abs()
    assert (error < 3 * (probabilities * (1 - probabilities) / draws).sqrt()).all()


def test_parameters_of_a_wrong_kind_are_refused(device):
    logits = torch.zeros(2, 5, device=device)
    parameters = parameters_of(2, device)
    out = torch.zeros(2, dtype=torch.int64, device=device)
    with pytest.raises(ValueError, match="top_ks must be"):
        sample(out, logits, **{**parameters, "top_ks": torch.zeros(2, device=device)})
    with pytest.raises(TypeError, match="sampling parameters are"):
        sample(out, logits, temperatures=parameters["temperatures"])
