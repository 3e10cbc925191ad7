"""The console script `octavo`: finds the command, hands it the rest of the line, and imports nothing else.

Each command lives in a module of its own with a `main`-like function `(argv) -> exit code`, imported when it is asked
for, so that `octavo generate` starts without torch.
"""

import importlib
import os
import sys
from collections.abc import Callable
from typing import NamedTuple

from octavo import __version__


class Command(NamedTuple):
    """Where a command is implemented, and what it does in a line."""

    module: str
    function: str
    help: str


COMMANDS = {
    "serve": Command("octavo.launcher", "serve", "serve a model: all three processes, supervised"),
    "generate": Command("octavo.generate", "main", "ask a running server, and stream its answer"),
    "chat": Command("octavo.chat", "main", "talk with a running server"),
    "stats": Command("octavo.stats", "main", "one look at a running stack"),
    "top": Command("octavo.top", "main", "a running stack in the terminal, kept up to date"),
    "rollout": Command("octavo.rollout_command", "main", "new executors for a running server, which goes on"),
    "token": Command("octavo.token_command", "main", "make a token for a tenant"),
    "demo": Command("octavo.demo", "main", "serve a small model, ask it a question, and go on serving"),
    "engine": Command("octavo.launcher", "engine", "run a cache service and its executors, supervised"),
    "cache-service": Command("cache_service.__main__", "main", "run a cache service alone"),
    "executor": Command("executor.__main__", "main", "run an executor alone"),
    "router": Command("router.__main__", "main", "run a router alone"),
}


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns its exit code. Bad usage is one line and 2."""
    arguments = sys.argv[1:] if argv is None else argv
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        sys.stdout.write(_help())
        return 0 if arguments else 2
    if arguments[0] == "--version":
        sys.stdout.write(f"octavo {__version__}\n")
        return 0
    command = COMMANDS.get(arguments[0])
    if command is None:
        sys.stderr.write(f"octavo: no command {arguments[0]!r}; there are {', '.join(COMMANDS)}\n")
        return 2
    return _run(command, arguments[1:])


def _run(command: Command, arguments: list[str]) -> int:
    function: Callable[[list[str]], int] = getattr(importlib.import_module(command.module), command.function)
    try:
        return function(arguments)
    except BrokenPipeError:  # the reader of our output has gone; what is still buffered must not raise again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _help() -> str:
    lines = [f"  {name:<15}{command.help}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            "usage: octavo COMMAND [options]",
            "",
            "LLM serving in separate processes over one paged KV cache.",
            "",
            *lines,
            "",
            "octavo COMMAND --help lists the options of a command; octavo --version says the version.",
            "",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
