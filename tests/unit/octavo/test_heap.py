"""Big imports without collections: what must hold afterwards, whatever the import did."""

import gc
import sys

import pytest

from octavo import heap


@pytest.fixture
def frozen(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether the collector ran at each freeze; this process itself keeps its heap as it is."""
    times: list[bool] = []
    monkeypatch.setattr(gc, "freeze", lambda: times.append(gc.isenabled()))
    return times


def write_module(monkeypatch: pytest.MonkeyPatch, folder, name: str, text: str) -> None:
    (folder / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, name, raising=False)


def test_an_import_is_not_collected_and_then_frozen_once(tmp_path, monkeypatch, frozen):
    write_module(monkeypatch, tmp_path, "big_module", "import gc; was_collecting = gc.isenabled()")
    module = heap.import_once("big_module")
    assert not module.was_collecting
    assert gc.isenabled()
    assert heap.import_once("big_module") is module
    assert frozen == [True]


def test_an_import_that_fails_leaves_the_collector_on(tmp_path, monkeypatch, frozen):
    write_module(monkeypatch, tmp_path, "broken_module", "raise ValueError('broken')")
    with pytest.raises(ValueError, match="broken"):
        heap.import_once("broken_module")
    assert gc.isenabled()
    assert not frozen
