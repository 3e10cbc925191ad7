"""vLLM's own OpenAI server on CPUs, in an environment of its own: started, asked over HTTP, measured, stopped.

It serves the weights that Octavo makes of a model (`dense_model`). Not here: what a kill of it costs (vllm_engine).
"""

import asyncio
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

from benchmarks.loads import Ask, Load
from benchmarks.peer import PeerFigures, figures_of
from benchmarks.servers import children, cpu_seconds, free_port, stop
from octavo.guard import guarded

START_S = 600.0
STOP_S = 60.0
NAME = "model"  # under which it serves
# As for the other peers: 4 GiB of KV, 64 sequences, steps of up to 2,048 tokens, no prefix cache.
OPTIONS = ("--max-model-len=4096", "--max-num-seqs=64", "--max-num-batched-tokens=2048", "--no-enable-prefix-caching")


def fastest_dtype() -> str:
    """Of weights and KV, on this processor: without AVX-512 torch multiplies bfloat16 in a sixth of float32's speed."""
    return "bfloat16" if "avx512f" in Path("/proc/cpuinfo").read_text() else "float32"


@dataclass(frozen=True)
class VllmServer:
    """A server that answers."""

    port: int
    pid: int
    version: str

    def measure(self, load: Load) -> PeerFigures:
        """All asks at once: a load whose streams are as many as its asks."""
        assert load.max_streams >= len(load.asks)
        cpu_s = self.cpu_seconds()
        wall_s, answers = asyncio.run(self._run(load.asks))
        gaps = [after - before for times in answers for before, after in itertools.pairwise(times)]
        num_generated = sum(ask.num_generated for ask in load.asks)
        cpu_s = self.cpu_seconds() - cpu_s
        return figures_of(num_generated, wall_s, cpu_s, [times[0] for times in answers], gaps)

    def cpu_seconds(self) -> float:
        """Of the server and all that it started, since they began."""
        return _cpu_seconds_below(self.pid)

    async def _run(self, asks: list[Ask]) -> tuple[float, list[list[float]]]:
        """Wall seconds, and when tokens of each answer came, from the begin."""
        began = time.perf_counter()

        async def one(ask: Ask) -> list[float]:
            times, count = [], 0
            async for tokens in self.complete(ask.prompt, ask.num_generated):
                times.append(time.perf_counter() - began)
                count += len(tokens)
            assert count == ask.num_generated, f"{count} tokens came of {ask.num_generated}"
            return times

        answers = await asyncio.gather(*map(one, asks))
        return time.perf_counter() - began, answers

    async def complete(self, prompt: str | list[int], num_generated: int) -> AsyncIterator[list[int]]:
        """Token ids as they come, greedy. Raises ConnectionError where the answer breaks, or is none."""
        asked = {"model": NAME, "prompt": prompt, "max_tokens": num_generated, "temperature": 0, "ignore_eos": True}
        body = json.dumps({**asked, "stream": True, "return_token_ids": True}).encode()
        head = f"POST /v1/completions HTTP/1.0\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            writer.write(head.encode() + body)
            status = await reader.readline()
            if b" 200 " not in status:
                raise ConnectionError(f"vLLM answers {status!r}")
            async for line in reader:  # of HTTP 1.0: events as they are, until the connection ends
                if line.startswith(b"data: [DONE]"):
                    return
                if line.startswith(b"data: {"):
                    said = json.loads(line[6:])
                    if "error" in said:
                        raise ConnectionError(f"vLLM says {said['error']}")
                    if said["choices"] and (tokens := said["choices"][0].get("token_ids")):
                        yield tokens
            raise ConnectionError("the answer broke")
        finally:
            writer.close()


@contextmanager
def vllm_serving(python: Path, folder: str, dtype: str, options: Sequence[str] = ()) -> Iterator[VllmServer]:
    """A server with the model in this folder, ready when this yields; a minute and more, stopped afterwards.

    Args:
        options: more of vLLM's.

    Raises:
        RuntimeError: it did not start.
    """
    port = free_port()
    command = [str(python), "-m", "vllm.entrypoints.openai.api_server", f"--model={folder}", f"--dtype={dtype}"]
    command += ["--host=127.0.0.1", f"--port={port}", f"--served-model-name={NAME}", *OPTIONS, *options]
    process = subprocess.Popen(guarded(command), env=_environment(), stdin=subprocess.DEVNULL, stdout=sys.stderr)
    try:
        _wait_until_it_answers(process, port)
        yield VllmServer(port, process.pid, _version(python))
    finally:
        stop(process, STOP_S)  # where its engine was killed, it may wait for that


def _environment() -> dict[str, str]:
    """All processors compute, as for the others: by itself vLLM keeps one of them free for its scheduler."""
    processors = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    own = {"VLLM_CPU_KVCACHE_SPACE": "4", "VLLM_CPU_OMP_THREADS_BIND": processors}
    offline = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE")}
    return {**own, **offline, **kept}


def _wait_until_it_answers(process: "subprocess.Popen[bytes]", port: int) -> None:
    deadline = time.monotonic() + START_S
    while not _is_healthy(port):
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"vLLM did not start within {START_S:g} s, or ended: exit code {process.poll()}")
        time.sleep(0.2)


def _is_healthy(port: int) -> bool:
    try:
        with urlopen(f"http://127.0.0.1:{port}/health", timeout=5.0) as response:
            return bool(response.status == 200)
    except (URLError, OSError):
        return False


def _version(python: Path) -> str:
    """Of whichever distribution it is, without importing it, which takes half a minute."""
    named = "(d.version for name in ('vllm-cpu', 'vllm') for d in metadata.distributions(name=name))"
    command = f"from importlib import metadata; print(next{named})"
    found = subprocess.run([str(python), "-c", command], capture_output=True, text=True, check=True)
    return found.stdout.strip()


def _cpu_seconds_below(pid: int) -> float:
    """Of a process and those that it and its children started, so far."""
    return cpu_seconds(pid) + sum(map(_cpu_seconds_below, children(pid)))


@contextmanager
def dense_folder(model: str) -> Iterator[str]:
    """See `dense_model`, which runs in a process of its own because it may have to load the model."""
    with tempfile.TemporaryDirectory(prefix="octavo-dense-") as folder:
        subprocess.run([sys.executable, "-m", "benchmarks.dense_model", model, folder], check=True)
        yield folder
