"""Chat templates rendered in processes of their own, within limits of time and memory (docs/decisions/0067).

Here belong the processes: making, feeding and ending them. Not here: what runs in them (`template_worker`), and what a
client is told (`chat`).
"""

import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import jinja2
import markupsafe

from router.text import template_worker
from router.text.template_worker import LENGTH

MEMORY_BYTES = 512 * 1024 * 1024
MAX_WAIT_S = 60.0  # by the clock on the wall, for a process that is stopped or starved


class RenderingEndedError(Exception):
    """The process ended, or was ended, before it answered; the message says why."""


class TemplateProcesses:
    """One template, and processes that render it: as many as are asked at a time, kept for the next.

    Args:
        template: Jinja.
        special_tokens: by the names that templates know.
        cpu_s: seconds of CPU time for one chat.
    """

    def __init__(self, template: str, special_tokens: dict[str, Any], cpu_s: float) -> None:
        self._first = {"template": template, "cpu_s": cpu_s, "memory_bytes": MEMORY_BYTES}
        self._special_tokens = {name: _plain(value) for name, value in special_tokens.items()}
        self._cpu_s = cpu_s
        self._idle: list[_Process] = []
        self._lock = threading.Lock()
        weakref.finalize(self, _end_all, self._idle)

    def render(self, messages: list[dict[str, str]], *, add_generation_prompt: bool, max_chars: int) -> dict[str, Any]:
        """What `template_worker.answer_to` says. Waits for it: call it off the event loop.

        Raises:
            RenderingEndedError: out of time or memory.
        """
        with self._lock:
            process = self._idle.pop() if self._idle else None
        process = process or _Process(self._first)
        chat = {
            "messages": messages,
            "add_generation_prompt": add_generation_prompt,
            "special_tokens": self._special_tokens,
            "max_chars": max_chars,
        }
        try:
            answer = process.ask(chat)
        except (OSError, EOFError) as error:
            raise RenderingEndedError(process.end(self._cpu_s)) from error
        with self._lock:
            self._idle.append(process)
        return answer


class _Process:
    """One worker."""

    def __init__(self, first: dict[str, Any]) -> None:
        libraries = [str(Path(library.__file__ or "").parents[1]) for library in (jinja2, markupsafe)]
        # Nothing of the router's environment: a template that breaks out finds no secret there.
        environment = {"PYTHONPATH": os.pathsep.join(libraries)}
        environment |= {name: os.environ[name] for name in ("TZ",) if name in os.environ}
        self._popen = subprocess.Popen(
            [sys.executable, "-P", "-S", template_worker.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            cwd="/",
            bufsize=0,
        )
        self._send(first)

    def ask(self, message: dict[str, Any]) -> dict[str, Any]:
        """Raises OSError or EOFError where the process ends instead of answering, or does nothing."""
        self._send(message)
        deadline_s = time.monotonic() + MAX_WAIT_S
        (length,) = LENGTH.unpack(self._read(LENGTH.size, deadline_s))
        return json.loads(self._read(length, deadline_s))

    def end(self, cpu_s: float) -> str:
        """Kill it, if it is not dead; why it ended."""
        self._popen.kill()
        status = self._popen.wait()
        for pipe in (self._popen.stdin, self._popen.stdout):
            if pipe is not None:
                pipe.close()
        if status in (-signal.SIGPROF, -signal.SIGKILL):
            return f"it takes more than {cpu_s:g} s of CPU time"
        return f"it takes more than {MEMORY_BYTES // 2**20} MiB of memory"

    def _send(self, message: dict[str, Any]) -> None:
        body = json.dumps(message).encode()
        view = memoryview(LENGTH.pack(len(body)) + body)
        assert self._popen.stdin is not None, "it is a pipe"
        while view:
            view = view[os.write(self._popen.stdin.fileno(), view) :]

    def _read(self, length: int, deadline_s: float) -> bytes:
        assert self._popen.stdout is not None, "it is a pipe"
        descriptor = self._popen.stdout.fileno()
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        pieces: list[bytes] = []
        while length:
            if not poll.poll(max(0.0, deadline_s - time.monotonic()) * 1000):
                raise TimeoutError("the process does nothing")
            piece = os.read(descriptor, min(length, 1 << 20))
            if not piece:
                raise EOFError("the process has ended")
            pieces.append(piece)
            length -= len(piece)
        return b"".join(pieces)


def _end_all(processes: list[_Process]) -> None:
    for process in processes:
        process.end(0)


def _plain(value: Any) -> Any:
    """Special tokens are strings, objects that are written as one, or lists of them."""
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else str(value)
