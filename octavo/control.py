"""What a running launcher can be asked to do, over a Unix socket in its run directory, and both ends of that.

One JSON object a line. Asked: {"command": "rollout"}. Answered: {"line": "..."} any number of times, and at last
{"failure": null} or {"failure": "why"}. Who may write into the run directory may ask: its mode is 0700.
"""

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

NAME = "control.sock"
ASK_TIMEOUT_S = 5.0

Command = Callable[[Callable[[str], None]], Awaitable[str | None]]  # is given what says a line; why it failed, or None


@asynccontextmanager
async def listening(directory: Path, commands: Mapping[str, Command]) -> AsyncIterator[None]:
    """Answer in the run directory while the context lasts. A command goes on when who asked for it leaves.

    Raises:
        OSError: the socket cannot be made.
    """

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        def send(message: Mapping[str, Any]) -> None:
            if not writer.is_closing():
                writer.write(json.dumps(message).encode() + b"\n")

        with contextlib.suppress(OSError):
            try:
                async with asyncio.timeout(ASK_TIMEOUT_S):
                    name = _command_of(await reader.readline())
            except (TimeoutError, ValueError):
                name = ""
            command = commands.get(name)
            if command is None:
                send({"failure": f"it knows no command {name!r}, only {', '.join(commands)}"})
            else:
                send({"failure": await command(lambda line: send({"line": line}))})
            await writer.drain()
        writer.close()

    server = await asyncio.start_unix_server(answer, directory / NAME)
    try:
        yield
    finally:
        server.close()


def _command_of(line: bytes) -> str:
    asked = json.loads(line)
    return str(asked.get("command", "")) if isinstance(asked, dict) else ""


def ask(directory: Path, command: str) -> Iterator[str]:
    """Have a launcher do something; yields what it says until it is done.

    Raises:
        RuntimeError: it could not, or ended before; the message says why.
        OSError: nobody listens there.
    """
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(directory / NAME))
        connection.sendall(json.dumps({"command": command}).encode() + b"\n")
        with connection.makefile("r", encoding="utf-8") as lines:
            for line in lines:
                message = json.loads(line)
                if "line" in message:
                    yield message["line"]
                elif message["failure"] is None:
                    return
                else:
                    raise RuntimeError(message["failure"])
    raise RuntimeError("it ended before it was done")
