"""Where the modeling code meets paged attention: the function that `transformers` calls in every attention layer.

The function finds the step's attention through an object on the layer's module, not through arguments of the model:
many models do not hand unknown arguments down. What a layer asks for and this path does not do is refused, loudly,
since an ignored argument would be a wrong answer. Not here: attention itself.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface

from executor.attention import LayerAttention, PreparedAttention
from executor.model.refusal import unsupported

IMPLEMENTATION = "octavo_paged"

_SUPPORTED = frozenset({"scaling", "sliding_window", "softcap"})
# Say nothing about what is computed here: no cache, no dropout, no weights out, positions already in query and key.
_HARMLESS = frozenset(
    {
        *("position_ids", "cache_position", "use_cache"),
        *("output_attentions", "output_hidden_states", "output_router_logits"),
    }
)
_HARMLESS_VALUES: Mapping[str, tuple[Any, ...]] = {"dropout": (0.0,), "is_causal": (True,)}


class AttentionHook:
    """One loaded model's link from its attention layers to the attention of the step that runs.

    The number of an attention layer is its place in the order of first calls, whatever the model calls it.
    """

    def __init__(self, model: nn.Module) -> None:
        self._numbers: dict[int, int] = {}  # id of the module -> layer
        self._prepared: PreparedAttention | None = None
        for module in model.modules():
            if hasattr(module, "layer_idx"):
                object.__setattr__(module, IMPLEMENTATION, self)

    @property
    def num_layers(self) -> int:
        """Attention layers seen so far."""
        return len(self._numbers)

    @contextmanager
    def during(self, prepared: PreparedAttention) -> Iterator[None]:
        """Attend through `prepared` in what runs inside."""
        self._prepared = prepared
        try:
            yield
        finally:
            self._prepared = None

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, options: Mapping[str, Any]
    ) -> Tensor:
        """query, key, value as in `PreparedAttention.attend`."""
        if self._prepared is None:
            raise RuntimeError("the model ran outside of a step")
        number = self._numbers.setdefault(id(module), len(self._numbers))
        return self._prepared.attend(_layer_attention(number, key, options), query, key, value)


def paged_attention(
    module: nn.Module,
    query: Tensor,  # [1, num_heads, num_tokens, k_head_dim]
    key: Tensor,  # [1, num_kv_heads, num_tokens, k_head_dim]
    value: Tensor,  # [1, num_kv_heads, num_tokens, v_head_dim]
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """The signature that `AttentionInterface` asks for. Returns [1, num_tokens, num_heads, v_head_dim]."""
    hook = getattr(module, IMPLEMENTATION, None)
    if hook is None:
        raise unsupported(f"{type(module).__name__} has no layer_idx, by which its KV would be found")
    if attention_mask is not None:
        raise unsupported(f"{type(module).__name__} brings a mask of its own")
    if getattr(module, "is_causal", True) is False:
        raise unsupported(f"{type(module).__name__} is not causal")
    by_token = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    return hook.attend(module, *by_token, options)[None], None


def _layer_attention(number: int, key: Tensor, options: Mapping[str, Any]) -> LayerAttention:
    for name, value in options.items():
        allowed = name in _SUPPORTED or name in _HARMLESS or value is None or value in _HARMLESS_VALUES.get(name, ())
        if not allowed:
            raise unsupported(f"its attention layer {number} asks for {name}, which paged attention does not do")
    scale = options.get("scaling")
    return LayerAttention(
        number,
        scale=key.shape[-1] ** -0.5 if scale is None else float(scale),
        window=options.get("sliding_window"),
        softcap=options.get("softcap"),
    )


AttentionInterface.register(IMPLEMENTATION, paged_attention)
