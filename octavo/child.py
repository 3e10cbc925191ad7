"""One supervised process: started in a session of its own, its output read line by line, ended, reaped.

Not here: when to start, restart or stop it (`octavo.supervisor`).
"""

import asyncio
import contextlib
import os
import signal
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from octavo.guard import guarded

TAIL_LINES = 20
_LAST_OUTPUT_TIMEOUT_S = 1.0
_BETWEEN_SIGNALS_S = 0.2  # two that come together count as one
_PUT_AWAY_S = 1.0
_MAX_LINE_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """How often a child that died is started again.

    Attributes:
        max_restarts: within `window_s`; one more is a failure of the whole.
        window_s: seconds that a restart is remembered for.
        first_delay_s: before the first restart of a window; each further one waits twice as long.
        max_delay_s: the longest wait.
    """

    max_restarts: int = 5
    window_s: float = 300.0
    first_delay_s: float = 0.25
    max_delay_s: float = 10.0


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """What to run, and how to tell that it is ready.

    Attributes:
        name: before its log lines: `executor-0`.
        argv: program and arguments; the program by its absolute path.
        address: where its health is asked: `unix:/path` or `host:port`.
        health_service: full name of the service that must be SERVING.
        start_timeout_s: seconds until it must be ready.
        stop_grace_s: seconds between SIGTERM and SIGKILL.
        restart: None: its death ends everything.
        silence_limit_s: seconds without any answer after which it is killed; 0: it is never.
        pool: children of one pool can take each other's place; empty: it has no other.
        is_reserve: started by a roll-out alone.
    """

    name: str
    argv: tuple[str, ...]
    address: str
    health_service: str
    start_timeout_s: float = 300.0
    stop_grace_s: float = 40.0
    restart: RestartPolicy | None = None
    silence_limit_s: float = 0.0
    pool: str = ""
    is_reserve: bool = False


class Child:
    """A process of a spec; started again, it is a new process with the same name.

    Args:
        spec: what to run.
        environment: its whole environment.
        write_line: called with each line of its output, stdout and stderr together.
    """

    def __init__(self, spec: ChildSpec, environment: dict[str, str], write_line: Callable[[str], None]) -> None:
        self.spec = spec
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)  # its last lines
        self._environment = environment
        self._write_line = write_line
        self._process: asyncio.subprocess.Process | None = None
        self._output: _Output | None = None

    @property
    def pid(self) -> int | None:
        """Of the process that runs; None before the first start and after it was reaped."""
        running = self._process is not None and self._process.returncode is None
        return self._process.pid if self._process and running else None

    async def start(self) -> None:
        """Spawn; does not wait until it is ready. The process before must have been waited for."""
        _remove_stale_socket(self.spec.address)
        self.tail.clear()
        self._output = await _Output.open(self._take)
        try:
            self._process = await self._spawn(self._output.write_fd)
        finally:
            self._output.close_write_end()

    async def _spawn(self, output_fd: int) -> asyncio.subprocess.Process:
        # A session of its own: Ctrl-C reaches the launcher alone, which stops the children in order.
        return await asyncio.create_subprocess_exec(
            *guarded(self.spec.argv),
            env=self._environment,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output_fd,
            stderr=output_fd,
            start_new_session=True,
        )

    async def wait(self) -> int:
        """Until the process has ended and was reaped, and its last lines were read; its exit status."""
        if self._process is None or self._output is None:
            raise RuntimeError(f"{self.spec.name} was never started")
        status = await self._process.wait()
        self._kill_group()  # what it started and left behind
        await self._output.drain(_LAST_OUTPUT_TIMEOUT_S)
        return status

    async def stop(self) -> None:
        """SIGTERM, and SIGKILL when the grace is over; returns when it was reaped."""
        if self.pid is None:
            return
        self.signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(self.spec.stop_grace_s):
                await self.wait()
        except TimeoutError:
            self._write_line(f"did not end within {self.spec.stop_grace_s:g} s of SIGTERM: killed")
            self.kill()
            await self.wait()

    async def end_at_once(self) -> None:
        """Without waiting for what runs: SIGTERM twice, on which a process of ours still puts away the memory and the
        sockets that it owns, then SIGKILL."""
        for pause_s in (_BETWEEN_SIGNALS_S, _PUT_AWAY_S):
            self.signal(signal.SIGTERM)
            await asyncio.sleep(pause_s)
        self.kill()

    def kill(self) -> None:
        """SIGKILL, to whatever it started too."""
        if self.pid is not None:
            self._kill_group()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process alone."""
        if self._process is not None and self.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    def _kill_group(self) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def _take(self, line: bytes) -> None:
        text = line.decode("utf-8", "replace").rstrip("\r")
        self.tail.append(text)
        self._write_line(text)


class _Output(asyncio.Protocol):
    """The reading end of a child's output. A pipe of our own: asyncio's would make the end of the process wait for
    everyone who still holds the writing end."""

    def __init__(self, take_line: Callable[[bytes], None]) -> None:
        self.write_fd = -1
        self._take_line = take_line
        self._rest = b""
        self._ended = asyncio.Event()
        self._transport: asyncio.ReadTransport | None = None

    @classmethod
    async def open(cls, take_line: Callable[[bytes], None]) -> "_Output":
        read_fd, write_fd = os.pipe()
        loop = asyncio.get_running_loop()
        transport, output = await loop.connect_read_pipe(lambda: cls(take_line), os.fdopen(read_fd, "rb", 0))
        output._transport, output.write_fd = transport, write_fd
        return output

    def close_write_end(self) -> None:
        """The launcher's own; the child has its copy by now."""
        os.close(self.write_fd)

    async def drain(self, timeout_s: float) -> None:
        """Until the last line, or for as long where a grandchild keeps the pipe open; then read no more."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._ended.wait()
        if self._transport is not None:
            self._transport.close()

    def data_received(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > _MAX_LINE_BYTES:
            lines, self._rest = [*lines, self._rest], b""
        for line in lines:
            self._take_line(line)

    def connection_lost(self, error: Exception | None) -> None:
        if self._rest:
            self._take_line(self._rest)
        self._ended.set()


def _remove_stale_socket(address: str) -> None:
    if address.startswith("unix:"):
        Path(address.removeprefix("unix:")).unlink(missing_ok=True)


def describe_status(status: int) -> str:
    """What an exit status of `Child.wait` says."""
    if status >= 0:
        return f"ended with exit code {status}"
    return f"was killed by {signal.Signals(-status).name}"
