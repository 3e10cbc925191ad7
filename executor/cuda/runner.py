"""One step on a GPU: decodes of many rows by a graph, anything else kernel by kernel; samples come back pinned.

The only order that counts is that of the device's stream: the host prepares, launches, and waits once, for the samples.
It runs, slowly, on a CPU too, with Triton's interpreter and without graphs: there it is tested. Not here: sessions.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from executor.arena import Arena
from executor.attention_triton import TritonAttention
from executor.batch import Batch
from executor.cuda.capture import CudaCapture
from executor.cuda.graphs import Capture, DecodeGraphs
from executor.cuda.sampling import start_sampling
from executor.cuda.transfer import uploader
from executor.logits.score import token_logprobs
from executor.model.forward import CausalModel
from executor.runner import NOTHING, Runner
from executor.step import MODEL_ERROR, Ints, StepError, StepOutput

log = logging.getLogger(__name__)


class CudaRunner(Runner):
    """A model and an arena on one device."""

    def __init__(
        self,
        model: CausalModel,
        arena: Arena,
        attention: TritonAttention,
        on_fatal: Callable[[str], object] = lambda why: None,
    ) -> None:
        """on_fatal: told, from the thread of the steps, why no step can run any more."""
        super().__init__(model, arena, attention)
        self._causal = model
        self._device = arena.blocks.device
        self._upload = uploader(self._device)
        self._graphs: DecodeGraphs | None = None
        self._on_fatal = on_fatal

    def capture_graphs(
        self,
        max_rows: int,
        max_context_tokens: int,
        capture: Capture | None = None,
        sizes: list[int] | None = None,
    ) -> None:
        """Capture decode steps. A model that cannot be captured runs without, which is said. Takes seconds.

        Args:
            max_rows: of the largest graph; 0: none.
            max_context_tokens: the longest sequence that will ever run.
            capture: None: CUDA's.
            sizes: numbers of rows that get a graph, ascending; None: many.
        """
        if not max_rows:
            return
        with self._on_device(), torch.inference_mode():
            graphs = DecodeGraphs(self._causal, self._arena.views, self._upload, max_rows, max_context_tokens)
            try:
                graphs.capture(capture or CudaCapture(), sizes)
            except (RuntimeError, ValueError) as error:
                log.warning("this model's decode steps cannot be captured as CUDA graphs and run without: %s", error)
                return
        self._graphs = graphs

    def run(self, copy_sources: Ints, copy_targets: Ints, batch: Batch | None) -> StepOutput:
        """See `Runner.run`."""
        lost = self._arena.lost_reason()
        if lost is not None:
            self._on_fatal(lost)
            raise StepError(MODEL_ERROR, lost)
        with self._on_device():
            try:
                return super().run(copy_sources, copy_targets, batch)
            except StepError:
                self._check_device()
                raise

    def _compute(self, batch: Batch) -> StepOutput:
        logits = self._logits(batch)
        num_sampling = len(batch.logits_tokens)
        pending = start_sampling(logits[:num_sampling], batch, self._upload) if num_sampling else None
        scores = batch.prompt_scores
        prompt = logits[num_sampling:].cpu() if scores is not None else None
        output = pending.wait() if pending is not None else NOTHING
        if pending is None and self._device.type == "cuda":
            torch.cuda.current_stream().synchronize()  # an error of this step is this step's, also in mid-prefill
        if scores is None or prompt is None:
            return output
        return replace(output, prompt_logprobs=token_logprobs(prompt, scores.rows, scores.token_ids, scores.num_top))

    def _logits(self, batch: Batch) -> Tensor:
        """Of the sampling rows, then of the scored tokens: [num_logits, vocabulary_size] float32."""
        if self._graphs is None or not self._graphs.takes(batch):
            return self._model.forward(batch, self._attention.prepare(batch.attention, self._arena.views))
        logits = self._graphs.run(batch)
        wanted = batch.logits_tokens
        if batch.prompt_scores is not None:
            wanted = torch.cat((wanted, batch.prompt_scores.logits_tokens))
        if len(wanted) == len(logits) and bool((wanted == torch.arange(len(wanted))).all()):
            return logits
        return logits[self._upload(wanted)]

    def _check_device(self) -> None:
        """After some errors (a bad address, say) a process can use its device no more."""
        if self._device.type != "cuda":
            return
        try:
            torch.cuda.synchronize()
        except RuntimeError as error:
            self._on_fatal(f"the device is lost to this process: {error}")

    @contextmanager
    def _on_device(self) -> Iterator[None]:
        """The thread's current device, by which kernels are launched."""
        if self._device.type != "cuda":
            yield
            return
        with torch.cuda.device(self._device):
            yield
