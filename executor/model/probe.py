"""What the model's attention really is, found out by one call: layers, heads, head sizes, windows.

Asking the code beats reading the configuration: every model names these differently, and a layer that keeps state
elsewhere shows itself by not calling attention.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from executor.arena import LayerGeometry
from executor.attention import LayerAttention
from executor.model.hook import AttentionHook
from executor.model.refusal import unsupported
from executor.model.support import expected_window


class Recorder:
    """Attention that remembers what it was asked, and answers zeros."""

    def __init__(self) -> None:
        self.layers: list[LayerAttention] = []
        self.geometry: list[LayerGeometry] = []

    def attend(self, layer: LayerAttention, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """See `PreparedAttention`."""
        num_heads, num_kv_heads = query.shape[1], key.shape[1]
        if num_heads % num_kv_heads:
            raise unsupported(f"{num_heads} heads do not share {num_kv_heads} KV heads evenly")
        if layer.layer != len(self.layers):
            raise unsupported(f"attention layer {layer.layer} runs twice in one pass")
        self.layers.append(layer)
        self.geometry.append(LayerGeometry(num_kv_heads, key.shape[2], value.shape[2]))
        return query.new_zeros((query.shape[0], num_heads, value.shape[2]))


@dataclass(frozen=True, slots=True)
class Probed:
    """What one call showed."""

    attention: tuple[LayerAttention, ...]  # attention layers in order of call
    geometry: tuple[LayerGeometry, ...]
    vocabulary_size: int  # logits per token


def probe_geometry(model: nn.Module, hook: AttentionHook, config: Any) -> Probed:
    """Run two tokens through the model.

    Raises:
        OctavoError: FAILED_PRECONDITION, MODEL_NOT_SUPPORTED.
    """
    recorder = Recorder()
    device = next(model.parameters()).device
    tokens = torch.zeros((1, 2), dtype=torch.long, device=device)
    positions = torch.arange(2, device=device)[None]
    with torch.inference_mode(), hook.during(recorder):
        logits = model(input_ids=tokens, position_ids=positions, use_cache=False).logits
    text = config.get_text_config()
    if not recorder.layers:
        raise unsupported(f"{type(model).__name__} does not call its attention through AttentionInterface")
    if len(recorder.layers) != text.num_hidden_layers:
        raise unsupported(f"{len(recorder.layers)} of its {text.num_hidden_layers} layers are attention layers")
    if expected_window(text) and all(layer.window is None for layer in recorder.layers):
        raise unsupported("its configuration names a sliding window that its attention layers do not pass on")
    return Probed(tuple(recorder.layers), tuple(recorder.geometry), logits.shape[-1])
