"""The client of the process that compiles constraints: one at a time, and a new process when one was too hard.

The process begins with the first constraint and ends with `close`.
"""

import asyncio
import contextlib
import json
import logging
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from octavo.errors import FieldViolation, OctavoError, invalid_argument
from router import refusals
from router.request import Constraint

log = logging.getLogger(__name__)

_MODULE = "router.text.constraint_worker"
_MAX_KEPT = 64  # answers: most clients ask for few constraints again and again
_MAX_LINE_BYTES = 64 * 1024 * 1024
_MAX_MESSAGE_CHARS = 300
_TOO_HARD = "takes more than 2 s of CPU time or 512 MiB to compile; make it simpler"
_NO_VOCABULARY = "cannot be followed by this model: the bytes of its tokens are not known"

Resumed = Sequence[Sequence[int]]


class ConstraintCompiler:
    """Constraints into grammars of one vocabulary.

    Args:
        definition: gives a tokenizer of the tokenizers library as the JSON that it writes itself as, None for another
            kind; called in a thread.
        end_ids: tokens that end a sequence.
    """

    def __init__(self, definition: Callable[[], str | None], vocabulary_size: int, end_ids: frozenset[int]) -> None:
        self._definition = definition
        self._vocabulary_size = vocabulary_size
        self._end_ids = sorted(end_ids)
        self._has_vocabulary = True  # until it is known better
        self._process: Process | None = None
        self._is_closed = False
        self._turn = asyncio.Lock()
        self._kept: dict[Constraint, dict[str, str]] = {}

    async def grammar_of(self, constraint: Constraint, resumed: Resumed = ()) -> str:
        """What executors follow.

        Args:
            resumed: tokens of each answer that is resumed; they must be such as the constraint allows.

        Raises:
            OctavoError: INVALID_ARGUMENT, with what is wrong and where.
        """
        answer = None if resumed else self._kept.get(constraint)
        if answer is None:
            async with self._turn:
                answer = await self._compile(constraint, resumed)
            if not resumed:
                self._keep(constraint, answer)
        if "misfit" in answer:
            field = f"resume[{answer['misfit']}].token_ids"
            raise invalid_argument(FieldViolation(field, f"is nothing that constraint.{constraint.kind} allows"))
        if "refusal" in answer:
            raise _refused(constraint, answer["refusal"])
        return answer["grammar"]

    async def close(self) -> None:
        """End the process; who waits for it hears that the engine is lost."""
        self._is_closed = True
        await self._end()

    async def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    def _keep(self, constraint: Constraint, answer: dict[str, str]) -> None:
        self._kept.pop(constraint, None)
        self._kept[constraint] = answer
        if len(self._kept) > _MAX_KEPT:
            del self._kept[next(iter(self._kept))]

    async def _compile(self, constraint: Constraint, resumed: Resumed) -> dict[str, str]:
        if self._is_closed:
            raise refusals.engine_lost()
        try:
            if self._process is None and self._has_vocabulary:
                await self._start()
            if self._process is None:
                return {"refusal": _NO_VOCABULARY}
            process = self._process
            answer = await _ask(process, _line({"constraint": asdict(constraint), "resumed": resumed}))
        except BaseException:  # cancelled in the middle: the answer would be taken for that of the next
            await self._end()
            raise
        return answer if answer is not None else await self._autopsy(process)

    async def _start(self) -> None:
        vocabulary = await asyncio.to_thread(self._vocabulary_line)
        answer: dict[str, str] | None = {"error": "its tokenizer is not one of the tokenizers library"}
        if vocabulary is not None:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", _MODULE, stdin=PIPE, stdout=PIPE, limit=_MAX_LINE_BYTES
            )
            answer = await _ask(self._process, vocabulary)
        if answer is None or answer["error"]:
            log.warning("constraints cannot be served: %s", answer["error"] if answer else "their compiler ended")
            self._has_vocabulary = False
            await self._end()

    def _vocabulary_line(self) -> bytes | None:
        tokenizer = self._definition()
        fields = {"tokenizer": tokenizer, "vocabulary_size": self._vocabulary_size, "end_ids": self._end_ids}
        return None if tokenizer is None else _line(fields)

    async def _autopsy(self, process: Process) -> dict[str, str]:
        """The process ended instead of an answer."""
        self._process = None
        code = await process.wait()
        if self._is_closed:
            raise refusals.engine_lost()
        if code >= 0:
            raise RuntimeError(f"the compiler of constraints ended with exit code {code}")
        log.warning("a constraint was too hard: its compiler ended by signal %d", -code)
        return {"refusal": _TOO_HARD}


def _line(message: dict[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"


async def _ask(process: Process, line: bytes) -> dict[str, str] | None:
    """One line there, one back; None: it ended instead."""
    assert process.stdin is not None, "opened so"
    assert process.stdout is not None, "opened so"
    with contextlib.suppress(ConnectionError):
        process.stdin.write(line)
        await process.stdin.drain()
    answer = await process.stdout.readline()
    return json.loads(answer) if answer else None


def _refused(constraint: Constraint, message: str) -> OctavoError:
    return invalid_argument(FieldViolation(f"constraint.{constraint.kind}", message[:_MAX_MESSAGE_CHARS]))
