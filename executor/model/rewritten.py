"""A model whose layers run as one call of C++ per step: the step handed over.

    fused    norm and quantize; norm of heads, rotary and KV write; residual sums at the end of products
    head     only the rows that sample or are scored

Not here: which models are of the form (`decoder_parts`), whether one is rewritten (`rewrite`), its weights (`packing`).
"""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from executor.attention import KvViews, LayerAttention
from executor.attention_cpu import CpuStep, attention_layer
from executor.batch import Batch
from executor.model.packing import PackedDecoder
from kernels.cpu import library as c

_FIRST_POSITIONS = 1024  # rows of the rotary tables; they double when a longer sequence comes


class RewrittenDecoder:
    """Packed weights, and the call. Holds no state of sequences; for one thread at a time."""

    def __init__(self, library: ctypes.CDLL, packed: PackedDecoder, attention: Sequence[LayerAttention]) -> None:
        """attention: of each layer, in model order."""
        self.packed = packed
        self._library = library
        self._attention = tuple(attention)
        self._num_heads = [int(layer.num_heads) for layer in packed.layers]
        self._tables: list[tuple[Tensor, Tensor]] = []
        panel = library.octavo_panel()
        self._logits_stride = -(-packed.vocabulary_size // panel) * panel
        self._views: tuple[KvViews, ...] | None = None
        self._layers_of_views = (c.AttentionLayer * 0)()

    @property
    def weights_format(self) -> str:
        """See `PackedDecoder`."""
        return self.packed.weights_format

    @property
    def all_blocks(self) -> bool:
        """See `PackedDecoder`."""
        return self.packed.all_blocks

    def forward(self, batch: Batch, step: CpuStep, logits_tokens: Tensor) -> Tensor:
        """Logits of some tokens of the batch, [num_logits, vocabulary_size] float32; writes the batch's KV.

        Raises:
            MemoryError: nothing was written.
        """
        num_logits = len(logits_tokens)
        logits = torch.empty((num_logits, self._logits_stride), dtype=torch.float32)
        rotary = self._rotary_tables(int(batch.positions.max()) + 1)
        request = c.Step(
            rows=step.rows,
            attention=self._attention_layers(step.views),
            rotary=rotary,
            input_ids=batch.input_ids.data_ptr(),
            positions=batch.positions.data_ptr(),
            logits_tokens=logits_tokens.data_ptr(),
            num_logits=num_logits,
            logits=logits.data_ptr(),
            logits_stride=self._logits_stride,
        )
        decoder, threads = self.packed.decoder, torch.get_num_threads()
        if self._library.octavo_decode(ctypes.byref(decoder), ctypes.byref(request), threads):
            raise MemoryError(f"no memory for a step of {batch.num_tokens} tokens")
        return logits[:, : self.packed.vocabulary_size]

    # ------------------------------------------------------------------------------------------------------- of a step

    def _attention_layers(self, views: tuple[KvViews, ...]) -> "ctypes.Array[c.AttentionLayer]":
        if self._views is not views:
            layers = zip(self._attention, views, self._num_heads, strict=True)
            self._layers_of_views = (c.AttentionLayer * len(views))(*(attention_layer(*layer) for layer in layers))
            self._views = views
        return self._layers_of_views

    def _rotary_tables(self, num_positions: int) -> "ctypes.Array[c.RotaryTable]":
        if not self._tables or len(self._tables[0][0]) < num_positions:
            size = max(_FIRST_POSITIONS, 1 << (num_positions - 1).bit_length())
            self._tables = [rotary(torch.arange(size)) for rotary in self.packed.rotaries]
        return (c.RotaryTable * len(self._tables))(
            *(c.RotaryTable(cos.data_ptr(), sin.data_ptr(), cos.shape[1]) for cos, sin in self._tables)
        )
