"""A peer that runs in an environment of its own: started, asked line by line, stopped. What it is, `peers/` says."""

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.load import percentile
from benchmarks.loads import Load

PEERS = Path(__file__).parent / "peers"
STOP_S = 60.0


@dataclass(frozen=True)
class PeerFigures:
    """What one load gave."""

    output_tokens_per_s: float
    first_token_p50_ms: float
    between_tokens_p50_ms: float
    between_tokens_p99_ms: float
    cpu_s: float


def figures_of(num_tokens: int, wall_s: float, cpu_s: float, firsts_s: list[float], gaps_s: list[float]) -> PeerFigures:
    """Of all answers of a load."""
    return PeerFigures(
        output_tokens_per_s=round(num_tokens / wall_s, 1),
        first_token_p50_ms=round(percentile(firsts_s, 0.5) * 1e3, 1),
        between_tokens_p50_ms=round(percentile(gaps_s, 0.5) * 1e3, 2),
        between_tokens_p99_ms=round(percentile(gaps_s, 0.99) * 1e3, 2),
        cpu_s=round(cpu_s, 2),
    )


class PeerProcess:
    """Asked by a line of JSON on its standard input, answers by one; the first one says its version."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process
        self.version = str(self._read()["version"])

    @property
    def pid(self) -> int:
        """Of the process itself."""
        return self._process.pid

    def ask(self, message: dict[str, Any]) -> dict[str, Any]:
        """One question, one answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message) + "\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        while line := self._process.stdout.readline():
            if line.startswith("{"):  # libraries print what they like
                return dict(json.loads(line))
        raise RuntimeError(f"the peer ended with exit code {self._process.wait()}")


@dataclass(frozen=True)
class LoadedPeer:
    """Has a model and measures one load at a time."""

    process: PeerProcess

    def measure(self, load: Load) -> PeerFigures:
        """All asks at once: a load whose streams are as many as its asks."""
        assert load.max_streams >= len(load.asks)
        num_generated = load.asks[0].num_generated
        said = self.process.ask({"prompts": [ask.prompt for ask in load.asks], "generate": num_generated})
        num_tokens = len(load.asks) * num_generated
        return figures_of(num_tokens, said["wall_s"], said["cpu_s"], said["firsts_s"], said["gaps_s"])


@contextmanager
def peer_process(command: list[str]) -> Iterator[PeerProcess]:
    """A script of `peers/`, ready when this yields; it ends with its input."""
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield PeerProcess(process)
    finally:
        assert process.stdin is not None
        process.stdin.close()
        process.wait(STOP_S)


@contextmanager
def openvino_genai(python: Path, gguf: Path) -> Iterator[LoadedPeer]:
    """OpenVINO GenAI with a GGUF file."""
    with peer_process([str(python), str(PEERS / "openvino_genai_peer.py"), str(gguf)]) as process:
        yield LoadedPeer(process)


def has_package(python: Path, package: str) -> bool:
    """Whether that environment has it, by name."""
    if not python.is_file():
        return False
    find = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({package!r}) is None)"
    return subprocess.run([str(python), "-c", find], check=False).returncode == 0
