"""The executor's runner on a device: graphs and kernels against the plain runner on a CPU."""

import subprocess
import sys
import warnings

import pytest
import torch

from executor.attention_torch import TorchAttention
from executor.attention_triton import TritonAttention
from executor.cuda.runner import CudaRunner
from executor.model.loader import load_model
from executor.runner import Runner
from executor.step import StepResult
from octavo.model_source import resolve_model
from tests.executor_cases import step
from tests.runner_cases import CONTEXT, assert_same, make_arena, serve, session_of
from tests.tiny_models import save_tiny_gemma2, save_tiny_gemma3, save_tiny_llama

MODELS = {"llama": save_tiny_llama, "gemma2": save_tiny_gemma2, "gemma3": save_tiny_gemma3}


@pytest.mark.parametrize("graph_rows", [0, 6])
@pytest.mark.parametrize("kind", MODELS)
def test_a_step_is_the_plain_runners_step(kind, graph_rows, tmp_path, device, caplog):
    source = resolve_model(str(MODELS[kind](tmp_path)))
    plain = load_model(source, "float32")
    expected = serve(session_of(Runner(plain, make_arena(plain), TorchAttention())), num_decodes=6)
    model = load_model(source, "float32")
    model.module.to(device)
    runner = CudaRunner(model, make_arena(model, device), TritonAttention("triton"))
    runner.capture_graphs(graph_rows, CONTEXT)
    assert "cannot be captured" not in caplog.text
    assert_same(serve(session_of(runner), num_decodes=6), expected)


def test_a_captured_step_gives_the_bits_of_the_step_that_was_captured(tmp_path, device):
    """Replays of one graph on the same rows, in the same and in another order of steps."""
    model = load_model(resolve_model(str(save_tiny_llama(tmp_path))), "float32")
    model.module.to(device)
    runner = CudaRunner(model, make_arena(model, device), TritonAttention("triton"))
    runner.capture_graphs(6, CONTEXT)
    first, second = (serve(session_of(runner), num_decodes=6) for _ in "12")
    assert [each.token_ids.tolist() for each in first] == [each.token_ids.tolist() for each in second]


def test_an_error_of_the_device_is_told_as_fatal(tmp_path, device):
    """A process of its own: after a bad address the context is of no use to anybody."""
    code = (
        "import torch\n"
        "from executor.cuda.runner import CudaRunner\n"
        "from executor.attention_triton import TritonAttention\n"
        "from tests.executor_cases import NoArena\n"
        "arena = NoArena(); arena.blocks = torch.zeros(1, device='cuda'); arena.lost_reason = lambda: None\n"
        "told = []\n"
        "runner = CudaRunner(None, arena, TritonAttention('triton'), told.append)\n"
        "bad = torch.tensor([10 ** 9], device='cuda')\n"
        "torch.zeros(4, device='cuda')[bad]\n"
        "runner._check_device()\n"
        "print(told)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert "the device is lost to this process" in done.stdout, done.stderr


def test_a_decode_begins_without_waiting_for_the_device(tmp_path, device):
    """Uploads, sampling and downloads are asynchronous, and the tokens of the step before stay where they are."""
    model = load_model(resolve_model(str(save_tiny_llama(tmp_path))), "float32")
    model.module.to(device)
    runner = CudaRunner(model, make_arena(model, device), TritonAttention("triton"))
    runner.capture_graphs(6, CONTEXT)
    session = session_of(runner)
    serve(session)  # compiled and allocated
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            begun = [session.begin(step(4 + number, [(0, 7 + number, 1), (4, 5 + number, 1)])) for number in range(2)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not warned, [str(each.message) for each in warned]
    for each in begun:
        assert isinstance(each, StepResult) or isinstance(session.finish(each), StepResult)
