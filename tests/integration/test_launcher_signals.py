"""The launcher as a process: what signals do to it and to its children."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.integration.launcher_fakes import events_of, pids_of

DRIVER = Path(__file__).parent / "launcher_fakes.py"


@pytest.fixture
def launch(tmp_path):
    launched = []

    def start(*children: str) -> subprocess.Popen:
        process = subprocess.Popen(
            [sys.executable, str(DRIVER), str(tmp_path), *children],
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        launched.append(process)
        wait_until(lambda: events_of(tmp_path)[-1:] == ["launcher ready"])
        return process

    yield start
    for process in launched:
        if process.poll() is None:
            process.kill()
        process.communicate(timeout=10)


def wait_until(condition, timeout_s: float = 20.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "did not happen in time"
        time.sleep(0.02)


def running(pids) -> list[int]:
    return [pid for pid in pids if Path(f"/proc/{pid}").exists() and "Z" not in state_of(pid)]


def state_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return "Z"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signal_stops_in_order_with_code_0(launch, tmp_path, number):
    process = launch("cache", "executor", "router")
    process.send_signal(number)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 0
    assert events_of(tmp_path)[-3:] == ["router term", "executor term", "cache term"]
    assert not running(pids_of(tmp_path).values())
    assert "cache    | first words of cache" in errors
    assert "octavo   | all ready" in errors


def test_ctrl_c_of_a_terminal_reaches_the_launcher_alone(launch, tmp_path):
    """A terminal signals the whole foreground group; children in it would all stop at once."""
    process = launch("cache", "router")
    os.killpg(process.pid, signal.SIGINT)
    process.communicate(timeout=20)
    assert process.returncode == 0
    assert events_of(tmp_path)[-2:] == ["router term", "cache term"]


def test_second_signal_kills(launch, tmp_path):
    process = launch("cache", "router:stubborn")
    process.send_signal(signal.SIGTERM)
    wait_until(lambda: "router term" in events_of(tmp_path))
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=20)
    assert not running(pids_of(tmp_path).values())


def test_second_signal_lets_children_put_away_what_they_own(launch, tmp_path):
    """Field failure 37: a cache service that has heard nothing yet hears both signals, and unlinks its memory."""
    process = launch("cache:busy", "router:stubborn")
    process.send_signal(signal.SIGTERM)
    wait_until(lambda: "router term" in events_of(tmp_path))
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=20)
    assert [event for event in events_of(tmp_path) if event.startswith("cache")][2:] == [
        *("cache term", "cache term", "cache tidied"),
    ]


def test_children_end_when_the_launcher_is_killed(launch, tmp_path):
    """Field failure 38: SIGKILL of the launcher leaves no process behind."""
    process = launch("cache", "executor", "router")
    pids = pids_of(tmp_path)
    assert len(running(pids.values())) == 3
    process.kill()
    process.communicate(timeout=20)
    wait_until(lambda: not running(pids.values()))
