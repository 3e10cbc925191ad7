"""A guarded child ends with its parent, however that dies: benchmarks and the launcher leave nothing running."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

PARENT = """
import subprocess, sys
from octavo.guard import guarded
code = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
subprocess.Popen(guarded([sys.executable, "-c", code])).wait()
"""


def is_alive(pid: int) -> bool:
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_child_ends_when_its_parent_is_killed(number):
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert is_alive(child)
        parent.send_signal(number)
        parent.wait(30)
    deadline_s = time.monotonic() + 30
    while is_alive(child):
        assert time.monotonic() < deadline_s
        time.sleep(0.02)
