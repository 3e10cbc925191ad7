"""A private directory that is gone when its launcher is, however that ended."""

import stat
import subprocess
import sys
from pathlib import Path

import pytest

from octavo.run_directory import RunDirectory, sweep

HOLD_AND_DIE = """
import os, signal, sys
from pathlib import Path
from octavo.run_directory import RunDirectory
directory = RunDirectory(Path(sys.argv[1]))
directory.__enter__()
(directory.path / "cache-service.sock").touch()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_private_while_held_and_gone_afterwards(tmp_path):
    with RunDirectory(tmp_path) as directory:
        assert stat.S_IMODE(directory.path.stat().st_mode) == 0o700
        assert directory.socket("router") == f"unix:{directory.path}/router.sock"
        (directory.path / "router.sock").touch()
    assert list(tmp_path.iterdir()) == []


def test_directory_of_a_killed_launcher_is_removed_by_the_next(tmp_path):
    """Field failure 38: what a SIGKILL leaves does not add up."""
    for _ in range(3):
        subprocess.run([sys.executable, "-c", HOLD_AND_DIE, str(tmp_path)], check=False)
    assert len(list(tmp_path.iterdir())) == 1
    with RunDirectory(tmp_path) as directory:
        assert list(tmp_path.iterdir()) == [directory.path]


def test_directory_of_a_live_launcher_stays(tmp_path):
    with RunDirectory(tmp_path) as first, RunDirectory(tmp_path) as second:
        assert sweep(tmp_path) == []
        assert first.path != second.path


def test_foreign_directory_stays(tmp_path):
    (tmp_path / "octavo-notes").mkdir()
    assert sweep(tmp_path) == []


def test_base_that_is_too_long_for_sockets_is_refused():
    with pytest.raises(OSError, match="too long for Unix sockets"):
        RunDirectory(Path("/tmp") / ("x" * 100))
