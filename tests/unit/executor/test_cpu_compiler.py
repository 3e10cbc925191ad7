"""How the C++ kernels come to be compiled: once, whole, and again when anything that decides them changes."""

import os
import threading
from pathlib import Path

import pytest

from kernels.cpu import compiler
from kernels.cpu.compiler import CompilerError, compiled_library

FAKE = """#!/bin/sh
[ "$1" = --version ] && { echo "fake 1.0"; exit 0; }
echo run >> "$FAKE_LOG"
for last; do :; done
%s
"""


@pytest.fixture
def fake(tmp_path, monkeypatch) -> Path:
    """A compiler that writes its number of runs; returns the log of its runs."""
    log = tmp_path / "log"
    log.touch()
    monkeypatch.setenv("FAKE_LOG", str(log))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    install(tmp_path, monkeypatch, 'echo library > "$last"')
    return log


def install(tmp_path: Path, monkeypatch, action: str) -> None:
    program = tmp_path / "cxx"
    program.write_text(FAKE % action)
    program.chmod(0o755)
    monkeypatch.setenv("CXX", str(program))


def test_the_second_start_compiles_nothing(fake):
    library = compiled_library()
    assert library.read_text() == "library\n"
    assert compiled_library() == library
    assert fake.read_text() == "run\n"


def test_other_sources_are_another_library(fake, monkeypatch, tmp_path):
    first = compiled_library()
    monkeypatch.setattr(compiler, "SOURCES", tmp_path)
    (tmp_path / "one.cpp").write_text("int x;")
    second = compiled_library()
    assert second != first
    (tmp_path / "one.cpp").write_text("int y;")
    assert compiled_library() not in (first, second)


def test_another_processor_is_another_library(fake, monkeypatch):
    """A home directory may be shared among machines."""
    first = compiled_library()
    monkeypatch.setattr(compiler, "_processor", lambda: b"another")
    assert compiled_library() != first


def test_a_compiler_that_fails_leaves_nothing_and_says_why(fake, monkeypatch, tmp_path):
    install(tmp_path, monkeypatch, 'echo partial > "$last"; echo "error: no" >&2; exit 1')
    with pytest.raises(CompilerError, match="failed: error: no"):
        compiled_library()
    assert list((tmp_path / "cache").rglob("*.so")) == []


def test_starts_at_the_same_time_all_get_a_whole_library(fake, monkeypatch, tmp_path):
    """Each may compile; the file is there whole or not at all."""
    install(tmp_path, monkeypatch, 'printf lib > "$last"; sleep 0.2; printf rary >> "$last"')
    found: list[str] = []
    threads = [threading.Thread(target=lambda: found.append(compiled_library().read_text())) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == ["library"] * 3
    assert len(list((tmp_path / "cache").rglob("*.so"))) == 1


def test_a_cache_that_cannot_be_written_costs_time_only(fake, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(fake))  # a file
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    assert compiled_library().is_relative_to(tmp_path / f"octavo-{os.getuid()}")
