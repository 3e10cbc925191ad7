"""One step on a GPU: decodes of many rows by a graph, anything else kernel by kernel; samples come back pinned.

The only order that counts is that of the device's stream: the host prepares and launches, also the next step before
this one's samples are there, whose tokens that one reads on the device. It runs, slowly, on a CPU too, with Triton's
interpreter and without graphs: there it is tested. Not here: sessions, what is waited for (pending).
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from executor.arena import Arena
from executor.attention_triton import TritonAttention
from executor.batch import Batch
from executor.cuda.capture import CudaCapture
from executor.cuda.graphs import Capture, DecodeGraphs
from executor.cuda.pending import DeviceClock, DeviceOutput
from executor.cuda.sampling import start_sampling
from executor.cuda.transfer import Download, uploader
from executor.logits.score import token_logprobs
from executor.model.forward import CausalModel
from executor.pending import PendingOutput
from executor.runner import Runner, step_errors
from executor.step import MODEL_ERROR, Ints, StepError, TokenLogprobs

log = logging.getLogger(__name__)


class CudaRunner(Runner):
    """A model and an arena on one device."""

    def __init__(
        self,
        model: CausalModel,
        arena: Arena,
        attention: TritonAttention,
        on_fatal: Callable[[str], object] = lambda why: None,
        download: Callable[[Sequence[Tensor], torch.device], Download] = Download,
    ) -> None:
        """What it is given besides:

        Args:
            on_fatal: told, from the thread of the steps, why no step can run any more.
            download: starts the copies to the host.
        """
        super().__init__(model, arena, attention)
        self._causal = model
        self._device = arena.blocks.device
        self._upload = uploader(self._device)
        self._graphs: DecodeGraphs | None = None
        self._on_fatal = on_fatal
        self._download = download
        self._timing = DeviceClock(self._clock, self._wall_clock)

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

    def begin(
        self, copy_sources: Ints, copy_targets: Ints, batch: Batch | None, before: PendingOutput | None = None
    ) -> PendingOutput:
        """See `StepRunner`. Everything is launched, and nothing waited for, but for scores of prompts."""
        lost = self._arena.lost_reason()
        if lost is not None:
            self._on_fatal(lost)
            raise StepError(MODEL_ERROR, lost)
        given = self._timing.now()
        with self._guarded(), torch.inference_mode():
            self._copy(copy_sources, copy_targets)
            samples, prompt = self._launch(batch, before) if batch is not None else ([], None)
            download = self._download(samples, self._device)
        token_ids = samples[0] if samples else None
        return DeviceOutput(token_ids, download, batch, prompt, self._timing, given, self._guarded)

    def _launch(self, batch: Batch, before: PendingOutput | None) -> tuple[list[Tensor], TokenLogprobs | None]:
        """What `start_sampling` gives, or nothing, and the scores of prompts."""
        logits = self._logits(batch, self._fed(batch, before))
        num_sampling, scores = len(batch.logits_tokens), batch.prompt_scores
        samples = start_sampling(logits[:num_sampling], batch, self._upload) if num_sampling else []
        if scores is None:
            return samples, None
        # Waited for: logits of a whole prompt are more than pinned memory should be kept for.
        return samples, token_logprobs(logits[num_sampling:].cpu(), scores.rows, scores.token_ids, scores.num_top)

    def _fed(self, batch: Batch, before: PendingOutput | None) -> tuple[Tensor, Tensor] | None:
        """Indices of input tokens that the step before draws, and these tokens, both on the device."""
        if batch.fed is None:
            return None
        if not isinstance(before, DeviceOutput) or before.token_ids is None:
            raise RuntimeError("a step goes on with tokens of a step that draws none")
        return self._upload(batch.fed.tokens), before.token_ids[self._upload(batch.fed.draws)]

    def _logits(self, batch: Batch, fed: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """Of the sampling rows, then of the scored tokens: [num_logits, vocabulary_size] float32."""
        if self._graphs is None or not self._graphs.takes(batch):
            ids = self._upload(batch.input_ids)
            on_device = replace(
                batch,
                input_ids=ids if fed is None else ids.index_copy(0, *fed),
                positions=self._upload(batch.positions),
            )
            return self._model.forward(on_device, self._attention.prepare(batch.attention, self._arena.views))
        logits = self._graphs.run(batch, fed)
        wanted = batch.all_logits_tokens
        if len(wanted) == len(logits) and bool((wanted == torch.arange(len(wanted))).all()):
            return logits
        return logits[self._upload(wanted)]

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """On the device, and with its errors as StepError; told where none of them is the last."""
        with self._on_device():
            try:
                with step_errors():
                    yield
            except StepError:
                self._check_device()
                raise

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
