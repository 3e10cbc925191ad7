"""A decoder's parts packed as C++ reads them, with all that the structures point into.

    merged   q, k and v in one product; gate and up in one, with the activation at its end

Not here: what the parts are (`decoder_parts`), keeping them for the next start (`kept_pack`), running (`rewritten`).
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from executor.arena import LayerGeometry
from executor.model.decoder_form import DecoderParts, LayerParts, LinearPart, NormPart, Rotary
from kernels.cpu import library as c


@dataclass(slots=True)
class PackedDecoder:
    """Whoever holds it may hand its structures to C++."""

    weights_format: str  # float32, bfloat16, float16 or int8, of all linear layers
    vocabulary_size: int
    decoder: c.Decoder
    layers: "ctypes.Array[c.DecoderLayer]"  # what `decoder` points to
    rotaries: tuple[Rotary, ...]
    owner: object  # of the memory behind the structures
    all_blocks: bool  # every linear layer's weights are blocks of codes, as the file had them (kernels/cpu/blocks.h)
    # Every range of memory that they point into: address -> bytes.
    memory: dict[int, int] = field(default_factory=dict)


def pack(
    library: ctypes.CDLL, parts: DecoderParts, geometry: Sequence[LayerGeometry], weights_format: str
) -> PackedDecoder:
    """Takes as much memory as the weights.

    Args:
        library: of `kernels.cpu`.
        geometry: of each layer, in model order.
        weights_format: of all linear layers.

    Raises:
        MemoryError: not enough for the packed weights.
    """
    packer = _Packer(library, weights_format)
    made = [packer.layer(*each) for each in zip(parts.layers, geometry, strict=True)]
    layers = (c.DecoderLayer * len(made))(*made)
    embedding = parts.embedding.contiguous()
    decoder = c.Decoder(
        layers=layers,
        num_layers=len(layers),
        hidden_size=embedding.shape[1],
        intermediate_size=parts.intermediate_size,
        embedding=packer.keep(embedding),
        embedding_format=c.FORMATS.index(str(embedding.dtype).removeprefix("torch.")),
        activation=c.ACTIVATIONS.index(parts.activation),
        embedding_scale=parts.embedding_scale,
        logits_softcap=parts.logits_softcap,
        last=packer.norm(parts.last_norm),
        head=packer.linear(parts.head),
    )
    vocabulary_size = len(parts.head.weight)
    return PackedDecoder(
        weights_format, vocabulary_size, decoder, layers, parts.rotaries, packer, packer.all_blocks, packer.memory
    )


class _Packer:
    """Owns what it packs."""

    def __init__(self, library: ctypes.CDLL, weights_format: str) -> None:
        self.memory: dict[int, int] = {}
        self.all_blocks = True
        self._library = library
        self._format = weights_format
        self._tensors: list[Tensor] = []
        self._linears: list[int] = []

    def __del__(self) -> None:
        for linear in self._linears:
            self._library.octavo_linear_free(linear)

    def keep(self, tensor: Tensor) -> int:
        """Its address, good for as long as this lives."""
        self._tensors.append(tensor)
        self.memory[tensor.data_ptr()] = tensor.nbytes
        return tensor.data_ptr()

    def layer(self, layer: LayerParts, geometry: LayerGeometry) -> c.DecoderLayer:
        return c.DecoderLayer(
            qkv=self.linear(layer.q, layer.k, layer.v),
            o=self.linear(layer.o),
            gate_up=self.linear(layer.gate, layer.up, gated=True),
            down=self.linear(layer.down),
            before_attention=self.norm(layer.before_attention),
            after_attention=self.norm(layer.after_attention),
            before_mlp=self.norm(layer.before_mlp),
            after_mlp=self.norm(layer.after_mlp),
            query=self.norm(layer.query_norm),
            key=self.norm(layer.key_norm),
            num_heads=len(layer.q.weight) // geometry.k_head_dim,
            num_kv_heads=geometry.num_kv_heads,
            k_head_dim=geometry.k_head_dim,
            v_head_dim=geometry.v_head_dim,
            rotary=layer.rotary,
        )

    def norm(self, norm: NormPart | None) -> c.Norm:
        return c.Norm(None, 0.0, 0) if norm is None else c.Norm(self.keep(norm.weight), norm.epsilon, 0)

    def linear(self, *parts: LinearPart, gated: bool = False) -> int:
        """One linear layer with the outputs of all parts, in their order."""
        weight = torch.cat([part.weight.float() for part in parts]).contiguous()
        bias = None
        if any(part.bias is not None for part in parts):
            bias = torch.cat([_bias(part) for part in parts])
        address = self._library.octavo_linear_pack(
            weight.data_ptr(),
            None if bias is None else bias.data_ptr(),
            *weight.shape,
            c.FORMATS.index(self._format),
            gated,
        )
        if not address:
            raise MemoryError("no memory to pack the weights")
        self._linears.append(address)
        self._note(address)
        return int(address)

    def _note(self, address: int) -> None:
        linear, panel = c.Linear.from_address(address), self._library.octavo_panel()
        self.all_blocks &= linear.block_bits != 0
        num_floats = -(-linear.num_outputs // panel) * panel
        self.memory[linear.weights] = self._library.octavo_linear_bytes(address)
        for floats in (linear.scales, linear.bias):
            if floats:
                self.memory[floats] = num_floats * 4


def _bias(part: LinearPart) -> Tensor:
    return torch.zeros(len(part.weight)) if part.bias is None else part.bias.float()
