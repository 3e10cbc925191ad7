"""What the documents name is there: files, links, make targets. They are read beside the code and must move with it."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOP = [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "benchmarks" / "README.md"]
DOCUMENTS = sorted([*TOP, *(ROOT / "docs").rglob("*.md")])

_FILE = re.compile(r"`([\w./-]+\.(?:py|proto|toml|cpp|h))`")
_LINK = re.compile(r"\]\(([^)#\s]+)(?:#[\w-]*)?\)")
_MAKE = re.compile(r"`make ([a-z-]+)")


@pytest.fixture(scope="module")
def files() -> set[str]:
    """Every file of the repository's packages, as `/folder/.../name`."""
    folders = ("benchmarks", "cache_service", "docs", "executor", "kernels", "octavo", "protos", "router", "tests")
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file()]
    return {f"/{path.relative_to(ROOT)}" for path in [*paths, *ROOT.iterdir()]}


@pytest.fixture(scope="module")
def targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_what_a_document_names_exists(document: Path, files: set[str], targets: set[str]) -> None:
    text = document.read_text()
    missing = [name for name in _FILE.findall(text) if not any(path.endswith(f"/{name}") for path in files)]
    assert not missing, f"files that are not there: {missing}"
    links = [link for link in _LINK.findall(text) if "://" not in link]
    broken = [link for link in links if not (document.parent / link).exists()]
    assert not broken, f"links that lead nowhere: {broken}"
    unknown = sorted(set(_MAKE.findall(text)) - targets)
    assert not unknown, f"no such make target: {unknown}"
