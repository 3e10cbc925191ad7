"""Tiny random models with a tiny tokenizer, saved as `transformers` saves real ones. No download, and quick to run."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

PAD, BOS, EOS = 0, 1, 2
SPECIAL_TOKENS = ("<pad>", "<s>", "</s>", "<turn>", "<end>")
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<turn>{{ message.role }}\n{{ message.content }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<turn>assistant\n{% endif %}"
)
VOCABULARY_SIZE = 300  # 5 special tokens, 256 bytes, and some that no text gives
CONTEXT_TOKENS = 512


def save_tiny_llama(folder: Path, **config: object) -> Path:
    """A Llama-type model: 2 layers, 4 heads, 2 KV heads, head size 16. Returns the folder."""
    fields = {"num_hidden_layers": 2, "num_key_value_heads": 2, **_common()} | config
    return _save(LlamaForCausalLM, LlamaConfig(**fields), folder)


def save_tiny_gemma3(folder: Path, **config: object) -> Path:
    """A Gemma3-type model: 3 layers, a sliding window of 24 tokens on two of them, 4 heads, 1 KV head."""
    layer_types = ["sliding_attention", "full_attention", "sliding_attention"]
    fields = {"num_hidden_layers": 3, "num_key_value_heads": 1, "sliding_window": 24, "layer_types": layer_types}
    return _save(Gemma3ForCausalLM, Gemma3TextConfig(**(fields | _common() | config)), folder)


def save_tiny_gemma2(folder: Path, **config: object) -> Path:
    """A Gemma2-type model: attention scores are capped, and layers alternate between a window of 24 and none."""
    layer_types = ["sliding_attention", "full_attention"]
    fields = {"num_hidden_layers": 2, "num_key_value_heads": 2, "sliding_window": 24, "layer_types": layer_types}
    fields |= {"attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 4}
    return _save(Gemma2ForCausalLM, Gemma2Config(**(fields | _common() | config)), folder)


def save_tiny(kind: type[PreTrainedModel], config: type[PreTrainedConfig], folder: Path) -> Path:
    """A model of any kind that takes Llama's options: 2 layers, 4 heads, 2 KV heads, head size 16."""
    return _save(kind, config(**({"num_hidden_layers": 2, "num_key_value_heads": 2} | _common())), folder)


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, so that every text has tokens and characters may span several."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = (*SPECIAL_TOKENS, *alphabet)
    tokenizer = Tokenizer(BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=[]))
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def _common() -> dict[str, object]:
    return {
        "vocab_size": VOCABULARY_SIZE,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "head_dim": 16,
        "max_position_embeddings": CONTEXT_TOKENS,
        "tie_word_embeddings": False,  # tied, a random model says its last token again and again
        "initializer_range": 0.2,  # spreads the logits, so that few answers hang on rounding
        "pad_token_id": PAD,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
    }


def _save(kind: type[PreTrainedModel], config: object, folder: Path) -> Path:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = kind(config)
    model.generation_config = GenerationConfig(pad_token_id=PAD, bos_token_id=BOS, eos_token_id=[EOS, 4])
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder
