"""Rewritten models: which are, that they answer as before, and that a row's bits depend on nothing around it."""

import logging
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import (
    MistralConfig,
    MistralForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from executor.arena import KvGeometry, private_arena
from executor.attention import AttentionBackend
from executor.attention_choice import choose_attention
from executor.batch import pack_batch
from executor.ids import StepId
from executor.model.forward import CausalModel
from executor.model.loader import load_model
from executor.model.rewrite import rewrite_model
from executor.model.verify import verify_model
from executor.slots import SlotTable
from executor.step import BlockTable, RowSampling, RowStart, Step
from octavo.model_source import resolve_model
from tests.tiny_models import VOCABULARY_SIZE, save_tiny, save_tiny_gemma2, save_tiny_gemma3, save_tiny_llama

BLOCK = 16
Save = Callable[..., Path]


def save(kind: type, config: type) -> Save:
    return lambda folder: save_tiny(kind, config, folder)


def save_odd_llama(folder: Path) -> Path:
    """Sizes that are no whole numbers of vectors, biases everywhere."""
    odd = {"hidden_size": 52, "intermediate_size": 70, "head_dim": 12, "attention_bias": True, "mlp_bias": True}
    return save_tiny_llama(folder, **odd)


OF_THE_FORM = {
    "llama": save_tiny_llama,
    "odd": save_odd_llama,
    "mistral": save(MistralForCausalLM, MistralConfig),
    "qwen2": save(Qwen2ForCausalLM, Qwen2Config),
    "qwen3": save(Qwen3ForCausalLM, Qwen3Config),
    "gemma2": lambda folder: save_tiny_gemma2(folder, final_logit_softcapping=3.0),
    "gemma3": save_tiny_gemma3,
}


@pytest.fixture(scope="module")
def backend() -> AttentionBackend:
    return choose_attention("cpu", "cpu")


def load(save_model: Save, folder: Path, dtype: str = "float32") -> CausalModel:
    return load_model(resolve_model(str(save_model(folder))), dtype)


def geometry_of(model: CausalModel, kv_dtype: str = "float32") -> KvGeometry:
    return KvGeometry(BLOCK, kv_dtype, model.layers)


def rewritten(model: CausalModel, backend: AttentionBackend, int8: bool = False) -> CausalModel:
    done = rewrite_model(model, backend, geometry_of(model), int8=int8)
    assert done.rewritten is not None, "it was left as it is"
    return done


def logits(
    model: CausalModel, backend: AttentionBackend, sequences: list[Tensor], chunk: int, kv_dtype: str = "float32"
) -> list[Tensor]:
    """Of every token of each sequence, all run together in chunks: [num_tokens, VOCABULARY_SIZE] each."""
    arena = private_arena(geometry_of(model, kv_dtype), 100)
    table = SlotTable(len(sequences))
    for slot, ids in enumerate(sequences):
        blocks = np.arange(1 + slot, 90, len(sequences))[::-1]
        scored = RowSampling(prompt_logprobs_from=1, prompt_logprobs_until=len(ids))
        start = RowStart(slot, 0, ids.numpy(), 0, (BlockTable(0, blocks),), scored)
        table.apply(Step(StepId(1), started_rows=(start,)))
    found: list[list[Tensor]] = [[] for _ in sequences]
    while True:
        left = table.rows["length"] - table.rows["computed"]
        slots = np.flatnonzero(left > 0)
        if not slots.size:
            return [torch.cat(each) for each in found]
        counts = np.minimum(left[slots], chunk)
        batch = pack_batch(table, slots, table.rows["computed"][slots], counts, BLOCK)
        output = model.forward(batch, backend.prepare(batch.attention, arena.views))
        num_sampling, scores = len(batch.logits_tokens), batch.prompt_scores
        if scores is not None:
            for row, line in zip(scores.rows, output[num_sampling:], strict=True):
                found[slots[row]].append(line[None])
        ends = np.flatnonzero(counts == left[slots])
        for row, line in zip(ends, output[:num_sampling], strict=True):
            found[slots[row]].append(line[None])
        table.advance(slots, counts)


def some_sequences(*lengths: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(5, VOCABULARY_SIZE, (length,), generator=generator) for length in lengths]


@pytest.mark.parametrize("kind", OF_THE_FORM)
def test_a_rewritten_model_answers_as_before(kind, backend, tmp_path):
    model = load(OF_THE_FORM[kind], tmp_path)
    sequences = some_sequences(45, 3, 20)
    after = logits(rewritten(model, backend), backend, sequences, chunk=7)
    before = logits(model, backend, sequences, chunk=7)
    for own, other in zip(after, before, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_weights_are_multiplied_exactly(dtype, backend, tmp_path):
    """Nearer to float32 arithmetic on the same weights than the modeling code comes, which rounds every result."""
    model = load(save_tiny_llama, tmp_path, dtype)
    sequences = some_sequences(30)
    after = rewritten(model, backend)
    assert after.linear_format == dtype
    (own,) = logits(after, backend, sequences, chunk=8)
    model.module.float()
    (exact,) = logits(model, backend, sequences, chunk=8)
    torch.testing.assert_close(own, exact, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("int8", [False, True], ids=["float32", "int8"])
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_a_rows_bits_depend_neither_on_its_batch_nor_on_its_chunks(kind, int8, backend, tmp_path):
    """Field failure 16, and more than it asks: equal to the last bit."""
    model = rewritten(load(OF_THE_FORM[kind], tmp_path), backend, int8)
    first, *others = some_sequences(45, 30, 17, 9)
    for kv_dtype in ("float32", "int8"):
        (whole,) = logits(model, backend, [first], 2048, kv_dtype)
        for company, chunk in (([], 1), ([], 7), (others, 13), (others[:1], 2048)):
            assert torch.equal(logits(model, backend, [first, *company], chunk, kv_dtype)[0], whole)


@pytest.mark.parametrize("kind", OF_THE_FORM)
def test_int8_stays_near(kind, backend, tmp_path):
    model = load(OF_THE_FORM[kind], tmp_path)
    (exact,) = logits(model, backend, some_sequences(60), chunk=2048)
    coded = rewritten(model, backend, int8=True)
    assert coded.linear_format == "int8"
    (near,) = logits(coded, backend, some_sequences(60), chunk=2048)
    # Random weights forgive less than learned ones: the logits must still be the same logits.
    assert nn.functional.cosine_similarity(exact, near, dim=1).min() > 0.99
    (nearly,) = logits(coded, backend, some_sequences(60), 2048, "int8")
    assert not torch.equal(nearly, near)
    assert nn.functional.cosine_similarity(exact, nearly, dim=1).min() > 0.99


@torch.no_grad()
def to_blocks(weight: Tensor, most: int) -> None:
    """Rounds as a file of blocks holds it: 15 and a least, as Q4_1 does, or 127 and both signs, as Q8_0 does."""
    blocks = weight.view(len(weight), -1, 32)
    low = blocks.amin(dim=2, keepdim=True).half().float() if most == 15 else torch.tensor(0.0)
    scale = ((blocks - low).abs().amax(dim=2, keepdim=True) / most).half().float()
    blocks.copy_(((blocks - low) / scale).round().clamp(-most, most) * scale + low)


def test_weights_that_are_blocks_stay_what_they_are(backend, tmp_path):
    """No factors and no second rounding: int8 differs by the codes of the inputs alone; a row's bits stand alone."""
    model = load(save_tiny_llama, tmp_path)
    for name, module in model.module.named_modules():
        if isinstance(module, nn.Linear):
            to_blocks(module.weight, 127 if name == "lm_head" else 15)
    first, *others = some_sequences(45, 17)
    (plain,) = logits(model, backend, [first], chunk=2048)
    exact, coded = (rewritten(model, backend, int8) for int8 in (False, True))
    for each in (exact, coded):
        assert each.rewritten.all_blocks
        (whole,) = logits(each, backend, [first], chunk=2048)
        for company, chunk in (([], 1), (others, 7)):
            assert torch.equal(logits(each, backend, [first, *company], chunk)[0], whole)
    torch.testing.assert_close(logits(exact, backend, [first], chunk=2048)[0], plain, rtol=1e-4, atol=1e-4)
    assert nn.functional.cosine_similarity(plain, whole, dim=1).min() > 0.995


def test_a_model_of_another_form_runs_as_it_is_and_says_so(backend, tmp_path, caplog):
    model = load(save(PhiForCausalLM, PhiConfig), tmp_path)
    with caplog.at_level(logging.WARNING):
        assert rewrite_model(model, backend, geometry_of(model)) is model
    assert "layers run as the modeling code has them, slower" in caplog.text


def test_parts_that_are_not_what_they_seem_are_found_out(backend, tmp_path, caplog):
    """Names and sizes fit; what the layer computes does not."""
    model = load(save_tiny_llama, tmp_path)
    layer = model.module.base_model.layers[0]  # not the last: the norm behind that one takes a factor away
    layer.register_forward_hook(lambda module, args, output: output * 1.5)
    with caplog.at_level(logging.WARNING):
        assert rewrite_model(model, backend, geometry_of(model)) is model
    assert "the rewritten model's logits differ" in caplog.text


def test_other_attention_leaves_the_model_as_it_is(tmp_path):
    model = load(save_tiny_llama, tmp_path)
    assert rewrite_model(model, choose_attention("torch", "cpu"), geometry_of(model)) is model


def test_a_sequence_past_the_rotary_tables_makes_them_longer(backend, tmp_path):
    def save_long(folder: Path) -> Path:
        return save_tiny_llama(folder, max_position_embeddings=2048)

    model = load(save_long, tmp_path)
    (sequence,) = some_sequences(1030)
    (after,) = logits(rewritten(model, backend), backend, [sequence], chunk=300)
    (before,) = logits(model, backend, [sequence], chunk=300)
    torch.testing.assert_close(after[-20:], before[-20:], rtol=1e-4, atol=1e-4)


def test_kv_of_fewer_bits_than_the_weights_is_no_reason_to_refuse(backend, tmp_path):
    """Its rounding is larger than that of the weights' format, and both proofs allow for it."""
    model = load(save_tiny_llama, tmp_path)
    for kv_dtype in ("bfloat16", "int8"):
        fewer = geometry_of(model, kv_dtype)
        assert verify_model(model, backend, fewer) > 0
        assert rewrite_model(model, backend, fewer).rewritten is not None
