"""What comparisons with other servers and managers rest on; the others themselves are not here."""

import asyncio
import signal
import subprocess
import time
from argparse import Namespace
from array import array
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest

from benchmarks import bench_peers
from benchmarks.bench_peers import FIGURES, Contender, rows_of
from benchmarks.loads import workload_w
from benchmarks.peer import PeerFigures
from benchmarks.peer_tables import managers_table, peers_table
from benchmarks.peers import block_trace
from benchmarks.servers import children, signal_tree
from benchmarks.vllm_kills import Kill, row_of
from benchmarks.vllm_server import VllmServer


def test_a_trace_is_read_as_it_was_recorded(tmp_path: Path) -> None:
    trace = block_trace.record(5, shared=1.0, seed=3)
    trace.write(tmp_path / "trace")
    assert block_trace.read(tmp_path / "trace") == trace
    heads = {tuple(tokens[: block_trace.COMMON_TOKENS]) for tokens in trace.requests}
    assert len(heads) == 1
    assert len({tuple(tokens) for tokens in trace.requests}) == 5


class WrittenDown:
    """A manager that writes down what is asked of it."""

    hashes_in_look_up = False

    def __init__(self) -> None:
        self.said: list[str] = []

    def native(self, tokens: "array[int]") -> int:
        return len(tokens)

    def admit(self, number: int, prompt: int) -> int:
        self.said.append(f"admit {prompt}")
        return number

    def grow(self, request: int, tokens: int) -> None:
        self.said.append(f"grow {tokens}")

    def release(self, request: int) -> None:
        self.said.append("release")

    def hash(self, prompt: int) -> None:
        self.said.append("hash")

    def look_up(self, number: int, prompt: int, keys: None) -> int:
        self.said.append("look up")
        return 49_984


def test_every_manager_is_asked_the_same_and_only_the_end_is_timed() -> None:
    manager = WrittenDown()
    times = block_trace.replay(manager, block_trace.record(3, 0.0, seed=1), num_untimed=2, num_look_ups=2)
    request = ["admit 512", *["grow 16"] * 4, "release"]
    assert manager.said == [*request * 3, "admit 50000", "release", *["hash", "look up"] * 2]
    assert {name: len(taken) for name, taken in times.items()} == {
        "admit": 1,
        "grow": 4,
        "release": 1,
        "request": 1,
        "hash long": 2,
        "look up long": 2,
    }


def contender(name: str, output: float, first_ms: float) -> Contender:
    figures = dict(zip(FIGURES, (output, first_ms, 1.0, 2.0), strict=True))
    return Contender(name, lambda load: None, {8: [figures] * 3})


def test_ratios_are_to_each_peer() -> None:
    contenders = [
        contender("Octavo int8", 100, 50),
        contender("OpenVINO GenAI 1", 50, 100),
        contender("vLLM 1", 25, 25),
    ]
    rows = rows_of(contenders, [8])
    assert rows[0]["ratios"] == {
        "OpenVINO GenAI 1": {"output": 2.0, "first_token": 0.5},
        "vLLM 1": {"output": 4.0, "first_token": 2.0},
    }
    table = peers_table({"rows": rows, "runs": 3})
    assert "| 8 | Octavo int8 | 100.0 | 50 | 1.0 / 2.0 | 2.00 / 0.50 | 4.00 / 2.00 |" in table
    alone = rows_of(contenders[:1], [8])
    assert "| 8 | Octavo int8 | 100.0 | 50 | 1.0 / 2.0 |" in peers_table({"rows": alone, "runs": 1})


def test_a_peer_stands_still_between_its_turns() -> None:
    process = subprocess.Popen(["sh", "-c", "sleep 60 & wait"])

    def come_to(state: str) -> bool:
        """Whether both processes do, soon."""
        for _ in range(500):
            pids = [process.pid, *children(process.pid)]
            states = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] for pid in pids]
            if states == [state] * 2:
                return True
            time.sleep(0.01)
        return False

    assert come_to("S")
    with ExitStack() as stack:
        measure = bench_peers.resting(stack, process.pid, lambda load: come_to("S"))
        assert come_to("T")
        assert measure(workload_w(1, 1, seed=0))
        assert come_to("T")
    assert come_to("S")
    signal_tree(process.pid, signal.SIGTERM)
    process.wait()


def test_who_is_missing_is_said_and_the_others_take_turns(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    figures = PeerFigures(10.0, 1.0, 2.0, 3.0, 4.0)
    monkeypatch.setattr(bench_peers, "serving", lambda model, options: nullcontext("server"))
    monkeypatch.setattr(bench_peers, "measure", lambda server, load: figures)
    monkeypatch.setattr(bench_peers, "has_package", lambda python, package: package == "vllm")
    monkeypatch.setattr(bench_peers, "dense_folder", lambda model: nullcontext("folder"))
    monkeypatch.setattr(bench_peers, "vllm_serving", broken_server)
    arguments = {"model": str(tmp_path / "model.gguf"), "streams": [1, 2], "configurations": ["int8"], "options": []}
    pythons = {"peers_python": Path("python"), "vllm_python": Path("python"), "vllm_dtype": "float32"}
    content = bench_peers.run(Namespace(**arguments, **pythons, vllm_option=[], runs=2))
    assert content["left_out"] == [
        "OpenVINO GenAI is left out: python has no openvino_genai; make bench-peers installs it",
        "vLLM is left out: it did not start",
    ]
    assert content["left_out"][1] in capsys.readouterr().out
    assert [(row["streams"], row["who"], row["ratios"]) for row in content["rows"]] == [
        (1, "Octavo int8", {}),
        (2, "Octavo int8", {}),
    ]
    assert len(content["each_run"]["Octavo int8"][2]) == 2


@contextmanager
def broken_server(*arguments: Any) -> Iterator[None]:
    raise RuntimeError("it did not start")
    yield


def test_the_managers_table_does_without_ratios_where_vllm_is_absent() -> None:
    times = {"p50_us": 12.34, "p99.9_us": 1234.5}
    names = ("admit", "grow", "release", "request", "hash long", "look up long")
    row: dict[str, Any] = {"who": "Octavo", "blocks": 10_000, "shared": 0.9, "operations": dict.fromkeys(names, times)}
    document = {"rows": [row, row | {"ratios": dict.fromkeys(names, 0.5)}], "rounds": 3, "requests": 2000}
    lines = managers_table(document).splitlines()
    assert lines[2].startswith("| Octavo | 10,000 | 90% | 12.3 / 1,234 |")
    assert lines[3].startswith("| Octavo | 10,000 | 90% | 12.3 / 1,234 (0.50) |")


def test_a_kill_that_loses_nothing_and_one_that_loses_all_are_one_row() -> None:
    row = row_of("1", [Kill(3.0, 9.0, [4.0, 5.0], 2, 20), Kill(5.0, 9.0, [], 0, 0)])
    assert (row["lost"], row["answers"], row["recomputed_tokens"], row["wait_max_s"]) == (2, 6, 20, 5.0)
    assert "wait_max_s" not in row_of("1", [Kill(5.0, 9.0, [], 0, 0)])


async def completed(*lines: bytes) -> list[list[int]]:
    """Through a server that answers this."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.writelines(lines)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        client = VllmServer(server.sockets[0].getsockname()[1], 0, "")
        return [tokens async for tokens in client.complete([1, 2], 3)]


OK, END = b"HTTP/1.1 200 OK\r\nserver: x\r\n\r\n", b"data: [DONE]\n\n"
TOKENS = b'data: {"choices": [{"token_ids": [5, 6]}]}\n\n'


async def test_tokens_are_read_as_they_come() -> None:
    assert await completed(OK, TOKENS, b'data: {"choices": []}\n\n', TOKENS, END) == [[5, 6], [5, 6]]


@pytest.mark.parametrize(
    "lines",
    [
        (OK, TOKENS),
        (b"HTTP/1.1 503 Unavailable\r\n\r\n",),
        (OK, TOKENS, b'data: {"error": {"code": 500}}\n\n', END),
        (),
    ],
)
async def test_an_answer_that_breaks_is_no_answer(lines: tuple[bytes, ...]) -> None:
    with pytest.raises(ConnectionError):
        await completed(*lines)
