"""Failures that other engines met in the field, as inputs for these kernels; numbers are the project's list's."""

import pytest
import torch

from kernels.block_copy import block_copy
from kernels.paged_attention import paged_attention
from kernels.rotary_kv_write import rotary_kv_write
from tests.kernels import paged_case
from tests.kernels.paged_case import Case, boundary_lengths, check

HEAD_SIZES = (16, 40, 64, 80, 96, 128, 192, 256)
HEADS = ((1, 1), (4, 4), (9, 3), (28, 4), (32, 1), (36, 2))


def sparse_pool(num_blocks: int, block_size: int, head_dim: int) -> torch.Tensor:
    """[num_blocks, 1, block_size, head_dim] int8 of untouched pages: only what is written takes memory"""
    pool = torch.empty(num_blocks, 1, block_size, head_dim, dtype=torch.int8)
    assert pool.numel() > 2**31
    return pool


def test_pool_larger_than_2_31_elements(device):
    """29: only the last blocks of a huge pool are used; the answer equals the small pool's, byte for byte."""
    block_size, dim = 16, 64
    num_blocks = 2**31 // (block_size * dim) + 40
    case = Case(lengths=[(1, 37), (3, 20)], kv_dtype=torch.int8, heads=(2, 1), head_dim=dim, block_size=block_size)
    arguments = paged_case.build(case, device)
    expected = paged_case.run(case, arguments)
    used = arguments["k_cache"].shape[0]
    shift = num_blocks - used
    for name in ("k", "v"):
        pool = sparse_pool(num_blocks, block_size, dim).to(device)
        pool[-used:] = arguments[f"{name}_cache"]
        scale = torch.empty(num_blocks, 1, block_size, device=device)
        scale[-used:] = arguments[f"{name}_scale"]
        arguments[f"{name}_cache"], arguments[f"{name}_scale"] = pool, scale
    arguments["block_tables"] = arguments["block_tables"] + shift
    torch.testing.assert_close(paged_case.run(case, arguments), expected, rtol=0, atol=0)


def test_kv_write_into_a_pool_larger_than_2_31_elements(device):
    """29: a slot of the last block, written by 64-bit arithmetic."""
    block_size, dim = 16, 64
    num_blocks = 2**31 // (block_size * dim) + 2
    pool = torch.empty(num_blocks, 1, block_size, dim, dtype=torch.float16, device=device)
    last = torch.tensor([num_blocks * block_size - 1], dtype=torch.int64, device=device)
    key = torch.randn(1, 1, dim).half().to(device)
    cos, sin = torch.ones(1, dim // 2, device=device), torch.zeros(1, dim // 2, device=device)
    rotary_kv_write(key, key, key, key, pool, pool, cos, sin, torch.zeros(1, dtype=torch.int32, device=device), last)
    assert torch.equal(pool[-1, 0, -1], key[0, 0])


def test_block_copy_in_an_arena_larger_than_2_31_words(device):
    """29: source and target both lie past 2^31 eight-byte words."""
    if device != "cpu":
        pytest.skip("17 GB of sparse memory are only cheap on the CPU")
    block_bytes = 1 << 20
    arena = torch.empty((2**31 * 8) // block_bytes + 4, block_bytes, dtype=torch.uint8)
    arena[-1, ::4096] = torch.arange(256, dtype=torch.uint8)
    arena[-2, ::4096] = 0
    block_copy(arena, [(arena.shape[0] - 1, arena.shape[0] - 2)])
    assert torch.equal(arena[-2, ::4096], torch.arange(256, dtype=torch.uint8))


@pytest.mark.parametrize("num_splits", [1, 2])
@pytest.mark.parametrize("block_size", [8, 16])
def test_lengths_around_a_block_on_a_poisoned_pool(block_size, num_splits, device):
    """30: lengths 1, B-1, B, B+1, 3B+2 and padded rows of length 0; no NaN comes out, and padding gives zeros."""
    lengths = [(1, 0), *((1, length) for length in boundary_lengths(block_size)), (1, 0)]
    case = Case(lengths=lengths, block_size=block_size, num_splits=num_splits, padding_tokens=3)
    arguments = paged_case.build(case, device)
    out = paged_case.run(case, arguments)
    assert (out[[0, 6]] == 0).all()
    check(case, device)


def test_padded_rows_write_nowhere_shared(device):
    """30: a step's KV write with padding (slot -1, and a slot of the reserved block 0) leaves every other block."""
    num_blocks, block_size, dim = 5, 8, 16
    pool = torch.full((num_blocks, 2, block_size, dim), float("nan"), device=device)
    before = pool.clone()
    x = torch.randn(3, 2, dim, device=device)
    angles = torch.ones(1, dim // 2, device=device)
    slots = torch.tensor([-1, 3, 2 * block_size + 1], device=device)
    positions = torch.zeros(3, dtype=torch.int32, device=device)
    rotary_kv_write(torch.empty_like(x), x, x, x, pool, pool, angles, angles, positions, slots)
    assert torch.equal(pool[2, :, 1], x[2])
    pool[2, :, 1] = float("nan")
    assert torch.equal(pool[1:].isnan(), before[1:].isnan())


@pytest.mark.parametrize("head_dim", HEAD_SIZES)
def test_head_sizes(head_dim, device):
    """31: every head size of the field, also those that fill no power of two."""
    check(Case(lengths=[(1, 18), (5, 7)], head_dim=head_dim, heads=(2, 1), block_size=8), device)


@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_head_groups(heads, device):
    """31: one head, as many KV heads as heads, odd groups, one KV head for all."""
    check(Case(lengths=[(1, 18), (5, 7)], heads=heads, block_size=8), device)


def test_heads_that_do_not_divide_are_refused(device):
    """31: three query heads cannot share two KV heads."""
    case = Case(lengths=[(1, 5)], heads=(3, 2))
    with pytest.raises(ValueError, match=r"num_q_heads \(3\) must be a multiple of num_kv_heads \(2\)"):
        paged_case.run(case, paged_case.build(case, device))


@pytest.mark.parametrize("window", [1, 7, 8, 9, 30])
def test_sliding_window_sees_the_same_positions_on_every_path(window, device):
    """32: with K zero and V one-hot by position, the output is the set of visible positions; prefill whole, prefill in
    chunks, decode, and decode split over KV must give the same sets: (p - window, p]."""
    total, block_size, dim = 30, 8, 32
    k_cache = torch.zeros(6, 1, block_size, 16, device=device)
    v_cache = torch.zeros(6, 1, block_size, dim, device=device)
    table = torch.tensor([[4, 2, 5, 1]], dtype=torch.int32, device=device)
    for position in range(total):
        v_cache[table[0, position // block_size].long(), 0, position % block_size, position] = 1.0

    def visible(first: int, last: int, num_splits: int) -> torch.Tensor:
        out = torch.full((last - first, 1, dim), float("nan"), device=device)
        paged_attention(
            out,
            query=torch.randn(last - first, 1, 16, device=device),
            k_cache=k_cache,
            v_cache=v_cache,
            block_tables=table,
            query_start=torch.tensor([0, last - first], dtype=torch.int32, device=device),
            kv_lens=torch.tensor([last], dtype=torch.int32, device=device),
            softmax_scale=0.25,
            sliding_window=window,
            max_query_len=last - first,
            max_kv_len=last,
            num_splits=num_splits,
        )
        return out[:, 0] > 0

    position = torch.arange(total, device=device)[:, None]
    key = torch.arange(dim, device=device)[None, :]
    expected = (key <= position) & (key > position - window)
    assert torch.equal(visible(0, total, 1), expected)
    assert torch.equal(torch.cat([visible(0, 7, 1), visible(7, 16, 1), visible(16, total, 2)]), expected)
    decoded = [visible(p, p + 1, 1 + p % 2) for p in range(0, total, 3)]
    assert torch.equal(torch.cat(decoded), expected[::3])


@pytest.mark.parametrize("num_splits", [1, 2])
def test_bf16_is_exact_on_small_integers(num_splits, device):
    """33: with equal keys attention is a mean; of small integers over a power of two it is exact, or wrong."""
    case = Case(lengths=[(1, 8), (1, 64), (1, 1)], dtype=torch.bfloat16, num_splits=num_splits)
    arguments = paged_case.build(case, device)
    arguments["query"] = torch.zeros_like(arguments["query"])
    live = ~arguments["v_cache"].isnan()
    integers = torch.randint(-8, 9, arguments["v_cache"].shape, generator=torch.Generator().manual_seed(1))
    integers = integers.to(device, torch.bfloat16)
    arguments["v_cache"].copy_(torch.where(live, integers, arguments["v_cache"]))
    out = paged_case.run(case, arguments).double()
    expected = paged_case.reference_attention(**arguments)
    exact = expected.to(torch.bfloat16).double() == expected
    assert exact[[0, 2]].all()  # a mean of 8 has 3 more bits, of 64 some have too many
    assert torch.equal(out[exact], expected[exact])


def test_bf16_dot_products_are_exact_on_small_integers(device):
    """33: scores too: the key that equals a one-hot query wins by exactly its integer."""
    case = Case(lengths=[(1, 16)], dtype=torch.bfloat16, heads=(1, 1), order="ascending")
    arguments = paged_case.build(case, device)
    block = arguments["block_tables"][0, 0].long()
    arguments["query"] = torch.eye(16, device=device, dtype=torch.bfloat16)[3][None, None] * 64
    arguments["softmax_scale"] = 1.0
    arguments["k_cache"][block] = torch.eye(16, device=device, dtype=torch.bfloat16)
    arguments["v_cache"][block] = torch.arange(256, device=device).reshape(1, 16, 16).to(torch.bfloat16)
    out = paged_case.run(case, arguments)
    assert torch.equal(out[0, 0], torch.arange(48, 64, device=device).to(torch.bfloat16))
