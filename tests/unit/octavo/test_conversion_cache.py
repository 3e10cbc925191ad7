"""Conversions: found by content, whole or not there, and never a reason to fail."""

from pathlib import Path

import pytest

from octavo.conversion_cache import Conversion, conversion_of
from octavo.model_source import ModelSource, resolve_model


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "octavo" / "models"


def gguf_source(folder: Path, content: bytes) -> ModelSource:
    (folder / "model.gguf").write_bytes(content)
    return ModelSource("model", "model", str(folder), {"gguf_file": "model.gguf"})


def kept(conversion: Conversion | None, text: str) -> str:
    """Keep this text; what is there then."""
    assert conversion is not None
    assert conversion.keep(lambda folder: (folder / "file").write_text(text))
    return (conversion.folder / "file").read_text()


def test_a_conversion_is_found_by_the_content_of_the_file(tmp_path, cache):
    (tmp_path / "copy").mkdir()
    first = conversion_of(gguf_source(tmp_path, b"GGUF one"), "float32")
    assert kept(first, "converted") == "converted"
    copy = conversion_of(gguf_source(tmp_path / "copy", b"GGUF one"), "float32")
    changed = conversion_of(gguf_source(tmp_path, b"GGUF two"), "float32")
    other_part = conversion_of(gguf_source(tmp_path, b"GGUF one"), "tokenizer")
    assert copy == first
    assert copy.is_there
    assert not changed.is_there
    assert not other_part.is_there
    assert first.folder.is_relative_to(cache)


def test_a_file_is_known_by_its_kind_and_not_by_its_name(tmp_path):
    """`resolve_model` takes any file that begins like a GGUF file."""
    file = tmp_path / "blob"
    file.write_bytes(b"GGUF")
    assert conversion_of(resolve_model(str(file)), "float32") is not None


def test_what_came_first_stays(tmp_path):
    conversion = conversion_of(gguf_source(tmp_path, b"GGUF"), "float32")
    assert kept(conversion, "first") == "first"
    assert kept(conversion, "second") == "first"


def test_a_save_that_breaks_off_leaves_nothing(tmp_path, cache):
    conversion = conversion_of(gguf_source(tmp_path, b"GGUF"), "float32")

    def break_off(folder: Path) -> None:
        (folder / "half").write_text("half")
        raise RuntimeError("killed")

    with pytest.raises(RuntimeError, match="killed"):
        conversion.keep(break_off)
    assert not conversion.is_there
    assert list(conversion.folder.parent.iterdir()) == []


def test_a_cache_that_cannot_be_written_is_said_and_does_no_harm(tmp_path, monkeypatch, caplog):
    (tmp_path / "a file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "a file"))
    conversion = conversion_of(gguf_source(tmp_path, b"GGUF"), "float32")
    with caplog.at_level("INFO"):
        assert not conversion.keep(lambda folder: (folder / "file").write_text("never"))
    assert "is not kept" in caplog.text
    assert not conversion.is_there


def test_models_in_folders_and_on_the_hub_are_not_converted(tmp_path):
    assert conversion_of(ModelSource("folder", "folder", str(tmp_path)), "float32") is None
    assert conversion_of(ModelSource("a/b", "a/b", "a/b"), "float32") is None
