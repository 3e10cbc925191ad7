"""A real tokenizer of 256 byte tokens."""

import pytest

from router.text.tokenizer import Tokenizer, load_tokenizer
from tests.fakes import VOCABULARY_SIZE, save_byte_tokenizer


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Loaded from a folder as the router does it."""
    return load_tokenizer(str(save_byte_tokenizer(tmp_path_factory.mktemp("tokenizer"))), VOCABULARY_SIZE)
