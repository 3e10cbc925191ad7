"""The same kill in vLLM, in an environment of its own: its engine process is killed under streams.

vLLM's wheels on PyPI are for CUDA; one for CPUs is built from source, or comes from vLLM's own index. Not here: Octavo.
"""

import http.client
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.servers import children, free_port

START_S = 900.0
ENGINE = "EngineCore"  # how vLLM names the process that runs the model
NUM_FRESH_TOKENS = 5


def kill_vllm(python: str, model: str, prompts: Sequence[str]) -> dict[str, Any]:
    """A row of the table: one kill, and a new server after it, since none of the old one comes back.

    Raises:
        RuntimeError: it did not start, or its engine process was not found.
    """
    port = free_port()
    server = _start(python, model, port)
    try:
        streams = [_Stream(port, model, prompt) for prompt in prompts]
        _wait_for(lambda: all(stream.num_tokens >= NUM_FRESH_TOKENS for stream in streams), 300.0)
        killed = time.monotonic()
        os.kill(_engine_below(server.pid), signal.SIGKILL)
        for stream in streams:
            stream.thread.join(60.0)
        lost = sum(not stream.is_whole for stream in streams)
    finally:
        server.terminate()
        server.wait(60.0)
    successor = _start(python, model, port)
    ready_s = time.monotonic() - killed
    successor.terminate()
    successor.wait(60.0)
    return {"process": "vLLM's engine", "kills": 1, "streams": len(prompts), "ready_p50_s": ready_s, "lost": lost}


class _Stream:
    """One completion, read as it comes."""

    def __init__(self, port: int, model: str, prompt: str) -> None:
        self.num_tokens = 0
        self.is_whole = False
        body = {"model": model, "prompt": prompt, "max_tokens": 400, "ignore_eos": True, "stream": True}
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300.0)
        self._connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        self.thread = threading.Thread(target=self._read, daemon=True)
        self.thread.start()

    def _read(self) -> None:
        try:
            for line in self._connection.getresponse():
                if line.startswith(b"data: [DONE]"):
                    self.is_whole = self.num_tokens >= 400
                elif line.startswith(b"data: ") and b'"error"' not in line:
                    self.num_tokens += 1
        except (OSError, http.client.HTTPException):
            pass  # lost: it is not whole


def _start(python: str, model: str, port: int) -> "subprocess.Popen[bytes]":
    command = [python, "-m", "vllm.entrypoints.openai.api_server", f"--model={model}", f"--port={port}"]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _wait_for(lambda: server.poll() is not None or _answers(port), START_S)
    if server.poll() is not None:
        raise RuntimeError(f"vLLM ended with {server.returncode}: {' '.join(command)}")
    return server


def _answers(port: int) -> bool:
    try:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=2.0)
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False


def _engine_below(pid: int) -> int:
    """vLLM sets the name of the process: in its command line, or, without setproctitle, in that of its thread."""
    waiting = [pid]
    while waiting:
        found = children(waiting.pop())
        for child, argv in found.items():
            if ENGINE in " ".join(argv) or ENGINE in Path(f"/proc/{child}/comm").read_text():
                return child
        waiting += found
    raise RuntimeError(f"vLLM has no process named {ENGINE}")


def _wait_for(condition: Any, within_s: float) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline:
            raise RuntimeError(f"vLLM did not get there within {within_s:g} s")
        time.sleep(0.1)
