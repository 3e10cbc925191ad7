"""Paged attention against its fp64 reference, over poisoned pools: pairwise in `make test`, more as `long`."""

import itertools
import random
from typing import Any

import pytest
import torch

from tests.kernels import paged_case
from tests.kernels.paged_case import Case, batch_of, check
from tests.kernels.pairwise import case_id, pairwise

HEAD_SIZES = (16, 40, 64, 80, 96, 128, 192, 256)
HEADS = ((1, 1), (4, 4), (9, 3), (28, 4), (32, 1), (36, 2))
DTYPES = {
    "fp32": (torch.float32, None),
    "fp16": (torch.float16, None),
    "bf16": (torch.bfloat16, None),
    "fp16-int8": (torch.float16, torch.int8),
    "bf16-fp8": (torch.bfloat16, torch.float8_e4m3fn),
}
FEATURES = {
    "plain": {},
    "window": {"sliding_window": 21},
    "cap": {"softcap": 2.0},
    "alibi": {"alibi": True},
    "all": {"sliding_window": 5, "softcap": 2.0, "alibi": True},
}
GRID = {
    "dtype": list(DTYPES),
    "head_dim": HEAD_SIZES,
    "heads": HEADS,
    "block_size": (8, 16, 32, 64),
    "kind_and_splits": (("decode", 1), ("decode", 3), ("prefill", 1), ("mixed", 1)),
    "order": paged_case.ORDERS,
    "feature": list(FEATURES),
    "own_v_size": (False, True),
}


# Every combination of these is a case of the long grid; of the others each case draws one value.
CROSSED = ("head_dim", "heads", "dtype", "feature", "kind_and_splits")


def long_grid(head_dim: int, heads: tuple[int, int]) -> list[dict[str, Any]]:
    """100 cases: the whole grid would be 32 times as many."""
    rng = random.Random(f"{head_dim} {heads}")
    crossed = itertools.product([head_dim], [heads], *(GRID[name] for name in CROSSED[2:]))
    drawn = [name for name in GRID if name not in CROSSED]
    return [
        dict(zip(CROSSED, values, strict=True)) | {name: rng.choice(GRID[name]) for name in drawn} for values in crossed
    ]


def make_case(dtype, head_dim, heads, block_size, kind_and_splits, order, feature, own_v_size) -> Case:
    kind, num_splits = kind_and_splits
    return Case(
        lengths=batch_of(kind, block_size),
        dtype=DTYPES[dtype][0],
        kv_dtype=DTYPES[dtype][1],
        heads=heads,
        head_dim=head_dim,
        v_head_dim=max(head_dim // 2, 16) if own_v_size else None,
        block_size=block_size,
        order=order,
        features=FEATURES[feature],
        num_splits=num_splits,
        padding_tokens=2,
    )


@pytest.mark.parametrize("values", pairwise(GRID), ids=case_id)
def test_pairwise_grid(values, device):
    check(make_case(**values), device)


@pytest.mark.long
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("head_dim", HEAD_SIZES)
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_long_grid(head_dim, heads, device):
    """Every dtype x feature x kind (which hold all boundary lengths) x splits; table orders and block sizes drawn."""
    for values in long_grid(head_dim, heads):
        check(make_case(**values), device)


def test_the_long_grid_holds_every_triple_of_values():
    cases = [case for head_dim, heads in itertools.product(HEAD_SIZES, HEADS) for case in long_grid(head_dim, heads)]
    for names in itertools.combinations(GRID, 3):
        wanted = set(itertools.product(*(GRID[name] for name in names)))
        assert {tuple(case[name] for name in names) for case in cases} == wanted


@pytest.mark.parametrize("block_size", [128, 256])
def test_large_blocks(block_size, device):
    check(Case(lengths=batch_of("decode", block_size), block_size=block_size, heads=(2, 1)), device)


@pytest.mark.parametrize("block_size", [12, 48, 100])
def test_block_sizes_that_are_no_power_of_two(block_size, device):
    check(Case(lengths=batch_of("mixed", block_size), block_size=block_size), device)


def test_splits_that_see_nothing(device):
    """More splits than tiles of KV: the rest must weigh nothing, and their partial results stay unread."""
    check(Case(lengths=[(1, 5), (1, 70), (1, 0)], num_splits=7), device)


def test_tile_and_split_boundaries(device):
    """Lengths around the 64 positions of a tile and around the boundary between two splits."""
    lengths = [(1, length) for length in (63, 64, 65, 127, 128, 129, 192, 193, 256, 257)]
    check(Case(lengths=lengths, num_splits=2, heads=(2, 1)), device)


def test_strided_query_and_output_views(device):
    """q as a slice of a merged q/k/v projection: token and head strides of its own."""
    case = Case(lengths=batch_of("mixed", 16))
    arguments = paged_case.build(case, device)
    expected = paged_case.run(case, arguments)
    merged = torch.full((arguments["query"].shape[0], 9, 16), float("nan"), device=device)
    merged[:, 2:6] = arguments["query"]
    arguments["query"] = merged[:, 2:6]
    torch.testing.assert_close(paged_case.run(case, arguments), expected, rtol=0, atol=0, equal_nan=True)


def test_rows_do_not_depend_on_their_batch(device):
    """Bitwise: a sequence alone gives what it gives among others, for one plan."""
    case = Case(lengths=[(1, 50), (1, 17), (1, 33)], heads=(4, 4))
    arguments = paged_case.build(case, device)
    together = paged_case.run(case, arguments)
    alone = Case(lengths=[(1, 17)], heads=(4, 4))
    arguments.update(
        query=arguments["query"][1:2],
        block_tables=arguments["block_tables"][1:2],
        kv_lens=arguments["kv_lens"][1:2],
        query_start=torch.tensor([0, 1], dtype=torch.int32, device=device),
    )
    torch.testing.assert_close(paged_case.run(alone, arguments), together[1:2], rtol=0, atol=0)


def test_a_live_nan_stays_visible(device):
    """NaN that belongs to a sequence must come out in its rows, also through the split path, and only there."""
    for num_splits in (1, 2):
        case = Case(lengths=[(1, 40), (1, 40)], num_splits=num_splits)
        arguments = paged_case.build(case, device)
        arguments["v_cache"][arguments["block_tables"][0, 0].long(), :, 3] = float("nan")
        out = paged_case.run(case, arguments)
        assert out[0].isnan().all()
        assert not out[1].isnan().any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kv_lens": torch.zeros(3, dtype=torch.int64)}, "kv_lens must be int32"),
        ({"block_tables": torch.zeros(2, 4, dtype=torch.int32)}, "num_seqs rows"),
        ({"alibi_slopes": torch.ones(3)}, "one entry for each of 4"),
        ({"k_scale": torch.ones(1)}, "k_scale"),
        ({"sliding_window": -1}, "positive"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(change, message, device):
    case = Case(lengths=[(1, 5), (1, 6), (1, 7)])
    with pytest.raises((ValueError, TypeError), match=message):
        paged_case.run(case, {**paged_case.build(case, device), **change})


def test_kv_of_another_float_dtype_is_refused(device):
    case = Case(lengths=[(1, 5)])
    arguments = paged_case.build(case, device)
    arguments["query"] = arguments["query"].half()
    with pytest.raises(TypeError, match="KV must have the query's dtype"):
        paged_case.run(case, arguments)
