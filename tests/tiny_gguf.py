"""Tiny GGUF files, written from tiny `transformers` models the way converters write real ones."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import gguf
import numpy as np
from torch import Tensor
from transformers import PreTrainedModel

from tests.tiny_models import BOS, EOS, VOCABULARY_SIZE

_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_LAYER_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


@dataclass(frozen=True)
class Damage:
    """What a file lacks, or has besides: tensors by their GGUF names."""

    missing: tuple[str, ...] = ()
    extra: Mapping[str, np.ndarray] = field(default_factory=dict)


def write_gguf(model: PreTrainedModel, file: Path, architecture: str, damage: Damage | None = None) -> Path:
    """Write the model's weights in float32. Llama-type files keep rows of Q and K in another order. Returns file."""
    damage = damage or Damage()
    writer = gguf.GGUFWriter(file, architecture)
    _write_config(writer, model)
    for name, tensor in model.state_dict().items():
        tied = name == "lm_head.weight" and model.config.tie_word_embeddings
        if not tied and _gguf_name(name) not in damage.missing:
            writer.add_tensor(_gguf_name(name), _rows(name, tensor, model, architecture))
    for name, values in damage.extra.items():
        writer.add_tensor(name, values.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _write_config(writer: gguf.GGUFWriter, model: PreTrainedModel) -> None:
    config = model.config
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(VOCABULARY_SIZE)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"t{index}" for index in range(VOCABULARY_SIZE)])
    writer.add_bos_token_id(BOS)
    writer.add_eos_token_id(EOS)


def _gguf_name(name: str) -> str:
    if name in _NAMES:
        return _NAMES[name]
    _, _, layer, rest = name.split(".", 3)
    module, kind = rest.rsplit(".", 1)
    return f"blk.{layer}.{_LAYER_NAMES[module]}.{kind}"


def _rows(name: str, tensor: Tensor, model: PreTrainedModel, architecture: str) -> np.ndarray:
    values = tensor.float().numpy()
    heads = {"q_proj": model.config.num_attention_heads, "k_proj": model.config.num_key_value_heads}
    for projection, num_heads in heads.items():
        if architecture == "llama" and projection in name:
            # Halves of a head become pairs: [head, half, row] -> [head, row, half].
            halves = values.reshape(num_heads, 2, values.shape[0] // num_heads // 2, *values.shape[1:])
            values = halves.swapaxes(1, 2).reshape(values.shape)
    return np.ascontiguousarray(values)
