"""KV writes without rotary embedding against their reference, into poisoned arenas."""

import pytest
import torch

from kernels.kv_write import kv_write
from kernels.reference import kv_write as reference
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
        ({"k_cache": torch.zeros(4, 2, 8, 16, dtype=torch.int8)}, TypeError, "k_cache of torch.int8"),
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
