"""A model whose layers run as one call of C++ per step: weights merged and packed, and the step handed over.

    merged   q, k and v in one product; gate and up in one, with the activation at its end
    fused    norm and quantize; norm of heads, rotary and KV write; residual sums at the end of products
    head     only the rows that sample or are scored

Not here: which models are of the form (`decoder_parts`), whether one is rewritten (`rewrite`).
"""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from executor.arena import LayerGeometry
from executor.attention import KvViews, LayerAttention
from executor.attention_cpu import CpuStep, attention_layer
from executor.batch import Batch
from executor.model.decoder_parts import DecoderParts, LayerParts, LinearPart, NormPart
from kernels.cpu import library as c

_FIRST_POSITIONS = 1024  # rows of the rotary tables; they double when a longer sequence comes


class RewrittenDecoder:
    """Packed weights, and the call. Holds no state of sequences; for one thread at a time."""

    def __init__(
        self,
        library: ctypes.CDLL,
        parts: DecoderParts,
        attention: Sequence[LayerAttention],
        geometry: Sequence[LayerGeometry],
        weights_format: str,
    ) -> None:
        """Pack.

        Args:
            library: of `kernels.cpu`.
            attention, geometry: of each layer, in model order.
            weights_format: float32, bfloat16 or int8, of all linear layers.

        Raises:
            MemoryError: not enough for the packed weights.
        """
        self.weights_format = weights_format
        self._library = library
        self._attention = tuple(attention)
        self._keep: list[Tensor] = []  # what C++ points into
        self._linears: list[int] = []
        self._rotaries = parts.rotaries
        self._tables: list[tuple[Tensor, Tensor]] = []
        self._num_heads: list[int] = []
        self._vocabulary_size = len(parts.head.weight)
        panel = library.octavo_panel()
        self._logits_stride = -(-self._vocabulary_size // panel) * panel
        self._views: tuple[KvViews, ...] | None = None
        self._layers_of_views = (c.AttentionLayer * 0)()
        self._decoder = self._make_decoder(parts, geometry)

    def __del__(self) -> None:
        for linear in self._linears:
            self._library.octavo_linear_free(linear)

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
        if self._library.octavo_decode(ctypes.byref(self._decoder), ctypes.byref(request), torch.get_num_threads()):
            raise MemoryError(f"no memory for a step of {batch.num_tokens} tokens")
        return logits[:, : self._vocabulary_size]

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
            self._tables = [rotary(torch.arange(size)) for rotary in self._rotaries]
        return (c.RotaryTable * len(self._tables))(
            *(c.RotaryTable(cos.data_ptr(), sin.data_ptr(), cos.shape[1]) for cos, sin in self._tables)
        )

    # --------------------------------------------------------------------------------------------------------- packing

    def _make_decoder(self, parts: DecoderParts, geometry: Sequence[LayerGeometry]) -> c.Decoder:
        layers = [self._make_layer(*each) for each in zip(parts.layers, geometry, strict=True)]
        self._num_heads = [int(layer.num_heads) for layer in layers]
        self._layers = (c.DecoderLayer * len(layers))(*layers)
        embedding = parts.embedding.contiguous()
        self._keep.append(embedding)
        return c.Decoder(
            layers=self._layers,
            num_layers=len(layers),
            hidden_size=embedding.shape[1],
            intermediate_size=parts.intermediate_size,
            embedding=embedding.data_ptr(),
            embedding_format=c.FORMATS.index(str(embedding.dtype).removeprefix("torch.")),
            activation=c.ACTIVATIONS.index(parts.activation),
            embedding_scale=parts.embedding_scale,
            logits_softcap=parts.logits_softcap,
            last=self._norm(parts.last_norm),
            head=self._linear(parts.head),
        )

    def _make_layer(self, layer: LayerParts, geometry: LayerGeometry) -> c.DecoderLayer:
        return c.DecoderLayer(
            qkv=self._linear(layer.q, layer.k, layer.v),
            o=self._linear(layer.o),
            gate_up=self._linear(layer.gate, layer.up, gated=True),
            down=self._linear(layer.down),
            before_attention=self._norm(layer.before_attention),
            after_attention=self._norm(layer.after_attention),
            before_mlp=self._norm(layer.before_mlp),
            after_mlp=self._norm(layer.after_mlp),
            query=self._norm(layer.query_norm),
            key=self._norm(layer.key_norm),
            num_heads=len(layer.q.weight) // geometry.k_head_dim,
            num_kv_heads=geometry.num_kv_heads,
            k_head_dim=geometry.k_head_dim,
            v_head_dim=geometry.v_head_dim,
            rotary=layer.rotary,
        )

    def _norm(self, norm: NormPart | None) -> c.Norm:
        if norm is None:
            return c.Norm(None, 0.0, 0)
        self._keep.append(norm.weight)
        return c.Norm(norm.weight.data_ptr(), norm.epsilon, 0)

    def _linear(self, *parts: LinearPart, gated: bool = False) -> int:
        """One linear layer with the outputs of all parts, in their order."""
        weight = torch.cat([part.weight.float() for part in parts]).contiguous()
        bias = None
        if any(part.bias is not None for part in parts):
            bias = torch.cat([_bias(part) for part in parts])
        linear = self._library.octavo_linear_pack(
            weight.data_ptr(),
            None if bias is None else bias.data_ptr(),
            *weight.shape,
            c.FORMATS.index(self.weights_format),
            gated,
        )
        if not linear:
            raise MemoryError("no memory to pack the weights")
        self._linears.append(linear)
        return int(linear)


def _bias(part: LinearPart) -> Tensor:
    return torch.zeros(len(part.weight)) if part.bias is None else part.bias.float()
