"""Which configurations the paged path computes right. Each rule says why; what passes is proved by `verify`.

Reads a model's configuration, never its weights, so that a model is refused before gigabytes are read.
"""

from typing import Any

from executor.model.refusal import unsupported

# These stretch the rotary frequencies by the longest position of the whole call: in a packed batch a sequence's
# answer would depend on its neighbours, and cached keys would be rotated by another stretch than the new ones.
_UNSTABLE_ROPE = ("dynamic", "longrope")
_LAYER_TYPES = ("full_attention", "sliding_attention")


def check_config(config: Any) -> None:
    """Refuse what cannot work.

    Args:
        config: a `PretrainedConfig`.

    Raises:
        OctavoError: FAILED_PRECONDITION, MODEL_NOT_SUPPORTED.
    """
    if getattr(config, "is_encoder_decoder", False):
        raise unsupported(f"{config.model_type} is an encoder-decoder; only decoders that predict the next token are")
    text = config.get_text_config()
    _check_layer_types(text)
    _check_rope(text)
    if getattr(text, "use_bidirectional_attention", None):
        raise unsupported("use_bidirectional_attention: its tokens see later ones, which a KV cache cannot give")
    if getattr(text, "num_kv_shared_layers", 0):
        raise unsupported("num_kv_shared_layers: its layers share KV, and here every layer has its own")


def _check_layer_types(text: Any) -> None:
    for layer_type in getattr(text, "layer_types", None) or ():
        if layer_type not in _LAYER_TYPES:
            raise unsupported(
                f"a layer of type {layer_type}; every layer must keep its state in KV blocks: {', '.join(_LAYER_TYPES)}"
            )


def _check_rope(text: Any) -> None:
    parameters = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    # One dictionary, or one per type of layer.
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    for rope in nested or [parameters]:
        rope_type = rope.get("rope_type", rope.get("type"))
        if rope_type in _UNSTABLE_ROPE:
            raise unsupported(
                f"rotary scaling {rope_type!r} depends on the longest position of the whole batch, so that answers "
                f"would change with the neighbours; set another rope_type in the model's configuration"
            )


def expected_window(text: Any) -> bool:
    """Whether the configuration says that some layer has a sliding window."""
    layer_types = getattr(text, "layer_types", None)
    if layer_types:
        return "sliding_attention" in layer_types
    return bool(getattr(text, "sliding_window", None)) and getattr(text, "use_sliding_window", True)
