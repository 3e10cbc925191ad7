"""What the Triton back end alone does; that it is right, `test_attention_backends` shows."""

import numpy as np
import pytest

from executor import attention_triton
from executor.arena import KvGeometry, LayerGeometry, private_arena
from executor.attention import LayerAttention
from executor.attention_triton import TritonAttention
from octavo.errors import Code, OctavoError
from tests.attention_cases import BLOCK, attend, check, make_rows


def run(shapes: list[tuple[int, int]], heads: tuple[int, int] = (4, 2), head_dim: int = 16) -> None:
    rows = make_rows(shapes, heads, (head_dim, head_dim))
    arena = private_arena(KvGeometry(BLOCK, "float32", (LayerGeometry(heads[1], head_dim, head_dim),)), 100)
    layer = LayerAttention(0, scale=0.25)
    attend(TritonAttention("triton-interpret"), rows, arena, layer, np.random.default_rng(0))


@pytest.mark.parametrize(
    ("heads", "head_dim", "reason"),
    [((1, 1), 300, "head sizes 300 and 300; at most 256"), ((130, 1), 16, "130 query heads per KV head; at most 128")],
)
def test_layers_that_no_kernel_takes_are_refused_with_the_remedy(heads, head_dim, reason):
    with pytest.raises(OctavoError) as caught:
        run([(3, 1)], heads, head_dim)
    assert caught.value.code is Code.FAILED_PRECONDITION
    assert caught.value.message == f"the Triton kernels do not take attention layer 0: {reason}; use attention=torch"


def test_kernels_learn_the_bounds_of_the_batch_and_no_more(monkeypatch):
    """Plans hang on them: a bound too low loses keys, one too high splits for nothing."""
    seen = {}
    real = attention_triton.paged_attention

    def watched(out, **arguments):
        seen.update(arguments)
        return real(out, **arguments)

    monkeypatch.setattr(attention_triton, "paged_attention", watched)
    run([(9, 1), (14, 6), (5, 5)])
    assert (seen["max_query_len"], seen["max_kv_len"]) == (6, 14)


def test_fp8_kv_is_attended_as_it_is_stored():
    check(TritonAttention("triton-interpret"), [(9, 1), (14, 6), (5, 5)], dims=(24, 40), dtype="float8_e4m3fn")
