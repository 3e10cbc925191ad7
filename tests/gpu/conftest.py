"""Tests that need a GPU. Elsewhere they are skipped, and say so; under `make gpu-check` they fail there."""

import os

import pytest
import torch

IS_CHECK = os.environ.get("GPU_CHECK") == "1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") == "0":
        return
    skip = pytest.mark.skip(reason="needs a GPU and TRITON_INTERPRET=0; `make gpu-check` runs it")
    for item in items:
        if "tests/gpu/" in item.path.as_posix() and not IS_CHECK:
            item.add_marker(skip)


@pytest.fixture(scope="session", autouse=True)
def _a_device_is_there() -> None:
    """Skipped tests never come here."""
    assert torch.cuda.is_available(), "there is no GPU"
    assert os.environ.get("TRITON_INTERPRET") == "0", "these tests are not for the interpreter"


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda", 0)
