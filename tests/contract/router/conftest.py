"""The byte tokenizer, saved once."""

import pytest

from tests.fakes import save_byte_tokenizer


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What a scripted executor reports as the source of its model."""
    return str(save_byte_tokenizer(tmp_path_factory.mktemp("tokenizer")))
