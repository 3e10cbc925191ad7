"""Field failure 40: GGUF files, whole and damaged, made from models whose logits are known."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from executor.arena import KvGeometry
from executor.attention_torch import TorchAttention
from executor.model import loader
from executor.model.loader import describe_model, load_model
from executor.model.verify import verify_model
from octavo.conversion_cache import conversion_of
from octavo.errors import OctavoError
from octavo.model_source import resolve_model
from tests.tiny_gguf import Damage, write_gguf
from tests.tiny_models import BOS, EOS, VOCABULARY_SIZE

CONFIG = {
    "vocab_size": VOCABULARY_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
}
IDS = torch.tensor([[5, 9, 200, 31, 7, 7, 120]])


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path) -> None:
    """Every test converts for itself."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def llama(tied: bool = False) -> PreTrainedModel:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**CONFIG, tie_word_embeddings=tied)).eval()


def qwen2() -> PreTrainedModel:
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(**CONFIG, tie_word_embeddings=False)).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.2)
    return model


def check(file: Path, right: PreTrainedModel) -> None:
    """The file's model, in its plain form and paged, says what the model says that it was written from."""
    loaded = load_model(resolve_model(str(file)), "float32")
    verify_model(loaded, TorchAttention(), KvGeometry(4, "float32", loaded.layers))
    loaded.module.set_attn_implementation("eager")
    with torch.inference_mode():
        torch.testing.assert_close(loaded.module(IDS).logits, right(IDS).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("make", "architecture"), [(llama, "llama"), (qwen2, "qwen2")])
def test_rows_of_q_and_k_come_in_the_right_order(tmp_path, make, architecture):
    """Llama-type files keep them in another order than qwen-type ones."""
    model = make()
    check(write_gguf(model, tmp_path / "model.gguf", architecture), model)


def test_a_file_without_an_output_tensor_ties_it_to_the_embedding(tmp_path):
    model = llama(tied=True)
    check(write_gguf(model, tmp_path / "model.gguf", "llama"), model)


def refusal(file: Path) -> str:
    with pytest.raises(OctavoError) as caught:
        load_model(resolve_model(str(file)), "float32")
    assert caught.value.reason == "MODEL_NOT_LOADABLE"
    return caught.value.message


@pytest.mark.parametrize(
    ("missing", "named"),
    [
        ("blk.1.ffn_up.weight", "layers.1.mlp.up_proj.weight"),
        ("blk.0.attn_norm.weight", "layers.0.input_layernorm.weight"),
        ("output_norm.weight", "model.norm.weight"),
    ],
)
def test_a_missing_tensor_is_refused_by_name(tmp_path, missing, named):
    """It would be random numbers."""
    message = refusal(write_gguf(llama(), tmp_path / "model.gguf", "llama", Damage(missing=(missing,))))
    assert "missing keys" in message
    assert named in message


def test_a_bias_that_the_model_has_no_place_for_is_refused(tmp_path):
    """The loader would pass over it, and serve another model."""
    damage = Damage(extra={"blk.0.attn_q.bias": np.zeros(64)})
    assert "blk.0.attn_q.bias" in refusal(write_gguf(llama(), tmp_path / "model.gguf", "llama", damage))


def test_another_extra_tensor_is_said_and_changes_nothing(tmp_path, caplog):
    model = llama()
    check(write_gguf(model, tmp_path / "model.gguf", "llama", Damage(extra={"who.knows": np.zeros(8)})), model)
    assert "the file has 22 tensors, the model 21 parameters" in caplog.text


def test_rotary_factors_of_the_file_are_used(tmp_path):
    """Llama 3.1: its stretched frequencies are a tensor that the loader passes over, and answers would be wrong."""
    torch.manual_seed(0)
    rope = {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    }
    model = LlamaForCausalLM(LlamaConfig(**CONFIG, rope_parameters=rope)).eval()
    plain = 10000.0 ** (-torch.arange(0, 16, 2) / 16)
    factors = (plain / model.model.rotary_emb.inv_freq).numpy()
    assert factors.max() > 7
    file = write_gguf(model, tmp_path / "model.gguf", "llama", Damage(extra={"rope_freqs.weight": factors}))
    check(file, model)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("rope_freqs.weight", np.zeros(8)),
        ("rope_freqs.weight", np.ones(4)),
        ("rope_factors_long.weight", np.ones(8)),
    ],
)
def test_rotary_factors_that_cannot_be_used_are_refused(tmp_path, name, values):
    file = write_gguf(llama(), tmp_path / "model.gguf", "llama", Damage(extra={name: values}))
    with pytest.raises(OctavoError, match=name):
        load_model(resolve_model(str(file)), "float32")


@pytest.mark.parametrize("share", [0.02, 0.5, 0.99])
def test_a_truncated_file_is_refused(tmp_path, share):
    file = write_gguf(llama(), tmp_path / "model.gguf", "llama")
    file.write_bytes(file.read_bytes()[: int(file.stat().st_size * share)])
    assert "whole" in refusal(file)


def test_two_files_have_two_fingerprints_and_a_copy_has_the_same(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    first = write_gguf(llama(), tmp_path / "a" / "model.gguf", "llama")
    copy = tmp_path / "b" / "model.gguf"
    copy.write_bytes(first.read_bytes())
    changed = tmp_path / "model.gguf"
    changed.write_bytes(first.read_bytes()[:-1] + b"\x7f")

    def fingerprint(file: Path) -> str:
        source = resolve_model(str(file))
        return describe_model(load_model(source, "float32"), source, "", 0).fingerprint

    assert fingerprint(first) == fingerprint(copy) != fingerprint(changed)


def test_the_second_load_reads_the_kept_conversion_and_is_the_same_model(tmp_path, monkeypatch):
    """Field failure 40, and what an executor's successor sees: equal weights, equal fingerprint, no GGUF reader."""
    source = resolve_model(str(write_gguf(llama(), tmp_path / "model.gguf", "llama")))
    first = load_model(source, "float32")
    conversion = conversion_of(source, "float32")
    assert conversion is not None
    assert conversion.is_there
    monkeypatch.setattr(loader, "GgufConfig", lambda **options: pytest.fail("the file was converted again"))
    second = load_model(source, "float32")
    ours, theirs = first.module.state_dict(), second.module.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert describe_model(first, source, "", 0) == describe_model(second, source, "", 0)


def test_a_model_that_is_refused_is_not_kept(tmp_path):
    source = resolve_model(
        str(write_gguf(llama(), tmp_path / "model.gguf", "llama", Damage(missing=("blk.0.attn_q.weight",))))
    )
    with pytest.raises(OctavoError):
        load_model(source, "float32")
    conversion = conversion_of(source, "float32")
    assert conversion is not None
    assert not conversion.is_there
