"""The runner of a GPU without one: its code on a CPU, kernels interpreted, graphs replaced by what they replay."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from executor.arena import Arena
from executor.attention_torch import TorchAttention
from executor.attention_triton import TritonAttention
from executor.cuda.graphs import captured_sizes
from executor.cuda.pending import DeviceClock
from executor.cuda.place import check_device
from executor.cuda.runner import CudaRunner
from executor.cuda.transfer import Download
from executor.model.forward import CausalModel
from executor.model.loader import load_model
from executor.runner import NOTHING, Runner
from executor.step import LOGITS_NOT_FINITE, StepFailed, StepGap, StepResult, TableExtension
from octavo.errors import OctavoError
from octavo.model_source import resolve_model
from tests.executor_cases import ints, process, row, step
from tests.runner_cases import CONTEXT, SAMPLINGS, assert_same, make_arena, process_ahead, serve, session_of
from tests.tiny_models import save_tiny_llama


@dataclass
class Recorded:
    """A capture that is no graph: it keeps the work, and replays by doing it."""

    num_replays: int = 0
    fails: bool = False

    def __call__(self, work: Callable[[], None]) -> Callable[[], None]:
        if self.fails:
            raise RuntimeError("operation not permitted when stream is capturing")
        work()

        def replay() -> None:
            self.num_replays += 1
            work()

        return replay


class LateDownload(Download):
    """Copies that have not come before somebody waits for them."""

    events: ClassVar[list[str]] = []

    def __init__(self, tensors: Sequence[Tensor], device: torch.device) -> None:
        super().__init__([each.clone() for each in tensors], device)
        self._has_come = False
        self.events.append("launched")

    @property
    def is_done(self) -> bool:
        return self._has_come

    def wait(self) -> list[Tensor]:
        if not self._has_come:
            self.events.append("waited")
        self._has_come = True
        return super().wait()


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> CausalModel:
    folder = save_tiny_llama(tmp_path_factory.mktemp("model"), num_hidden_layers=1)
    return load_model(resolve_model(str(folder)), "float32")


def cuda_runner(model: CausalModel, arena: Arena, capture: Recorded, max_rows: int = 6) -> CudaRunner:
    runner = CudaRunner(model, arena, TritonAttention("triton-interpret"), download=LateDownload)
    runner.capture_graphs(max_rows, CONTEXT, capture)
    return runner


def test_a_step_is_the_plain_runners_step(model):
    """Prompts kernel by kernel, decodes by replay with padding rows, all kinds of sampling: the same tokens."""
    capture, arena = Recorded(), make_arena(model)
    expected = serve(session_of(Runner(model, make_arena(model), TorchAttention())))
    found = serve(session_of(cuda_runner(model, arena, capture)))
    assert capture.num_replays == 2
    assert_same(found, expected)
    # Padding rows touch the first place of block 0 and no other.
    for view in arena.views:
        written = ~view.k.isnan().all(dim=-1).all(dim=1)  # [num_blocks, block_size]
        assert written[0].tolist() == [True, False, False, False]
        assert not written[21:].any(), "blocks of nobody"


AHEAD = [
    step(1, [(0, 0, 4)], started_rows=(row(0, [7, 8, 9, 10], [1, 2]),)),
    # A decode whose token only the device knows, beside a prompt: kernel by kernel.
    step(2, [(1, 0, 3), (0, 4, 1)], started_rows=(row(1, [11, 12, 13], [5], sampling=SAMPLINGS[1]),)),
    step(3, [(1, 3, 1), (0, 5, 1)], extensions=(TableExtension(0, ints(1), ints(1), ints(6)),)),  # by a graph
]


def test_tokens_stay_on_the_device_between_steps(model):
    """The next step is launched before a token of the one before was read, and feeds on it all the same."""
    expected = process_ahead(session_of(Runner(model, make_arena(model), TorchAttention())), AHEAD)
    capture, LateDownload.events = Recorded(), []
    runner = cuda_runner(model, make_arena(model), capture, max_rows=2)
    assert_same(process_ahead(session_of(runner), AHEAD), expected)
    assert capture.num_replays == 1
    # Two are under way at most: the third is launched when the first was read, and before the second is.
    assert LateDownload.events == ["launched", "launched", "waited", "launched", "waited", "waited"]


def test_graphs_read_and_write_the_scales_of_int8_blocks(model):
    arenas = [make_arena(model, dtype="int8") for _ in range(2)]
    expected = process_ahead(session_of(Runner(model, arenas[0], TorchAttention())), AHEAD)
    capture = Recorded()
    assert_same(process_ahead(session_of(cuda_runner(model, arenas[1], capture, max_rows=2)), AHEAD), expected)
    assert capture.num_replays == 1
    for plain, view in zip(*(arena.views for arena in arenas), strict=True):
        found, right = (each.v_scale[[1, 2, 5, 6]] for each in (view, plain))
        torch.testing.assert_close(found, right, equal_nan=True, rtol=1e-4, atol=0)
        assert not right.isnan().all()


def test_an_error_of_the_device_is_that_of_the_step_it_was_launched_for(model, monkeypatch):
    class Broken(LateDownload):
        def wait(self) -> list[Tensor]:
            raise RuntimeError("CUDA error: unspecified launch failure")

    runner = CudaRunner(model, make_arena(model), TritonAttention("triton-interpret"), download=Broken)
    session = session_of(runner)
    first, second = (session.begin(each) for each in (step(1), step(2)))
    assert session.finish(first) == StepFailed(1, "MODEL_ERROR", "RuntimeError: CUDA error: unspecified launch failure")
    assert session.finish(second) == StepGap(0)


def test_steps_are_timed_one_behind_the_other():
    """The second was given to the device at 1 s and began when the first was done, at 5 s."""
    clock = DeviceClock(lambda: 0.0, lambda: 0.0)
    first = clock.timed(NOTHING, (0.0, 1000.0), 5.0)
    second = clock.timed(NOTHING, (1.0, 1001.0), 7.5)
    assert (first.execute_microseconds, second.execute_microseconds) == (5_000_000, 2_500_000)
    assert second.began_unix_microseconds == 1_005_000_000


def test_graphs_are_captured_from_the_largest_down(model, monkeypatch):
    sizes = []
    forward = CausalModel.forward_tokens

    def seen(self, ids, *rest):
        sizes.append(len(ids))
        return forward(self, ids, *rest)

    monkeypatch.setattr(CausalModel, "forward_tokens", seen)
    cuda_runner(model, make_arena(model), Recorded())
    assert sizes == [6, 4, 2, 1]


@pytest.mark.parametrize(
    ("max_rows", "sizes"),
    [(0, []), (1, [1]), (5, [1, 2, 4, 5]), (20, [1, 2, 4, 8, 16, 20]), (130, [1, 2, 4, *range(8, 129, 8), 130])],
)
def test_captured_sizes(max_rows, sizes):
    assert captured_sizes(max_rows) == sizes
    assert len(captured_sizes(256)) == 23


def test_a_model_that_cannot_be_captured_runs_without(model, caplog):
    capture = Recorded(fails=True)
    found = serve(session_of(cuda_runner(model, make_arena(model), capture)), num_decodes=1)
    assert "cannot be captured" in caplog.text
    assert len(found) == 2


def test_a_row_whose_logits_are_not_finite_fails_alone(model):
    """Field failure 20: NaN of one row must not become another row's token."""
    arena = make_arena(model)
    session = session_of(cuda_runner(model, arena, Recorded()))
    rows = (row(0, [5, 6, 7], [1], computed=2), row(1, [5, 6, 7], [2]))
    arena.views[0].k[1, :, :2], arena.views[0].v[1, :, :2] = torch.nan, torch.nan
    result = process(session, step(1, [(0, 2, 1), (1, 0, 3)], started_rows=rows))
    assert isinstance(result, StepResult)
    assert [(failure.row, failure.reason) for failure in result.failures] == [(0, LOGITS_NOT_FINITE)]
    assert result.num_sampled.tolist() == [0, 1]


def test_no_step_runs_on_memory_that_is_lost(model, monkeypatch):
    arena, told = make_arena(model), []
    runner = CudaRunner(model, arena, TritonAttention("triton-interpret"), told.append)
    monkeypatch.setattr(arena, "lost_reason", lambda: "its maker has ended")
    outcome = process(session_of(runner), step(1, [(0, 0, 2)], started_rows=(row(0, [5, 6], [1]),)))
    assert outcome == StepFailed(1, "MODEL_ERROR", "its maker has ended")
    assert told == ["its maker has ended"]


def test_a_device_that_torch_does_not_see_is_refused_with_the_choice():
    check_device("cpu")
    with pytest.raises(OctavoError, match=r"sees \d+ CUDA devices; choose one of them, .* or use --device cpu"):
        check_device("cuda:99")
