"""KV writes without rotary embedding against their reference, into poisoned arenas."""

import pytest
import torch

from kernels.kv_write import kv_write
from kernels.kv_write_quantized import kv_write_quantized
from kernels.reference import kv_write as reference
from kernels.reference.rotary_kv_write import quantize, write_slots
from tests.kernels.pairwise import case_id, pairwise

SLOTS = (37, -1, 8, 0, 15, 16, 63)  # first and last of a block, the reserved block, nowhere
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
GRID = {
    "dtype": FLOATS,
    "kv_dtype": FLOATS,
    "num_heads": (1, 3, 4),
    "head_dim": (16, 40, 80, 256),
    "block_size": (8, 12, 16),
    "own_v_size": (False, True),
    "layout": ("head, token, dim", "dim, token, head"),
    "slots_dtype": (torch.int32, torch.int64),
}


def arena_of(num_blocks: int, num_heads: int, block_size: int, dim: int, dtype: torch.dtype, layout: str):
    """[num_blocks, 2 layers, num_heads, block_size, dim], full of NaN"""
    if layout == "head, token, dim":
        return torch.full((num_blocks, 2, num_heads, block_size, dim), torch.nan, dtype=dtype)
    return torch.full((num_blocks, 2, dim, block_size, num_heads), torch.nan, dtype=dtype).permute(0, 1, 4, 3, 2)


@pytest.mark.parametrize("values", pairwise(GRID), ids=case_id)
def test_written_where_the_slots_say_and_nowhere_else(values, device):
    generator = torch.Generator().manual_seed(0)
    num_heads, head_dim, block_size = values["num_heads"], values["head_dim"], values["block_size"]
    dims = (head_dim, head_dim // 2 if values["own_v_size"] else head_dim)
    # By head and then by token in memory, as modeling code leaves them after its transpositions.
    by_head = [torch.randn(num_heads, len(SLOTS), dim, generator=generator).to(values["dtype"]) for dim in dims]
    key, value = (tensor.transpose(0, 1).to(device) for tensor in by_head)
    shape = (64 // block_size + 1, num_heads, block_size)
    arenas = [arena_of(*shape, dim, values["kv_dtype"], values["layout"]).to(device) for dim in dims]
    expected = [arena[:, 1].clone() for arena in arenas]
    slots = torch.tensor(SLOTS, dtype=values["slots_dtype"], device=device)
    reference.kv_write(key, value, *expected, slots)
    kv_write(key, value, *(arena[:, 1] for arena in arenas), slots)
    for arena, right in zip(arenas, expected, strict=True):
        torch.testing.assert_close(arena[:, 1], right, equal_nan=True, rtol=0, atol=0)
        assert arena[:, 0].isnan().all(), "the neighbouring layer was written"


def test_every_bit_of_a_value_is_kept(device):
    """Infinities, NaN, negative zero and subnormals of bf16 travel as they are."""
    words = torch.tensor([0x7F80, 0xFF80, 0x7FC1, 0x8000, 0x0001, 0x3F81, 0x7F7F, 0x0080], dtype=torch.int32)
    new = words.to(torch.int16).view(torch.bfloat16).repeat(2)[None, None].to(device)
    caches = [torch.zeros(2, 1, 8, 16, dtype=torch.bfloat16, device=device) for _ in "kv"]
    kv_write(new, new, *caches, torch.tensor([9], device=device))
    for cache in caches:
        assert torch.equal(cache[1, 0, 1].view(torch.int16), new[0, 0].view(torch.int16))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"value": torch.zeros(2, 2, 16)}, ValueError, "agree in tokens and heads"),
        ({"slots": torch.zeros(4, dtype=torch.int64)}, ValueError, "one entry for each of 3"),
        ({"v_cache": torch.zeros(4, 2, 8, 24)}, ValueError, "v_cache"),
        (
            {"k_cache": torch.zeros(4, 2, 8, 16, dtype=torch.int8)},
            TypeError,
            "k_cache of torch.int8: .* kv_write_quant",
        ),
        ({"value": torch.zeros(3, 2, 16, dtype=torch.int8)}, TypeError, "values of torch.int8 for v_cache"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(change, error, message):
    new, cache = torch.zeros(3, 2, 16), torch.zeros(4, 2, 8, 16)
    arguments = {
        "key": new,
        "value": new,
        "k_cache": cache,
        "v_cache": cache,
        "slots": torch.zeros(3, dtype=torch.int64),
    }
    with pytest.raises(error, match=message):
        kv_write(**(arguments | change))


@pytest.mark.parametrize("layout", GRID["layout"])
@pytest.mark.parametrize("kv_dtype", [torch.int8, torch.float8_e4m3fn])
def test_codes_and_scales_are_written_where_the_slots_say_and_nowhere_else(kv_dtype, layout, device):
    generator = torch.Generator().manual_seed(0)
    dims, num_heads, block_size = (40, 24), 3, 12
    new = [torch.randn(num_heads, len(SLOTS), dim, generator=generator).transpose(0, 1).to(device) for dim in dims]
    new[0][2, 1], new[1][4, 0, 3] = 0, torch.nan  # a head of zeros, a broken one
    arenas = [arena_of(6, num_heads, block_size, dim, torch.float32, layout) for dim in dims]
    codes = [torch.full_like(arena, 7).to(kv_dtype).to(device) for arena in arenas]
    scales = [torch.full((6, num_heads, block_size), -1.0, device=device) for _ in dims]
    slots = torch.tensor(SLOTS, device=device)
    expected = []
    for arena, scale, part in zip(codes, scales, new, strict=True):
        right = arena[:, 1].float(), scale.clone()
        written, factors = quantize(part, kv_dtype)
        write_slots(right[0], written.float(), slots)
        write_slots(right[1], factors, slots)
        expected.append(right)
    kv_write_quantized(*new, *(each[:, 1] for each in codes), *scales, slots)
    for arena, scale, (right, factors) in zip(codes, scales, expected, strict=True):
        torch.testing.assert_close(scale, factors, equal_nan=True, rtol=1e-6, atol=0)
        sound = ~factors.isnan()
        assert sound.sum() >= factors.numel() - 1
        assert torch.equal(arena[:, 1].float()[sound], right[sound])
        assert (arena[:, 0].float() == 7).all(), "the neighbouring layer was written"


def test_a_quantized_write_asks_for_its_scales():
    new, cache = torch.zeros(3, 2, 16), torch.zeros(4, 2, 8, 16, dtype=torch.int8)
    scale, slots = torch.zeros(4, 2, 8), torch.zeros(3, dtype=torch.int64)
    with pytest.raises(ValueError, match="k_scale: scales must be float32 of shape"):
        kv_write_quantized(new, new, cache, cache, scale[:3], scale, slots)
    with pytest.raises(TypeError, match=r"k_cache of torch\.float32"):
        kv_write_quantized(new, new, cache.float(), cache, scale, scale, slots)
    with pytest.raises(TypeError, match="both int8 or both float8_e4m3fn"):
        kv_write_quantized(new, new, cache, cache.to(torch.float8_e4m3fn), scale, scale, slots)
