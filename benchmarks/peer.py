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


@dataclass(frozen=True)
class PeerFigures:
    """What one load gave."""

    output_tokens_per_s: float
    first_token_p50_ms: float
    between_tokens_p50_ms: float
    between_tokens_p99_ms: float
    cpu_s: float


class Peer:
    """Measures one load at a time."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process
        self.version = str(self._read()["version"])

    def measure(self, load: Load) -> PeerFigures:
        """All asks at once: a load whose streams are as many as its asks."""
        assert load.max_streams >= len(load.asks)
        num_generated = load.asks[0].num_generated
        self._write({"prompts": [ask.prompt for ask in load.asks], "generate": num_generated})
        said = self._read()
        firsts, gaps = said["firsts_s"], said["gaps_s"]
        return PeerFigures(
            output_tokens_per_s=round(len(load.asks) * num_generated / said["wall_s"], 1),
            first_token_p50_ms=round(percentile(firsts, 0.5) * 1e3, 1),
            between_tokens_p50_ms=round(percentile(gaps, 0.5) * 1e3, 2),
            between_tokens_p99_ms=round(percentile(gaps, 0.99) * 1e3, 2),
            cpu_s=round(said["cpu_s"], 2),
        )

    def _write(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message) + "\n")
        self._process.stdin.flush()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        while line := self._process.stdout.readline():
            if line.startswith("{"):  # libraries print what they like
                return dict(json.loads(line))
        raise RuntimeError(f"the peer ended with exit code {self._process.wait()}")


@contextmanager
def openvino_genai(python: Path, gguf: Path) -> Iterator[Peer]:
    """OpenVINO GenAI with a GGUF file, loaded when this yields."""
    command = [str(python), str(PEERS / "openvino_genai_peer.py"), str(gguf)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield Peer(process)
    finally:
        assert process.stdin is not None
        process.stdin.close()
        process.wait(60)


def has_package(python: Path, package: str) -> bool:
    """Whether that environment can import it."""
    if not python.is_file():
        return False
    return subprocess.run([str(python), "-c", f"import {package}"], capture_output=True, check=False).returncode == 0
