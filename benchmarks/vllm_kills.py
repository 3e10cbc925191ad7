"""Kills vLLM's engine process under streams, and writes down what that costs its clients, beside `kills` for Octavo.

    python -m benchmarks.vllm_kills --vllm-python build/vllm-venv/bin/python    # make vllm-venv makes it

vLLM ends with its engine. So a client asks a new server, which this starts as a supervisor would, at once, and asks it
for the whole answer, of which nothing was kept. Each kill needs a start of vLLM.
"""

import argparse
import asyncio
import os
import signal
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import results_file
from benchmarks.kills import PROMPTS
from benchmarks.peer import has_package
from benchmarks.servers import children
from benchmarks.vllm_server import VllmServer, dense_folder, fastest_dtype, vllm_serving

ENGINE = "EngineCore"  # how vLLM names the process that runs the model
NUM_GENERATED = 400
NUM_FRESH_TOKENS = 5


@dataclass
class Stream:
    """One client."""

    prompt: str
    times: list[float] = field(default_factory=list)  # of tokens, by the monotonic clock
    is_whole: bool = False

    async def ask(self, server: VllmServer) -> None:
        """A broken answer is left as it is."""
        try:
            async for tokens in server.complete(self.prompt, NUM_GENERATED):
                self.times += [time.monotonic()] * len(tokens)
            self.is_whole = True
        except (ConnectionError, asyncio.IncompleteReadError):
            pass


@dataclass
class Kill:
    """What one cost."""

    ready_s: float
    start_cpu_s: float  # of the new server
    waits_s: list[float]
    num_lost: int
    num_lost_tokens: int


def kill_engines(serve: Callable[[], AbstractContextManager[VllmServer]], num_kills: int) -> tuple[str, list[Kill]]:
    """Version, and every kill.

    Raises:
        RuntimeError: it did not start, or its engine process was not found.
    """
    found: list[Kill] = []
    with ExitStack() as stack:
        server = stack.enter_context(serve())
        while len(found) < num_kills:
            streams = [Stream(prompt) for prompt in PROMPTS]
            killed = asyncio.run(_kill_under(server, streams))
            stack.close()
            server = stack.enter_context(serve())
            ready_s, start_cpu_s = time.monotonic() - killed, server.cpu_seconds()
            broken = [stream for stream in streams if not stream.is_whole]
            waits_s = asyncio.run(_ask_again(server, broken, killed))
            found.append(Kill(ready_s, start_cpu_s, waits_s, len(broken), sum(len(stream.times) for stream in broken)))
            print(found[-1], flush=True)
        return server.version, found


def row_of(version: str, found: list[Kill]) -> dict[str, Any]:
    """Of the table."""
    waits_s = [wait for kill in found for wait in kill.waits_s]
    num_lost = sum(kill.num_lost for kill in found)
    return {
        "process": f"vLLM {version}, its engine",
        "kills": len(found),
        "streams": len(PROMPTS),
        **({"wait_p50_s": statistics.median(waits_s), "wait_max_s": max(waits_s)} if waits_s else {}),
        "start_cpu_p50_s": statistics.median(kill.start_cpu_s for kill in found),
        "ready_p50_s": statistics.median(kill.ready_s for kill in found),
        "recomputed_tokens": sum(kill.num_lost_tokens for kill in found),
        "answers": len(found) * len(PROMPTS) - num_lost,
        "lost": num_lost,
    }


async def _kill_under(server: VllmServer, streams: list[Stream]) -> float:
    answers = asyncio.gather(*(stream.ask(server) for stream in streams))
    while not all(len(stream.times) >= NUM_FRESH_TOKENS for stream in streams):
        assert not answers.done(), "the answers ended before they were under way"
        await asyncio.sleep(0.05)
    killed = time.monotonic()
    os.kill(_engine_below(server.pid), signal.SIGKILL)
    await answers
    return killed


async def _ask_again(server: VllmServer, broken: list[Stream], killed: float) -> list[float]:
    """From the kill to the next token that each client did not have before: of the same answer, from its begin."""

    async def one(stream: Stream) -> float:
        count = 0
        async for tokens in server.complete(stream.prompt, len(stream.times) + 1):
            count += len(tokens)
        assert count == len(stream.times) + 1
        return time.monotonic() - killed

    return list(await asyncio.gather(*map(one, broken)))


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--vllm-python", type=Path, default=Path("build/vllm-venv/bin/python"))
    parser.add_argument("--vllm-dtype", default=fastest_dtype(), help="bfloat16 or float32; without it, the faster one")
    parser.add_argument(
        "--vllm-option", action="append", default=[], help="more of vLLM's: --vllm-option=--enforce-eager"
    )
    parser.add_argument("--json", type=Path, help="where the figures go, instead of benchmarks/results")
    options = parser.parse_args()
    if not has_package(options.vllm_python, "vllm"):
        print(f"vLLM is left out: {options.vllm_python} has no vllm; make vllm-venv makes an environment that has")
        return
    with dense_folder(options.model) as folder:
        serve = partial(vllm_serving, options.vllm_python, folder, options.vllm_dtype, options.vllm_option)
        row = row_of(*kill_engines(serve, options.kills))
    about = {"model": options.model, "dtype": options.vllm_dtype, "options": options.vllm_option}
    content = {**about, "rows": [row]}
    print(results_file.write("vllm_kills", "benchmarks.vllm_kills", content, options.json))


if __name__ == "__main__":
    main()
