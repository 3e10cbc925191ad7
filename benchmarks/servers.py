"""`octavo serve` for benchmarks and soaks: started, watched from outside, stopped.

What a process uses is read from the kernel, what it does from its metrics; nothing here needs its help.
"""

import asyncio
import os
import platform
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from prometheus_client.parser import text_string_to_metric_families

from octavo.guard import guarded
from octavo.rpc import is_serving

START_S = 300.0
STOP_S = 60.0
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Server:
    """A running stack: addresses, and the pid of each service by its module (`router`, `executor`, `cache_service`).

    Attributes:
        launcher: pid of `octavo serve`.
        log: what all of them write.
    """

    address: str
    metrics: str  # of the router
    executor_metrics: str
    cache_service: str
    pids: dict[str, int]
    launcher: int
    log: Path


def free_port() -> int:
    """A TCP port that nobody listens on now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@contextmanager
def serving(model: str, options: list[str]) -> Iterator[Server]:
    """`octavo serve`, ready when this yields, stopped afterwards, and however this process ends.

    Raises:
        RuntimeError: it did not start, or did not end in order; with the end of its log.
    """
    address, metrics, executor_metrics = (f"127.0.0.1:{free_port()}" for _ in range(3))
    with tempfile.TemporaryDirectory(prefix="octavo-serving-") as folder:
        cache_service, log = f"unix:{folder}/cache.sock", Path(folder) / "log"
        command = [sys.executable, "-m", "octavo.cli", "serve", f"--model={model}", f"--router.listen={address}"]
        command += [f"--router.metrics-listen={metrics}", f"--cache-service.listen={cache_service}"]
        command += [f"--executor.metrics-listen={executor_metrics}", "--cache-service.metrics-listen=", *options]
        with log.open("wb") as output:
            launcher = subprocess.Popen(guarded(command), stdout=output, stderr=subprocess.STDOUT)
        try:
            _wait_until_serving(address, launcher, log)
            addresses = (address, metrics, executor_metrics, cache_service)
            yield Server(*addresses, _services_below(launcher.pid), launcher.pid, log)
        finally:
            code = stop(launcher, STOP_S)
        if code != 0:
            raise RuntimeError(f"the server ended with exit code {code}:\n{_tail(log)}")


def stop(process: "subprocess.Popen[Any]", within_s: float) -> int:
    """SIGTERM, and SIGKILL where it does not end; the exit code. Children of a launcher hear of its death."""
    process.terminate()
    try:
        return process.wait(within_s)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def _wait_until_serving(address: str, launcher: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_S
    while not asyncio.run(is_serving(address, "octavo.v1.InferenceService")):
        if launcher.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"the server did not start:\n{_tail(log)}")
        time.sleep(0.5)


def _tail(log: Path) -> str:
    return log.read_text(errors="replace")[-4000:]


def _services_below(launcher: int) -> dict[str, int]:
    """The service processes that descend from the launcher, by their module."""
    found, waiting = {}, [launcher]
    while waiting:
        pid = waiting.pop()
        waiting += children(pid)
        arguments = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
        if "-m" in arguments and (module := arguments[arguments.index("-m") + 1]) != "octavo.cli":
            found[module] = pid
    return found


def cpu_seconds(pid: int) -> float:
    """User and system time of a process so far, all threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


def resident_bytes(pid: int) -> int:
    """Memory of a process that is in RAM, shared parts included."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def children(pid: int) -> dict[int, list[str]]:
    """The command line of each child of a process."""
    pids = map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
    return {child: Path(f"/proc/{child}/cmdline").read_text().split("\0") for child in pids}


def signal_tree(pid: int, number: signal.Signals) -> None:
    """Send a signal to a process and to all that descend from it."""
    for child in children(pid):
        signal_tree(child, number)
    os.kill(pid, number)


def metric_sum(metrics: str, name: str, **labels: str) -> float:
    """Sum of the samples of this name that have these labels."""
    text = urlopen(f"http://{metrics}/metrics").read().decode()
    samples = (sample for family in text_string_to_metric_families(text) for sample in family.samples)
    return sum(sample.value for sample in samples if sample.name == name and labels.items() <= sample.labels.items())


def step_parts(server: Server) -> dict[str, float]:
    """Seconds that each part of a step took so far, and `steps`, those that the router has planned."""
    found: dict[str, float] = {}
    for metrics in (server.metrics, server.executor_metrics):
        text = urlopen(f"http://{metrics}/metrics").read().decode()
        for sample in (sample for family in text_string_to_metric_families(text) for sample in family.samples):
            part = sample.labels.get("part", "")
            if sample.name == "octavo_step_time_seconds_sum":
                found[part] = found.get(part, 0.0) + sample.value
            elif sample.name == "octavo_step_time_seconds_count" and part == "plan":
                found["steps"] = found.get("steps", 0.0) + sample.value
    return found


def machine() -> dict[str, object]:
    """What figures of this machine are to be read with."""
    return {"processor": _processor(), "cpus": len(os.sched_getaffinity(0)), "load_average": os.getloadavg()}


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
