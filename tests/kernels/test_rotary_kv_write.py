"""KV writes, dense and quantized, against the fp64 reference, into poisoned arenas."""

from collections.abc import Callable

import pytest
import torch

from kernels.reference import rotary_kv_write as reference
from kernels.rotary_kv_write import rotary_kv_write
from kernels.rotary_kv_write_quantized import rotary_kv_write_quantized
from tests.kernels.pairwise import case_id, pairwise

TOLERANCE = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}
SLOTS = (37, -1, 8, 0, 15, 16, 63)  # first and last of a block, the reserved block, nowhere
GRID = {
    "dtype": (torch.float32, torch.float16, torch.bfloat16),
    "heads": ((1, 1), (4, 4), (9, 3), (28, 4)),
    "head_dim": (16, 40, 64, 80, 96, 128, 192, 256),
    "rotary": ("all", "half", "quarter"),
    "interleaved": (False, True),
    "block_size": (8, 12, 16),
    "own_v_size": (False, True),
    "table_dtype": (torch.int32, torch.int64),
}


def make_inputs(dtype, heads, head_dim, rotary, interleaved, block_size, own_v_size, table_dtype, device):
    """-> (arguments of a write, caches as a NaN-filled strided arena)"""
    generator = torch.Generator().manual_seed(0)
    v_head_dim = head_dim // 2 if own_v_size else head_dim
    rotary_dim = {"all": head_dim, "half": head_dim // 2, "quarter": head_dim // 4 // 2 * 2}[rotary]
    num_tokens = len(SLOTS)
    angles = torch.rand(50, rotary_dim // 2, generator=generator) * 6.28

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype).to(device)

    merged = random(num_tokens, heads[0] + heads[1], head_dim)  # q and k as views of one projection
    arguments = {
        "query": merged[:, : heads[0]],
        "key": merged[:, heads[0] :],
        "value": random(num_tokens, heads[1], v_head_dim),
        "cos": angles.cos().to(device),
        "sin": angles.sin().to(device),
        "positions": torch.randint(50, (num_tokens,), generator=generator).to(table_dtype).to(device),
        "slots": torch.tensor(SLOTS, dtype=table_dtype, device=device),
        "interleaved": interleaved,
    }
    num_blocks = 64 // block_size + 1
    arena = torch.full((num_blocks, 2, heads[1], block_size, head_dim + v_head_dim), float("nan"), dtype=dtype)
    arena = arena.to(device)
    return arguments, arena[:, 1, ..., :head_dim], arena[:, 1, ..., head_dim:], arena


@pytest.mark.parametrize("values", pairwise(GRID), ids=case_id)
def test_dense_write(values, device):
    arguments, k_cache, v_cache, arena = make_inputs(**values, device=device)
    expected_k, expected_v = k_cache.double(), v_cache.clone()
    expected_query = reference.rotary_kv_write(**arguments, k_cache=expected_k, v_cache=expected_v)
    query_out = torch.full_like(expected_query, float("nan"), dtype=values["dtype"])
    rotary_kv_write(query_out=query_out, k_cache=k_cache, v_cache=v_cache, **arguments)
    close = {"atol": TOLERANCE[values["dtype"]], "rtol": TOLERANCE[values["dtype"]]}
    torch.testing.assert_close(query_out.double(), expected_query, **close)
    torch.testing.assert_close(k_cache.double(), expected_k, equal_nan=True, **close)
    torch.testing.assert_close(v_cache, expected_v, equal_nan=True, rtol=0, atol=0)
    assert arena[:, 0].isnan().all(), "the neighbouring layer was written"


def test_query_may_be_rotated_in_place(device):
    values = {name: options[0] for name, options in GRID.items()} | {"heads": (4, 4)}
    arguments, k_cache, v_cache, _ = make_inputs(**values, device=device)
    expected = torch.empty_like(arguments["query"])
    rotary_kv_write(query_out=expected, k_cache=k_cache, v_cache=v_cache, **arguments)
    rotary_kv_write(query_out=arguments["query"], k_cache=k_cache, v_cache=v_cache, **arguments)
    assert torch.equal(arguments["query"], expected)


QUANTIZED_GRID = {**GRID, "heads": ((1, 1), (9, 3), (28, 4)), "kv_dtype": (torch.int8, torch.float8_e4m3fn)}


@pytest.mark.parametrize("values", pairwise(QUANTIZED_GRID, seed=1), ids=case_id)
def test_quantized_write(values, device):
    """Each value comes back within half a step of its head's scale, and the scale is the head's own."""
    values = dict(values)
    kv_dtype = values.pop("kv_dtype")
    arguments, k_cache, v_cache, _ = make_inputs(**values, device=device)
    expected_k, expected_v = k_cache.double(), v_cache.double()
    reference.rotary_kv_write(**arguments, k_cache=expected_k, v_cache=expected_v)
    caches = [torch.zeros_like(cache, dtype=torch.float32).to(kv_dtype) for cache in (k_cache, v_cache)]
    scales = [torch.full(cache.shape[:3], float("nan"), device=device) for cache in caches]
    query_out = torch.empty_like(arguments["query"])
    rotary_kv_write_quantized(
        query_out=query_out, k_cache=caches[0], v_cache=caches[1], k_scale=scales[0], v_scale=scales[1], **arguments
    )
    for cache, scale, expected in zip(caches, scales, (expected_k, expected_v), strict=True):
        written = ~expected.isnan()
        assert torch.equal(scale.isnan(), ~written[..., 0]), "a scale was written where no token was, or not where one"
        largest = expected.abs().amax(-1)[written[..., 0]]
        limit = reference.CODE_MAX[kv_dtype]
        torch.testing.assert_close(scale[written[..., 0]].double(), largest / limit, rtol=1e-5, atol=0)
        value = cache.double() * scale.double()[..., None]
        step = largest[:, None] / limit * 0.501 if kv_dtype == torch.int8 else None
        error = (value - expected).abs()[written].reshape(largest.shape[0], -1)
        if step is None:  # e4m3: 3 mantissa bits, and subnormals of 2^-9 in code units
            magnitude = expected.abs()[written].reshape(error.shape)
            step = torch.maximum(magnitude / 16, largest[:, None] / limit * 2.0**-10) * 1.001
        assert (error <= step).all()


@pytest.mark.parametrize("kv_dtype", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_broken_head_stays_visible_in_its_scale(kv_dtype, bad, device):
    key = torch.randn(1, 2, 16, device=device)
    value = torch.randn(1, 2, 16, device=device)
    key[0, 1, 5] = value[0, 0, 2] = bad
    cache = torch.zeros(2, 2, 8, 16, device=device).to(kv_dtype)
    k_scale, v_scale = torch.zeros(2, 2, 8, device=device), torch.zeros(2, 2, 8, device=device)
    angles = torch.ones(1, 8, device=device)
    rotary_kv_write_quantized(
        key.clone(), key, key, value, cache, cache.clone(), k_scale, v_scale, angles, angles * 0,
        torch.zeros(1, dtype=torch.int32, device=device), torch.tensor([8], device=device),
    )  # fmt: skip
    assert k_scale[1, :, 0].isnan().tolist() == [False, True]
    assert v_scale[1, :, 0].isnan().tolist() == [True, False]


def test_a_zero_head_has_scale_zero(device):
    zero = torch.zeros(1, 1, 16, device=device)
    cache = torch.full((2, 1, 8, 16), 7, dtype=torch.int8, device=device)
    scale = torch.ones(2, 1, 8, device=device)
    angles = torch.ones(1, 8, device=device)
    rotary_kv_write_quantized(
        zero.clone(), zero, zero, zero, cache, cache, scale, scale, angles, angles,
        torch.zeros(1, dtype=torch.int32, device=device), torch.tensor([9], device=device),
    )  # fmt: skip
    assert (cache[1, 0, 1] == 0).all()
    assert scale[1, 0, 1] == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: {"positions": a["positions"][:-1]}, "one entry for each"),
        (lambda a: {"cos": a["cos"][:, :3]}, "cos and sin"),
        (lambda a: {"value": a["value"][:-1]}, "agree in tokens"),
        (lambda a: {"value": a["value"].transpose(1, 2).contiguous().transpose(1, 2)}, "must be contiguous"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(change: Callable, message: str, device):
    values = {name: options[0] for name, options in GRID.items()} | {"heads": (4, 4)}
    arguments, k_cache, v_cache, _ = make_inputs(**values, device=device)
    arguments |= change(arguments)
    with pytest.raises(ValueError, match=message):
        rotary_kv_write(query_out=arguments["query"], k_cache=k_cache, v_cache=v_cache, **arguments)
