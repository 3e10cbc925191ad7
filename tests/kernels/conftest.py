"""Kernel tests run in Triton's interpreter, unless TRITON_INTERPRET=0 asks for the GPU of this machine.

`tests/conftest.py` sets the switch before anything imports Triton; kernels refuse to be imported where it came late.
"""

import pytest
import torch

from kernels.interpreter import prepare_interpreter
from kernels.numeric import INTERPRETED


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)
    if INTERPRETED:
        prepare_interpreter()


@pytest.fixture(scope="session")
def device() -> str:
    if not INTERPRETED and not torch.cuda.is_available():
        pytest.fail("TRITON_INTERPRET=0 asks for a GPU and there is none")
    return "cpu" if INTERPRETED else "cuda"
