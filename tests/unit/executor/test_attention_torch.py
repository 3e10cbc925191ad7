"""What the torch back end alone does; that it is right, `test_attention_backends` shows."""

import pytest

from executor import attention_torch
from executor.attention_torch import TorchAttention
from tests.attention_cases import check


def test_rows_longer_than_a_piece():
    """Field failure 16: chunks of more than 128 tokens beside decodes."""
    check(TorchAttention(), [(300, 290), (257, 129), (9, 1)])


def test_pieces_longer_than_one_are_cut():
    """The cut of a long chunk changes nothing: pieces of 3 queries."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention_torch, "_MAX_PIECE_TOKENS", 3)
        check(TorchAttention(), [(20, 20), (17, 10), (9, 1)])
        check(TorchAttention(), [(20, 20), (17, 10), (9, 1)], window=5)
