"""Decode steps as CUDA graphs: a step of n rows replays the graph of the next captured size, with padding rows.

    rows 5, captured sizes 1 2 4 8 ...     -> graph of 8:  r0 r1 r2 r3 r4 | p p p

A launch of a small kernel costs a processor more than the kernel takes, and a decode step has hundreds; a graph has
one. Everything that changes from step to step lies in memory that was allocated once, and nothing of the launch depends
on it: sizes of grids follow from shapes, bounds of lengths are those of the longest context. A padding row is a token
at position 0 of block 0, which nobody reads; several write there at once, and nobody cares who wins.

Sizes are captured from the largest down in one pool of memory, so that smaller ones live in what the largest needed.
Not here: what a graph is on a device (capture), sampling.
"""

import bisect
import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from executor.attention import KvViews
from executor.attention_triton import DeviceRows, TritonStep
from executor.batch import Batch
from executor.cuda.transfer import Upload
from executor.model.forward import CausalModel

log = logging.getLogger(__name__)

Replay = Callable[[], None]
Capture = Callable[[Callable[[], None]], Replay]

_FINE_STEP = 8  # rows between two captured sizes from 8 on: at most 7 rows of padding
_COARSE_FROM, _COARSE_STEP = 128, 32


def captured_sizes(max_rows: int) -> list[int]:
    """Numbers of rows that get a graph, ascending; the last is `max_rows`."""
    sizes = {1, 2, 4, *range(_FINE_STEP, _COARSE_FROM, _FINE_STEP), *range(_COARSE_FROM, max_rows, _COARSE_STEP)}
    return sorted({size for size in sizes if size < max_rows} | ({max_rows} if max_rows else set()))


@dataclass(frozen=True, slots=True)
class _Memory:
    """What the graphs read and write; a graph of n rows uses the first n."""

    ids: Tensor  # [max_rows] int64
    positions: Tensor  # [max_rows] int64
    slots: Tensor  # [max_rows] int64
    kv_lens: Tensor  # [max_rows] int32
    tables: Tensor  # [max_rows, max_blocks] int32
    query_start: Tensor  # [max_rows + 1] int32, counts up: one token a row
    tokens: Tensor  # [max_rows] int64, counts up: each is wanted
    logits: Tensor  # [max_rows, vocabulary_size] float32


class DecodeGraphs:
    """The graphs of one model on one arena. Used by one thread."""

    def __init__(
        self,
        model: CausalModel,
        views: tuple[KvViews, ...],
        upload: Upload,
        max_rows: int,
        max_context_tokens: int,
    ) -> None:
        """upload: brings a step's numbers to the device."""
        self._model = model
        self._views = views
        self._upload = upload
        self._max_context_tokens = max_context_tokens
        self._block_size = views[0].k.shape[2]
        max_blocks = -(-max_context_tokens // self._block_size)
        self._memory = _allocate(views[0].k.device, max_rows, max_blocks, model.vocabulary_size)
        self._replays: dict[int, Replay] = {}
        self._sizes: list[int] = []

    def capture(self, capture: Capture, sizes: list[int] | None = None) -> None:
        """Make the graphs, the largest first. Raises what the model raises where it cannot be captured.

        Args:
            sizes: ascending; None: those of `captured_sizes`.
        """
        sizes = sizes or captured_sizes(len(self._memory.ids))
        for size in reversed(sizes):
            self._replays[size] = capture(self._step_of(size))
        self._sizes = sizes
        log.info("decode steps of up to %d rows run as CUDA graphs, of %d sizes", len(self._memory.ids), len(sizes))

    def takes(self, batch: Batch) -> bool:
        """Whether the batch is a decode of no more rows than there is a graph for."""
        num_rows = len(batch.attention.context_lengths)
        return bool(self._sizes) and batch.num_tokens == num_rows <= self._sizes[-1]

    def run(self, batch: Batch, fed: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """The logits of the batch's rows: [num_rows, vocabulary_size] float32, until the next run.

        Args:
            fed: on the device, both [num_fed] int64: rows whose input is none of the batch's, and what it is.
        """
        num_rows = batch.num_tokens
        size = self._sizes[bisect.bisect_left(self._sizes, num_rows)]
        self._fill(batch, num_rows, size)
        if fed is not None:
            self._memory.ids.index_copy_(0, *fed)
        self._replays[size]()
        return self._memory.logits[:num_rows]

    def _fill(self, batch: Batch, num_rows: int, size: int) -> None:
        memory, attention = self._memory, batch.attention
        slots = attention.write_blocks * self._block_size + attention.write_offsets
        numbers = torch.stack((batch.input_ids, batch.positions, slots, attention.context_lengths))
        on_device = self._upload(numbers)  # [4, num_rows], one copy
        for target, source in zip((memory.ids, memory.positions, memory.slots), on_device, strict=False):
            target[:num_rows] = source
            target[num_rows:size] = 0
        memory.kv_lens[:num_rows] = on_device[3]
        memory.kv_lens[num_rows:size] = 1
        memory.tables[:num_rows, : attention.tables.shape[1]] = self._upload(attention.tables)
        memory.tables[num_rows:size, 0] = 0

    def _step_of(self, size: int) -> Callable[[], None]:
        memory = self._memory
        rows = DeviceRows(
            query_start=memory.query_start[: size + 1],
            kv_lens=memory.kv_lens[:size],
            tables=memory.tables[:size],
            slots=memory.slots[:size],
            max_query_len=1,
            max_kv_len=self._max_context_tokens,
        )

        def step() -> None:
            # Copied out, so that a graph's own logits are free for the next size.
            attention = TritonStep(rows, self._views)
            inputs = (memory.ids[:size], memory.positions[:size], memory.tokens[:size])
            memory.logits[:size] = self._model.forward_tokens(*inputs, attention)

        return step


def _allocate(device: torch.device, max_rows: int, max_blocks: int, vocabulary_size: int) -> _Memory:
    numbers = torch.zeros(3, max_rows, dtype=torch.int64, device=device)
    return _Memory(
        ids=numbers[0],
        positions=numbers[1],
        slots=numbers[2],
        kv_lens=torch.ones(max_rows, dtype=torch.int32, device=device),
        tables=torch.zeros(max_rows, max_blocks, dtype=torch.int32, device=device),
        query_start=torch.arange(max_rows + 1, dtype=torch.int32, device=device),
        tokens=torch.arange(max_rows, device=device),
        logits=torch.empty(max_rows, vocabulary_size, dtype=torch.float32, device=device),
    )
