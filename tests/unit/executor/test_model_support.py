"""What is refused of a model, and why; each text names the thing."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    FalconConfig,
    FalconForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2Config,
    T5Config,
)

from executor.arena import KvGeometry, LayerGeometry
from executor.attention_torch import TorchAttention
from executor.kernels_conflict import check_kernels
from executor.model import verify
from executor.model.fingerprint import fingerprint_of, weights_files
from executor.model.hook import AttentionHook, paged_attention
from executor.model.loader import describe_model, load_model
from executor.model.support import check_config, expected_window
from executor.model.verify import verify_model
from octavo.errors import OctavoError
from octavo.model_source import resolve_model
from tests.tiny_models import save_tiny_gemma3, save_tiny_llama


def refusal(call, *arguments, **named) -> str:
    with pytest.raises(OctavoError) as caught:
        call(*arguments, **named)
    assert caught.value.reason in ("MODEL_NOT_SUPPORTED", "MODEL_NOT_LOADABLE", "KERNELS_SHADOWED")
    return caught.value.message


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (T5Config(), "encoder-decoder"),
        (
            LlamaConfig(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}),
            "'dynamic' depends on",
        ),
        (
            LlamaConfig(
                head_dim=16,
                rope_parameters={
                    "rope_type": "longrope",
                    "rope_theta": 1e4,
                    "factor": 2.0,
                    "short_factor": [1.0] * 8,
                    "long_factor": [1.0] * 8,
                    "original_max_position_embeddings": 64,
                },
            ),
            "'longrope' depends on",
        ),
        (SimpleNamespace(layer_types=["full_attention", "linear_attention"]), "a layer of type linear_attention"),
        (SimpleNamespace(layer_types=["chunked_attention"]), "a layer of type chunked_attention"),
        (SimpleNamespace(use_bidirectional_attention=True), "use_bidirectional_attention"),
        (SimpleNamespace(num_kv_shared_layers=2), "num_kv_shared_layers"),
    ],
)
def test_a_configuration_that_cannot_work_is_refused(config, text):
    if isinstance(config, SimpleNamespace):
        config.get_text_config = lambda: config
    assert text in refusal(check_config, config)


def save(model, folder: Path) -> Path:
    model.save_pretrained(folder)
    return folder


SMALL = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2}


HEADS = {"num_attention_heads": 2, "intermediate_size": 48, "max_position_embeddings": 64}
EXPERTS = {"num_experts_per_tok": 2}


@pytest.mark.parametrize(
    ("kind", "config", "text"),
    [
        (MambaForCausalLM, MambaConfig(**SMALL, state_size=4), "a layer of type linear_attention"),
        (
            BloomForCausalLM,
            BloomConfig(vocab_size=50, hidden_size=32, n_layer=2, n_head=2),
            "does not call its attention",
        ),
        (FalconForCausalLM, FalconConfig(**SMALL, num_attention_heads=2), "does not take its attention"),
        (
            GptOssForCausalLM,
            GptOssConfig(**SMALL, **HEADS, **EXPERTS, num_key_value_heads=1, head_dim=16, num_local_experts=4),
            "s_aux",
        ),
    ],
)
def test_families_that_need_more_than_kv_are_refused_with_the_reason(tmp_path, kind, config, text):
    assert text in refusal(load_model, resolve_model(str(save(kind(config), tmp_path))), "float32")


@pytest.mark.parametrize(
    ("kind", "config", "layer"),
    [
        (GPT2LMHeadModel, GPT2Config(vocab_size=50, n_embd=32, n_layer=2, n_head=2), LayerGeometry(2, 16, 16)),
        (
            MixtralForCausalLM,
            MixtralConfig(**SMALL, **HEADS, **EXPERTS, num_key_value_heads=1, num_local_experts=4),
            LayerGeometry(1, 16, 16),
        ),
        (
            DeepseekV3ForCausalLM,
            DeepseekV3Config(
                **{**SMALL, **HEADS, **EXPERTS, "num_key_value_heads": 2, "moe_intermediate_size": 16},
                n_routed_experts=4,
                n_group=2,
                topk_group=1,
                first_k_dense_replace=1,
                kv_lora_rank=8,
                q_lora_rank=8,
                qk_rope_head_dim=8,
                qk_nope_head_dim=16,
                v_head_dim=16,
            ),
            LayerGeometry(2, 24, 16),
        ),
    ],
)
def test_families_of_other_shapes_pass_the_proof(tmp_path, kind, config, layer):
    """Learned positions, experts, and a V of another head size than K."""
    loaded = load_model(resolve_model(str(save(kind(config), tmp_path))), "float32")
    assert loaded.layers == (layer, layer)
    assert verify_model(loaded, TorchAttention(), KvGeometry(4, "float32", loaded.layers)) < 1e-3


def test_a_window_without_layer_types_is_taken_from_the_call(tmp_path):
    """Mistral says its window in one number."""
    model = MistralForCausalLM(MistralConfig(**SMALL, **HEADS, num_key_value_heads=1, sliding_window=3))
    loaded = load_model(resolve_model(str(save(model, tmp_path))), "float32")
    assert verify_model(loaded, TorchAttention(), KvGeometry(4, "float32", loaded.layers)) < 1e-3


def hooked(**options: object) -> str:
    module = nn.Linear(1, 1)
    module.layer_idx = 0
    hook = AttentionHook(nn.ModuleList([module]))
    tensor = torch.zeros(1, 2, 3, 4)
    seen = []
    prepared = SimpleNamespace(attend=lambda layer, query, key, value: seen.append(layer) or query)
    with hook.during(prepared):
        paged_attention(module, tensor, tensor, tensor, options.pop("mask", None), **options)
    return str(seen[0])


@pytest.mark.parametrize("name", ["s_aux", "sinks", "position_bias", "block_indices", "cu_seq_lens_q", "anything_new"])
def test_an_attention_argument_that_is_not_understood_is_refused_by_name(name):
    assert name in refusal(hooked, **{name: torch.zeros(2)})
    assert "layer=0" in hooked(**{name: None})


@pytest.mark.parametrize("options", [{"dropout": 0.1}, {"is_causal": False}, {"mask": torch.zeros(1)}])
def test_attention_that_is_not_plain_and_causal_is_refused(options):
    assert refusal(hooked, **options)


def test_what_a_layer_says_reaches_attention():
    assert hooked(
        scaling=0.3, sliding_window=7, softcap=2.0, dropout=0.0, position_ids=torch.zeros(1), use_cache=False
    ) == ("LayerAttention(layer=0, scale=0.3, window=7, softcap=2.0)")
    assert hooked() == "LayerAttention(layer=0, scale=0.5, window=None, softcap=None)"


def test_a_model_that_answers_otherwise_in_chunks_is_refused(tmp_path):
    """The last net: a model whose embedding looks back one token passes every rule, and is caught by its logits."""
    loaded = load_model(resolve_model(str(save_tiny_llama(tmp_path))), "float32")
    embed = loaded.module.model.embed_tokens
    plain = embed.forward
    embed.forward = lambda ids: plain(ids) + plain(ids.roll(1, dims=-1))
    text = refusal(verify_model, loaded, TorchAttention(), KvGeometry(4, "float32", loaded.layers))
    assert "it keeps state outside of KV" in text
    embed.forward = plain
    assert verify_model(loaded, TorchAttention(), KvGeometry(4, "float32", loaded.layers)) < 1e-3
    assert verify._TOLERANCE["float32"] < 0.01


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_weights_pass_the_proof(tmp_path, dtype):
    loaded = load_model(resolve_model(str(save_tiny_gemma3(tmp_path))), dtype)
    verify_model(loaded, TorchAttention(), KvGeometry(4, dtype, loaded.layers))


def test_missing_weights_are_refused_by_name(tmp_path):
    """A folder whose weights lack a tensor: it would be random numbers."""
    save_tiny_llama(tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, file, metadata={"format": "pt"})
    assert "missing keys: model.layers.1.mlp.up_proj.weight" in refusal(
        load_model, resolve_model(str(tmp_path)), "float32"
    )


def test_the_description_is_complete(tmp_path):
    source = resolve_model(str(save_tiny_llama(tmp_path)))
    model = load_model(source, "float32")
    described = describe_model(model, source, "mine", 100)
    assert (described.name, described.source, described.architecture) == ("mine", str(tmp_path), "LlamaForCausalLM")
    assert (described.vocabulary_size, described.max_context_tokens, described.eos_token_ids) == (300, 100, (2, 4))
    assert describe_model(model, source, "", 0).max_context_tokens == 512
    assert "its positions end at 512" in refusal(describe_model, model, source, "", 513)


def test_the_fingerprint_changes_with_what_changes_kv(tmp_path):
    save_tiny_llama(tmp_path)
    files, config = weights_files(tmp_path), {"hidden_size": 64, "_name_or_path": "/a", "transformers_version": "5"}
    right = fingerprint_of(config, "float32", "", files)
    assert right == fingerprint_of(config | {"_name_or_path": "/b", "transformers_version": "6"}, "float32", "", files)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    assert right == fingerprint_of(config, "float32", "", weights_files(tmp_path))
    others = [
        fingerprint_of(config | {"hidden_size": 65}, "float32", "", files),
        fingerprint_of(config, "bfloat16", "", files),
        fingerprint_of(config, "float32", "abc", files),
    ]
    content = bytearray(files[0].read_bytes())
    content[-1] ^= 1
    files[0].write_bytes(content)
    others.append(fingerprint_of(config, "float32", "", files))
    assert len({right, *others}) == 5


def test_the_distribution_called_kernels_is_explained():
    assert check_kernels("triton", None) is None
    assert "pip uninstall kernels" in str(check_kernels("torch", "0.9.0"))
    assert "auto does without them" in str(check_kernels("auto", "0.9.0"))  # plain torch attends then
    assert "kernels 0.9.0 is installed" in refusal(check_kernels, "triton", "0.9.0")


def test_unused_qwen2_windows_are_no_windows():
    """Qwen2 names a window that use_sliding_window switches off."""
    config = Qwen2Config(**SMALL, num_attention_heads=2, num_key_value_heads=1, use_sliding_window=False)
    assert not expected_window(config.get_text_config())
