"""Moves what is hard to quantize in activations into weights, for int8: a model with the same answers, other numbers.

Some channels of the inputs of linear layers are many times larger than the rest, and take the int8 codes of a token
for themselves. A channel j of an input is divided by s_j, and the weights that meet it multiplied: what divides it
is the layer before, so that it costs nothing at run time.

    input of            divided in
    q, k, v             norm before attention
    o                   v (heads that share a KV head share their factors)
    gate, up            norm before the MLP
    down                up
    head                last norm

s_j = sqrt(max |x_j| / max |w_j|): SmoothQuant (Xiao et al. 2022, arXiv:2211.10438) with alpha 0.5; rounded to an eighth
of an octave, so that peaks that differ by rounding give the same factors.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, overload

import torch
from torch import Tensor, nn

from executor.model.decoder_form import DecoderParts, LayerParts, LinearPart, NormPart
from executor.model.hook import IMPLEMENTATION

_SMALLEST = 1e-8
_STEPS = 8  # of an octave


@dataclass(frozen=True, slots=True)
class LayerPeaks:
    """The largest magnitude per channel of what a layer's linear layers take in."""

    qkv: Tensor  # [hidden_size]
    o: Tensor  # [num_heads * v_head_dim]
    gate_up: Tensor  # [hidden_size]
    down: Tensor  # [intermediate_size]


@dataclass(frozen=True, slots=True)
class Peaks:
    """Of a model."""

    layers: tuple[LayerPeaks, ...]
    head: Tensor  # [hidden_size]


def measure_peaks(model: Any, sequences: Sequence[Tensor]) -> Peaks:
    """Run token ids through the modeling code.

    Args:
        model: one that `take_apart` took.
        sequences: [num_tokens] int64 each.
    """
    layers = [
        (layer.self_attn.q_proj, layer.self_attn.o_proj, layer.mlp.gate_proj, layer.mlp.down_proj)
        for layer in model.base_model.layers
    ]
    head = model.get_output_embeddings()
    peaks: dict[nn.Module, Tensor] = {}

    def note(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        here = args[0].detach().float().abs().flatten(0, -2).amax(dim=0)
        peaks[module] = torch.maximum(peaks[module], here) if module in peaks else here

    handles = [module.register_forward_pre_hook(note) for module in (*(m for each in layers for m in each), head)]
    try:
        with torch.inference_mode(), _plain_attention(model):
            for token_ids in sequences:
                model(input_ids=token_ids[None], use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return Peaks(tuple(LayerPeaks(*(peaks[module] for module in each)) for each in layers), peaks[head])


@contextmanager
def _plain_attention(model: Any) -> Iterator[None]:
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(IMPLEMENTATION)


def smooth(parts: DecoderParts, peaks: Peaks) -> DecoderParts:
    """The same model in other numbers. Layers are made as they are asked for."""
    factor = _factors(peaks.head, parts.head)
    return replace(
        parts,
        layers=_SmoothedLayers(parts.layers, peaks.layers),
        last_norm=_divided_norm(parts.last_norm, factor),
        head=_multiplied(parts.head, factor),
    )


class _SmoothedLayers(Sequence[LayerParts]):
    """One layer's copy at a time, not a model's."""

    def __init__(self, layers: Sequence[LayerParts], peaks: Sequence[LayerPeaks]) -> None:
        self._layers, self._peaks = layers, peaks

    def __len__(self) -> int:
        return len(self._layers)

    @overload
    def __getitem__(self, index: int) -> LayerParts: ...

    @overload
    def __getitem__(self, index: slice) -> list[LayerParts]: ...

    def __getitem__(self, index: int | slice) -> LayerParts | list[LayerParts]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        return _smooth_layer(self._layers[index], self._peaks[index])


def _smooth_layer(layer: LayerParts, peaks: LayerPeaks) -> LayerParts:
    qkv = _factors(peaks.qkv, layer.q, layer.k, layer.v)
    gate_up = _factors(peaks.gate_up, layer.gate, layer.up)
    down = _factors(peaks.down, layer.down)
    shared = _shared_by_heads(peaks.o, layer)  # of each output of v
    group = layer.o.weight.shape[1] // len(layer.v.weight)
    o = shared.view(-1, 1, _head_dim(layer)).expand(-1, group, -1).reshape(-1)
    return replace(
        layer,
        before_attention=_divided_norm(layer.before_attention, qkv),
        q=_multiplied(layer.q, qkv),
        k=_multiplied(layer.k, qkv),
        v=_divided(_multiplied(layer.v, qkv), shared),
        o=_multiplied(layer.o, o),
        before_mlp=_divided_norm(layer.before_mlp, gate_up),
        gate=_multiplied(layer.gate, gate_up),
        up=_divided(_multiplied(layer.up, gate_up), down),
        down=_multiplied(layer.down, down),
    )


def _shared_by_heads(peaks: Tensor, layer: LayerParts) -> Tensor:
    """[num_kv_heads * v_head_dim]: one factor for all heads that mix the same values."""
    shape = (layer.num_kv_heads, -1, _head_dim(layer))
    x = peaks.view(shape).amax(dim=1)
    w = layer.o.weight.float().abs().amax(dim=0).view(shape).amax(dim=1)
    return _balance(x, w).reshape(-1)


def _head_dim(layer: LayerParts) -> int:
    return len(layer.v.weight) // layer.num_kv_heads


def _factors(peaks: Tensor, *linears: LinearPart) -> Tensor:
    """[num_inputs]"""
    return _balance(peaks, torch.stack([each.weight.float().abs().amax(dim=0) for each in linears]).amax(dim=0))


def _balance(x: Tensor, w: Tensor) -> Tensor:
    octaves = 0.5 * torch.log2(x.clamp_min(_SMALLEST) / w.clamp_min(_SMALLEST))
    return torch.exp2((octaves * _STEPS).round() / _STEPS)


def _multiplied(linear: LinearPart, factor: Tensor) -> LinearPart:
    """Meets inputs that were divided."""
    return LinearPart(linear.weight.float() * factor, linear.bias)


def _divided(linear: LinearPart, factor: Tensor) -> LinearPart:
    """Gives outputs that are divided."""
    return LinearPart(linear.weight / factor[:, None], None if linear.bias is None else linear.bias.float() / factor)


def _divided_norm(norm: NormPart, factor: Tensor) -> NormPart:
    return NormPart((norm.weight / factor).contiguous(), norm.epsilon)
