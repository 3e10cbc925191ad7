"""`octavo serve` as a user starts it: real processes on a tiny random model, called, wounded, rolled out, stopped."""

import contextlib
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
from octavo.samples import Samples, executor_addresses, scrape
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


def free_ports_of_serve() -> list[int]:
    """Router, and metrics of router, cache service and executor, whose spare has the port above."""
    while True:
        *ports, last = free_ports(4)
        with socket.socket() as above, contextlib.suppress(OSError):
            above.bind(("127.0.0.1", last + 1))
            if last + 1 not in ports:
                return [*ports, last]


@dataclass
class Serve:
    """A running `octavo serve` with a spare executor, and where everything of it is."""

    model: Path
    runtime: Path  # its run directory is made here
    memory: Path  # its arena is made here
    ports: list[int] = field(default_factory=free_ports_of_serve)
    process: subprocess.Popen | None = None
    rollout: subprocess.Popen | None = None  # that one test began and another ends
    num_spares: int = 1

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
            *("--spare-executors", str(self.num_spares)),
            *(f"--{name}.metrics-listen=127.0.0.1:{port}" for name, port in metrics),
        ]

    def start(self) -> None:
        with (self.runtime / "log").open("w") as log:
            self.process = subprocess.Popen(self.command(), stderr=log, env=self.environment)
        self.wait_for("octavo        | ready: gRPC at")

    def stop(self) -> None:
        """By Ctrl-C, to its end; nothing where none runs."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            assert self.process.wait(120) == 0, self.log

    def wait_for(self, text: str, times: int = 1) -> None:
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while self.log.count(text) < times:
            assert self.process.poll() is None, self.log
            assert time.monotonic() < deadline_s, self.log
            time.sleep(0.1)

    def block_count(self, state: str) -> float:
        """Blocks of the arena in this state, as the cache service counts them."""
        return self.metric(self.ports[2], "octavo_kv_blocks", state=state)

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "XDG_RUNTIME_DIR": str(self.runtime), "OCTAVO_EXECUTOR_MAX_ROWS": "4"}

    def roll_out(self) -> subprocess.Popen:
        command = [*OCTAVO, "rollout"]
        return subprocess.Popen(command, env=self.environment, stderr=subprocess.PIPE, text=True)

    def metric(self, port: int, name: str, **labels: str) -> float:
        """Sum of the series of a name with these labels, as a process exports it."""
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as response:
            return Samples(response.read().decode()).total(name, **labels)

    def wait_for_spare(self) -> None:
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while self.metric(self.ports[1], "octavo_spare_executors_ready") != 1:
            assert time.monotonic() < deadline_s, self.log
            time.sleep(0.1)

    def executors(self) -> list[int]:
        """Process ids: the one that serves, and the spare. Both are there."""
        is_serving = self.metric(self.ports[3], "octavo_executor_sessions") == 1
        pids = sorted(self.children("executor"), key=lambda pid: b"--executor-id=executor-1" in cmdline(pid))
        assert len(pids) == 2, self.log
        return pids if is_serving else pids[::-1]

    def child(self, module: str) -> int:
        """The process id of the only child that runs `python -m module`."""
        [found] = self.children(module)
        return found

    def children(self, module: str) -> list[int]:
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return [int(pid) for pid in children if f"\0-m\0{module}\0".encode() in cmdline(pid)]


def cmdline(pid: int | str) -> bytes:
    """Of a process; empty for one that has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


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
    serve.wait_for_spare()
    of_cache_service, of_executor = (f"127.0.0.1:{port}" for port in serve.ports[2:])
    of_spare = f"127.0.0.1:{serve.ports[3] + 1}"
    assert set(executor_addresses(scrape(of_cache_service, 10), of_cache_service)) == {of_executor, of_spare}


def test_variables_reach_the_children_as_arguments(serve):
    executor, _ = serve.executors()
    arguments = cmdline(executor).split(b"\0")
    environment = Path(f"/proc/{executor}/environ").read_bytes()
    assert b"--max-rows=4" in arguments
    assert b"OCTAVO_EXECUTOR" not in environment


def test_second_serve_on_the_same_port_says_what_is_wrong(serve):
    second = subprocess.run(
        [*OCTAVO, "cache-service", "--listen", serve.address], capture_output=True, text=True, timeout=60
    )
    assert second.returncode == 2
    assert serve.address in second.stderr


LONG = {"temperature": 0.8, "seed": 5, "max_tokens": 120, "ignore_eos": True}


def stream_and_kill(client, killed: int) -> tuple[tuple[int, ...], float]:
    """Stream a long answer and kill a process in the middle of it; all tokens, and the longest wait for one, in s."""
    tokens, longest_s, last = [], 0.0, None
    for event in client.stream(PROMPT, **LONG):
        if isinstance(event, Delta):
            now = time.monotonic()
            longest_s, last = max(longest_s, now - last if last is not None else 0.0), now
            if len(tokens) < 20 <= len(tokens) + len(event.token_ids):
                os.kill(killed, signal.SIGKILL)
            tokens += event.token_ids
    return tuple(tokens), longest_s


def test_a_spare_takes_over_when_the_executor_is_killed(serve, client):
    """No token is lost, repeated or drawn anew: the answer is that of an undisturbed run, and comes without a pause."""
    serve.wait_for_spare()
    whole = client.generate(PROMPT, **LONG).choices[0].token_ids
    killed, spare = serve.executors()
    tokens, longest_s = stream_and_kill(client, killed)
    assert tokens == whole
    load = os.getloadavg()[0] / len(os.sched_getaffinity(0))
    assert longest_s < 0.5 * max(1.0, load), "from before the kill to the first token of the spare"
    assert serve.metric(serve.ports[1], "octavo_takeover_time_seconds_sum") < 0.5 * max(1.0, load)
    assert 0 < serve.metric(serve.ports[1], "octavo_recomputed_tokens_total") <= 2, "of two steps in flight"
    assert spare in serve.children("executor")
    assert serve.metric(serve.ports[1], "octavo_spare_executors") == 1, "also while there is none"


def test_streams_go_on_when_the_cache_service_is_killed(serve, client):
    """Its memory is taken over: the executor goes on computing in it, and what was cached is hit."""
    whole = client.generate(PROMPT, **LONG).choices[0].token_ids
    [segment] = serve.memory.iterdir()
    serve.wait_for_spare()  # who was killed was started again
    executors = serve.executors()
    tokens, _ = stream_and_kill(client, serve.child("cache_service"))
    assert tokens == whole
    serve.wait_for("octavo        | cache-service is ready after", times=2)
    again = client.generate(PROMPT, **LONG)
    assert again.choices[0].token_ids == whole
    assert again.usage.cached_tokens == 16
    assert serve.executors() == executors
    assert list(serve.memory.iterdir()) == [segment]


def test_streams_go_on_when_the_router_is_killed(serve, client):
    """The client comes back to its successor, which has a higher epoch; the blocks of the dead one are free at once."""
    whole = client.generate(PROMPT, **LONG).choices[0].token_ids
    [before] = client.server_info().engines
    tokens, _ = stream_and_kill(client, serve.child("router"))
    assert tokens == whole
    [after] = client.server_info().engines
    assert after.router_epoch > before.router_epoch
    deadline_s = time.monotonic() + 10
    while serve.block_count("used") or serve.block_count("fenced"):
        assert time.monotonic() < deadline_s
        time.sleep(0.1)
    assert serve.block_count("cached") > 0


def test_a_roll_out_moves_streams_to_a_new_process(serve, client):
    """Nothing is computed again, and no stream breaks. It goes on when this test ends: the next one stops it midway."""
    serve.wait_for_spare()
    whole = client.generate(PROMPT, **LONG).choices[0].token_ids
    before = serve.executors()
    recomputed = serve.metric(serve.ports[1], "octavo_recomputed_tokens_total")
    serve.rollout = serve.roll_out()
    serve.wait_for("octavo        | roll-out: ")
    second = serve.roll_out()
    assert second.wait(60) == 1
    assert "another roll-out is going on" in second.stderr.read()
    while "0 tokens are computed again" not in serve.log:
        assert serve.rollout.poll() is None, serve.rollout.stderr.read()
        assert client.stream(PROMPT, **LONG).result().choices[0].token_ids == whole
    assert serve.metric(serve.ports[1], "octavo_recomputed_tokens_total") == recomputed
    serve.wait_for("has ended, executor-", times=2)  # the spare of before, and who served
    assert not set(before) & set(serve.children("executor"))
    assert client.generate(PROMPT, **LONG).choices[0].token_ids == whole


def test_ctrl_c_ends_everything_and_leaves_nothing(serve):
    children = [pid for module in ("router", "executor", "cache_service") for pid in serve.children(module)]
    serve.process.send_signal(signal.SIGINT)
    assert serve.process.wait(120) == 0
    assert not [pid for pid in children if Path(f"/proc/{pid}").exists()]
    assert list(serve.memory.iterdir()) == []
    assert sorted(path.name for path in serve.runtime.iterdir()) == ["log", "tiny"]
    assert serve.rollout.wait(10) == 1
    assert "it ended before it was done" in serve.rollout.stderr.read()


@pytest.mark.long
def test_roll_outs_to_their_ends(serve, client):
    """With a spare, and without: then another executor is started beside the one that serves, and takes over."""
    for num_spares in (1, 0):
        serve.stop()
        serve.num_spares = num_spares
        serve.start()
        whole = client.generate(PROMPT, **LONG).choices[0].token_ids
        for _ in range(2):
            before, rollout = set(serve.children("executor")), serve.roll_out()
            while rollout.poll() is None:
                assert client.stream(PROMPT, **LONG).result().choices[0].token_ids == whole
            assert rollout.returncode == 0, rollout.stderr.read()
            after = set(serve.children("executor"))
            assert len(after) == 1 + num_spares
            assert not before & after
        assert serve.metric(serve.ports[1], "octavo_recomputed_tokens_total") == 0
        assert serve.metric(serve.ports[1], "octavo_spare_executors") == num_spares, "a place for a roll-out is none"
        assert serve.log.count("0 tokens are computed again") == 2, serve.log


@pytest.mark.long
def test_killed_launchers_leave_no_process_and_no_memory(serve):
    """Field failure 38: SIGKILL of the launcher, again and again, does not fill the shared memory."""
    serve.stop()
    for _ in range(3):
        serve.start()
        children = [*serve.executors(), *(serve.child(module) for module in ("router", "cache_service"))]
        serve.process.kill()
        serve.process.wait(10)
        deadline_s = time.monotonic() + 60
        while any(Path(f"/proc/{pid}").exists() for pid in children):
            assert time.monotonic() < deadline_s
            time.sleep(0.1)
        assert list(serve.memory.iterdir()) == []
        assert len(list(serve.runtime.glob("octavo-*"))) == 1  # the next launcher removes it, so they do not add up
