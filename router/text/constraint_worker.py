"""A process of its own that compiles constraints: what a constraint asks of time and memory, it asks of this process.

Run as `python -m router.text.constraint_worker`. Lines of JSON: first the vocabulary, answered by whether it can be
used; then one constraint after another, answered by its grammar or by why it is refused. A constraint beyond the limits
is answered by the end of the process. Not here: starting it again (`router.clients.compiler`).
"""

import ctypes
import json
import os
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any

from llguidance import LLTokenizer

from octavo.grammar import vocabulary_of
from router.request import Constraint
from router.text.constraint import RefusedError, allows, grammar_of

# The executor compiles what passes once more for each row, in the way of every stream.
MAX_COMPILE_S = 0.5
# When the kernel ends it: whole seconds of CPU time, and bytes beyond what it has with the vocabulary alone.
_MAX_CPU_S = 2
_MAX_MORE_BYTES = 512 * 1024 * 1024
_NICE = 5  # behind the processes that serve
_PR_SET_PDEATHSIG = 1


def main() -> int:
    """Until its input ends, or the router does."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: the router decides when it ends
    os.nice(_NICE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        vocabulary = vocabulary_of(**json.loads(sys.stdin.readline()))
    except ValueError as error:
        _answer(error=str(error))
        return 0
    _limit_memory()
    _answer(error="")
    for line in sys.stdin:
        _limit_time()
        question = json.loads(line)
        _answer(**_compiled(Constraint(**question["constraint"]), question["resumed"], vocabulary))
    return 0


def _compiled(constraint: Constraint, resumed: list[list[int]], vocabulary: LLTokenizer) -> dict[str, Any]:
    began = time.process_time()
    try:
        grammar = grammar_of(constraint, vocabulary)
    except RefusedError as error:
        return {"refusal": str(error)}
    used_s = time.process_time() - began
    if used_s > MAX_COMPILE_S:
        return {"refusal": f"takes {used_s:.1f} s of CPU time to compile; at most {MAX_COMPILE_S} s: make it simpler"}
    misfits = [place for place, token_ids in enumerate(resumed) if not allows(grammar, vocabulary, token_ids)]
    return {"misfit": misfits[0]} if misfits else {"grammar": grammar}


def _answer(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


def _limit_time() -> None:
    used_s = int(time.process_time())
    resource.setrlimit(resource.RLIMIT_CPU, (used_s + _MAX_CPU_S, resource.RLIM_INFINITY))


def _limit_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + _MAX_MORE_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


if __name__ == "__main__":
    sys.exit(main())
