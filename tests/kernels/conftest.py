"""Kernel tests run in Triton's interpreter, unless TRITON_INTERPRET=0 asks for the GPU of this machine.

The switch is read when Triton is imported, so it is set here, before any test module imports a kernel.
"""

import os
import sys

import pytest
import torch

os.environ.setdefault("TRITON_INTERPRET", "1")
if "triton" in sys.modules and os.environ["TRITON_INTERPRET"] == "1":
    from triton.language import standard
    from triton.runtime.jit import JITFunction

    if isinstance(standard.sum, JITFunction):
        raise RuntimeError(
            "Triton was imported before TRITON_INTERPRET was set, so its kernels cannot be interpreted any more: run "
            "with TRITON_INTERPRET=1 in the environment, or run tests/kernels on its own"
        )

from kernels.interpreter import speed_up_interpreter
from kernels.numeric import INTERPRETED


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)
    if INTERPRETED:
        speed_up_interpreter()


@pytest.fixture(scope="session")
def device() -> str:
    if not INTERPRETED and not torch.cuda.is_available():
        pytest.fail("TRITON_INTERPRET=0 asks for a GPU and there is none")
    return "cpu" if INTERPRETED else "cuda"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """numpy warns where IEEE arithmetic is meant: exp that overflows, NaN that is to be seen."""
    quiet = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")
    for item in items:
        if item.path.is_relative_to(os.path.dirname(__file__)):
            item.add_marker(quiet)
