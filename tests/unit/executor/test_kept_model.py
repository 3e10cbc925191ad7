"""Kept models: a restart maps what an earlier start packed, and computes the same bits; nothing broken is ever used."""

import gc
import logging
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from executor import loading
from executor.arena import KvGeometry, private_arena
from executor.batch import pack_batch
from executor.config import ExecutorConfig
from executor.ids import StepId
from executor.loading import LoadedModel, load
from executor.model import checked
from executor.model.kept_model import PackedModel
from executor.slots import SlotTable
from executor.step import BlockTable, RowSampling, RowStart, Step
from tests.tiny_models import VOCABULARY_SIZE, save_tiny_gemma3, save_tiny_llama


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "cache" / "octavo").mkdir(parents=True)
    (tmp_path / "cache" / "octavo" / "kernels").symlink_to(Path.home() / ".cache" / "octavo" / "kernels")
    return tmp_path / "cache" / "octavo" / "models"


@pytest.fixture
def tiny(tmp_path) -> Path:
    (tmp_path / "tiny").mkdir()
    odd = {"hidden_size": 52, "intermediate_size": 70, "head_dim": 12, "attention_bias": True, "mlp_bias": True}
    return save_tiny_llama(tmp_path / "tiny", **odd)


def config_of(folder: Path, **options: object) -> ExecutorConfig:
    return ExecutorConfig(model=str(folder), threads=1, **options)  # type: ignore[arg-type]


def logits(loaded: LoadedModel) -> Tensor:
    """Of every token of one sequence, [num_tokens, VOCABULARY_SIZE]."""
    ids = torch.randint(5, VOCABULARY_SIZE, (40,), generator=torch.Generator().manual_seed(3))
    table = SlotTable(1)
    scored = RowSampling(prompt_logprobs_from=1, prompt_logprobs_until=len(ids))
    blocks = (BlockTable(0, np.arange(1, 4)),)
    table.apply(Step(StepId(1), started_rows=(RowStart(0, 0, ids.numpy(), 0, blocks, scored),)))
    batch = pack_batch(table, np.array([0]), np.array([0]), np.array([len(ids)]), loaded.geometry.block_size)
    arena = private_arena(loaded.geometry, 4)
    return loaded.model.forward(batch, loaded.attention.prepare(batch.attention, arena.views))


def without_the_long_way(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise AssertionError("it was loaded the long way")

    monkeypatch.setattr(checked, "load_checked", refuse)


def without_the_long_way_of(monkeypatch: pytest.MonkeyPatch, codes: Sequence[str], folder: Path) -> None:
    """Starts of these versions of the code map what is there."""
    with monkeypatch.context() as patch:
        without_the_long_way(patch)
        for code in codes:
            use_version(patch, code)
            assert isinstance(load(config_of(folder)).model, PackedModel)


@pytest.mark.parametrize("weights", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("save", [None, save_tiny_gemma3], ids=["odd llama", "gemma3"])
def test_a_restart_maps_it_and_computes_the_same_bits(save, weights, tiny, tmp_path, monkeypatch):
    folder = save(tmp_path / "tiny") if save else tiny
    with monkeypatch.context() as patch:
        patch.setattr(loading, "_place", lambda *arguments: None)
        plain = load(config_of(folder, weights=weights))
    assert not isinstance(plain.model, PackedModel)
    first = load(config_of(folder, weights=weights))
    without_the_long_way(monkeypatch)
    again = load(config_of(folder, weights=weights, model_name="other", max_context_tokens=64))
    for mapped in (first, again):
        assert isinstance(mapped.model, PackedModel)
        assert torch.equal(logits(mapped), logits(plain))
        assert (mapped.weights, mapped.geometry) == (plain.weights, plain.geometry)
    assert first.description == plain.description
    assert (again.description.name, again.description.max_context_tokens) == ("other", 64)


def test_another_content_another_format_are_other_models(tiny, monkeypatch, cache):
    load(config_of(tiny))
    load(config_of(tiny, weights="int8"))
    (model,) = cache.iterdir()
    assert sorted(path.name.rpartition("-")[0] for path in model.iterdir()) == ["packed-fp32", "packed-int8"]
    config = tiny / "config.json"
    config.write_text(config.read_text() + "\n")
    without_the_long_way(monkeypatch)
    with pytest.raises(AssertionError, match="the long way"):
        load(config_of(tiny))


@pytest.mark.parametrize("harm", ["half of the memory", "no index", "an index of another form"])
def test_what_is_broken_is_made_again_and_said(harm, tiny, cache, caplog):
    right = logits(load(config_of(tiny)))
    (folder,) = next(cache.iterdir()).iterdir()
    if harm == "half of the memory":
        with (folder / "memory.bin").open("r+b") as stream:
            stream.truncate(1000)
    elif harm == "no index":
        (folder / "decoder.json").unlink()
    else:
        (folder / "decoder.json").write_text('{"bytes": 1}')
    with caplog.at_level(logging.WARNING):
        loaded = load(config_of(tiny))
    assert f"{folder} is not whole and is made again" in caplog.text
    assert isinstance(loaded.model, PackedModel)
    assert torch.equal(logits(loaded), right)


def use_version(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    monkeypatch.setattr("executor.model.kept_model._code_digest", lambda: code)


def kept(cache: Path) -> set[Path]:
    (model,) = cache.iterdir()
    return set(model.iterdir())


def age(folder: Path, seconds: float) -> None:
    """As if it had been used so much longer ago."""
    changed = folder.stat().st_mtime - seconds
    os.utime(folder, (changed, changed))


def test_two_versions_of_the_code_leave_each_other_what_they_keep(tiny, cache, monkeypatch):
    """A third one takes the place of the one that was used longest ago; a process that maps that one keeps it."""
    places: dict[str, Path] = {}
    for code in ("old", "new"):
        use_version(monkeypatch, code)
        before = kept(cache) if places else set()
        load(config_of(tiny))
        (places[code],) = kept(cache) - before
    without_the_long_way_of(monkeypatch, ("old", "new", "old"), tiny)
    age(places["new"], 60)
    use_version(monkeypatch, "third")
    load(config_of(tiny))
    assert places["old"] in kept(cache)
    assert places["new"] not in kept(cache)
    assert len(kept(cache)) == 2
    use_version(monkeypatch, "old")
    age(places["old"], 60)
    mapped = load(config_of(tiny))
    age(places["old"], 120)
    use_version(monkeypatch, "fourth")
    load(config_of(tiny))
    assert places["old"] in kept(cache), "a process maps it"
    del mapped
    gc.collect()
    load(config_of(tiny))
    assert len(kept(cache)) == 2
    assert places["old"] not in kept(cache)


def test_what_nobody_uses_for_long_goes(tiny, cache, monkeypatch):
    use_version(monkeypatch, "old")
    load(config_of(tiny))
    gc.collect()
    (old,) = kept(cache)
    age(old, 31 * 86400)
    use_version(monkeypatch, "new")
    load(config_of(tiny))
    assert old not in kept(cache)


def test_a_cache_that_cannot_be_written_costs_time_only(tiny, cache, caplog):
    cache.write_text("a file where a folder should be")
    with caplog.at_level(logging.INFO):
        loaded = load(config_of(tiny))
    assert "is not kept" in caplog.text
    assert not isinstance(loaded.model, PackedModel)


@pytest.mark.parametrize("option", [{"verify_model": False}, {"rewrite_model": False}, {"attention": "torch"}])
def test_what_is_not_proved_or_not_packed_is_not_kept(option, tiny, cache):
    load(config_of(tiny, **option))
    assert not cache.exists()


def test_a_model_is_proved_with_exact_kv_before_kv_of_fewer_bits_blurs_the_proof(tiny, monkeypatch):
    proofs, prove = [], checked.verify_model

    def seen(model: object, attention: object, geometry: KvGeometry) -> float:
        proofs.append(geometry.dtype)
        return prove(model, attention, geometry)

    monkeypatch.setattr(checked, "verify_model", seen)
    loaded = load(config_of(tiny, attention="torch", kv_dtype="int8"))
    assert (loaded.geometry.dtype, proofs) == ("int8", ["float32", "int8"])
    assert torch.isfinite(logits(loaded)).all()


def test_serving_what_is_kept_imports_no_transformers():
    """It takes longer than all the rest of a restart."""
    modules = "executor.app, executor.model.kept_model"
    code = f"import sys, {modules}; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
