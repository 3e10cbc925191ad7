"""`octavo serve` as a user starts it: three real processes on a tiny random model, called, wounded, stopped."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path

import pytest

import octavo
from octavo.results import Delta
from octavo.stats import Samples
from tests.tiny_models import save_tiny_llama

PROMPT = [1, 40, 41, 42, 43, 44, 45, 46, 47, 48, 49, 50, 51, 52, 53, 54, 55, 56, 57, 58]
START_TIMEOUT_S = 240.0
OCTAVO = (sys.executable, "-m", "octavo.cli")


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


@dataclass
class Serve:
    """A running `octavo serve` and where everything of it is."""

    model: Path
    runtime: Path  # its run directory is made here
    memory: Path  # its arena is made here
    ports: list[int] = field(default_factory=lambda: free_ports(4))
    process: subprocess.Popen | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.ports[0]}"

    @property
    def log(self) -> str:
        return (self.runtime / "log").read_text()

    def command(self) -> list[str]:
        metrics = zip(("router", "cache-service", "executor"), self.ports[1:], strict=True)
        return [
            *OCTAVO,
            *("serve", "--model", str(self.model), "--router.listen", self.address),
            *("--cache-service.shared-memory-dir", str(self.memory), "--executor.threads", "1"),
            *("--executor.kv-memory-mib", "4", "--router.drain-accept-window-s", "0"),
            *(f"--{name}.metrics-listen=127.0.0.1:{port}" for name, port in metrics),
        ]

    def start(self) -> None:
        environment = {**os.environ, "XDG_RUNTIME_DIR": str(self.runtime), "OCTAVO_EXECUTOR_MAX_ROWS": "4"}
        with (self.runtime / "log").open("w") as log:
            self.process = subprocess.Popen(self.command(), stderr=log, env=environment)
        self.wait_for("octavo        | ready: gRPC at")

    def wait_for(self, text: str, times: int = 1) -> None:
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while self.log.count(text) < times:
            assert self.process.poll() is None, self.log
            assert time.monotonic() < deadline_s, self.log
            time.sleep(0.1)

    def block_count(self, state: str) -> float:
        """Blocks of the arena in this state, as the cache service counts them."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.ports[2]}/metrics", timeout=10) as response:
            return Samples(response.read().decode()).total("octavo_kv_blocks", state=state)

    def child(self, module: str) -> int:
        """The process id of the child that runs `python -m module`."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        found = [pid for pid in children if f"\0-m\0{module}\0".encode() in Path(f"/proc/{pid}/cmdline").read_bytes()]
        assert len(found) == 1, children
        return int(found[0])


@pytest.fixture(scope="module")
def serve():
    runtime = Path(tempfile.mkdtemp(prefix="oct-"))
    memory = Path(tempfile.mkdtemp(prefix="octavo-test-", dir="/dev/shm"))
    stack = Serve(save_tiny_llama(runtime / "tiny"), runtime, memory)
    try:
        stack.start()
        yield stack
    finally:
        if stack.process is not None and stack.process.poll() is None:
            stack.process.send_signal(signal.SIGTERM)
            stack.process.wait(120)
        shutil.rmtree(runtime)
        shutil.rmtree(memory)


@pytest.fixture
def client(serve):
    with octavo.Client(serve.address, timeout_s=START_TIMEOUT_S) as client:
        yield client


def answer(client: octavo.Client) -> tuple[int, ...]:
    return client.generate(PROMPT, temperature=0, max_tokens=8, ignore_eos=True).choices[0].token_ids


# In the order of the file: the last tests end what the first ones use.


def test_answers_through_three_processes(client):
    first = client.generate(PROMPT, temperature=0, max_tokens=8, ignore_eos=True)
    again = client.stream(PROMPT, temperature=0, max_tokens=8, ignore_eos=True).result()
    assert (first.usage.cached_tokens, again.usage.cached_tokens) == (0, 16)
    assert len(first.choices[0].token_ids) == 8
    assert again.choices == first.choices


def test_command_line_client(serve):
    command = [
        *OCTAVO,
        "generate",
        "--address",
        serve.address,
        "--max-tokens",
        "4",
        "--temperature",
        "0",
        "--ignore-eos",
    ]
    plain = subprocess.run([*command, "hello"], capture_output=True, text=True, timeout=60)
    piped = subprocess.run([*command, "--json-output"], input="hello", capture_output=True, text=True, timeout=60)
    assert (plain.returncode, piped.returncode) == (0, 0), plain.stderr + piped.stderr
    whole = json.loads(piped.stdout)
    assert plain.stdout == whole["choices"][0]["text"] + "\n"
    assert whole["usage"]["generated_tokens"] == 4
    refused = subprocess.run([*command, "--top-p", "3", "hello"], capture_output=True, text=True, timeout=60)
    assert refused.returncode == 1
    assert refused.stderr.startswith("octavo generate: INVALID_ARGUMENT: sampling.top_p: ")


def test_metrics_of_each_process(serve):
    for port in serve.ports[1:]:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as response:
            assert b"\noctavo_" in response.read()


def test_variables_reach_the_children_as_arguments(serve):
    arguments = Path(f"/proc/{serve.child('executor')}/cmdline").read_bytes().split(b"\0")
    environment = Path(f"/proc/{serve.child('executor')}/environ").read_bytes()
    assert b"--max-rows=4" in arguments
    assert b"OCTAVO_EXECUTOR" not in environment


def test_second_serve_on_the_same_port_says_what_is_wrong(serve):
    second = subprocess.run(
        [*OCTAVO, "cache-service", "--listen", serve.address], capture_output=True, text=True, timeout=60
    )
    assert second.returncode == 2
    assert serve.address in second.stderr


LONG = {"temperature": 0.8, "seed": 5, "max_tokens": 120, "ignore_eos": True}


def stream_and_kill(serve, client, module: str) -> tuple[int, ...]:
    """Stream a long answer, kill a process in the middle of it, and return all tokens that came."""
    killed, tokens = serve.child(module), []
    for event in client.stream(PROMPT, **LONG):
        if isinstance(event, Delta):
            if len(tokens) < 20 <= len(tokens) + len(event.token_ids):
                os.kill(killed, signal.SIGKILL)
            tokens += event.token_ids
    return tuple(tokens)


def test_streams_go_on_when_the_executor_is_killed(serve, client):
    """No token is lost, repeated or drawn anew: the answer is that of an undisturbed run."""
    whole = client.generate(PROMPT, **LONG).choices[0].token_ids
    assert stream_and_kill(serve, client, "executor") == whole
    assert serve.log.count("octavo        | executor is ready after") == 2


def test_streams_go_on_when_the_cache_service_is_killed(serve, client):
    """Its memory is taken over: the executor goes on computing in it, and what was cached is hit."""
    whole = client.generate(PROMPT, **LONG).choices[0].token_ids
    [segment] = serve.memory.iterdir()
    executor = serve.child("executor")
    assert stream_and_kill(serve, client, "cache_service") == whole
    serve.wait_for("octavo        | cache-service is ready after", times=2)
    again = client.generate(PROMPT, **LONG)
    assert again.choices[0].token_ids == whole
    assert again.usage.cached_tokens == 16
    assert serve.child("executor") == executor
    assert list(serve.memory.iterdir()) == [segment]


def test_streams_go_on_when_the_router_is_killed(serve, client):
    """The client comes back to its successor, which has a higher epoch; the blocks of the dead one are free at once."""
    whole = client.generate(PROMPT, **LONG).choices[0].token_ids
    [before] = client.server_info().engines
    assert stream_and_kill(serve, client, "router") == whole
    [after] = client.server_info().engines
    assert after.router_epoch > before.router_epoch
    deadline_s = time.monotonic() + 10
    while serve.block_count("used") or serve.block_count("fenced"):
        assert time.monotonic() < deadline_s
        time.sleep(0.1)
    assert serve.block_count("cached") > 0


def test_ctrl_c_ends_everything_and_leaves_nothing(serve):
    children = [serve.child(module) for module in ("router", "executor", "cache_service")]
    serve.process.send_signal(signal.SIGINT)
    assert serve.process.wait(120) == 0
    assert not [pid for pid in children if Path(f"/proc/{pid}").exists()]
    assert list(serve.memory.iterdir()) == []
    assert sorted(path.name for path in serve.runtime.iterdir()) == ["log", "tiny"]


@pytest.mark.long
def test_killed_launchers_leave_no_process_and_no_memory(serve):
    """Field failure 38: SIGKILL of the launcher, again and again, does not fill the shared memory."""
    for _ in range(3):
        serve.start()
        children = [serve.child(module) for module in ("router", "executor", "cache_service")]
        serve.process.kill()
        serve.process.wait(10)
        deadline_s = time.monotonic() + 60
        while any(Path(f"/proc/{pid}").exists() for pid in children):
            assert time.monotonic() < deadline_s
            time.sleep(0.1)
        assert list(serve.memory.iterdir()) == []
        assert len(list(serve.runtime.glob("octavo-*"))) == 1  # the next launcher removes it, so they do not add up
