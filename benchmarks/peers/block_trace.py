"""Requests that block managers are compared on: recorded once, replayed on each by this one loop, in its own process.

A request is a prompt of 512 tokens and an answer of 64, which comes block by block. It runs in environments that have
nothing of Octavo, so it imports the standard library alone. Not here: any manager.
"""

import gc
import json
import random
import sys
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

BLOCK_SIZE = 16
PROMPT_TOKENS, COMMON_TOKENS, ANSWER_TOKENS = 512, 480, 64
REQUEST_BLOCKS = (PROMPT_TOKENS + ANSWER_TOKENS) // BLOCK_SIZE
LONG_PROMPT_TOKENS = 50_000
VOCABULARY = 50_000


class Trace(NamedTuple):
    """Token ids; all requests of one round."""

    requests: "list[array[int]]"  # prompt and answer of each
    long_prompt: "array[int]"

    def write(self, path: Path) -> None:
        """As uint32 of this machine, one behind the other."""
        with path.open("wb") as stream:
            for tokens in (*self.requests, self.long_prompt):
                tokens.tofile(stream)


def record(num_requests: int, shared: float, seed: int) -> Trace:
    """Random tokens; of a share of the prompts the first 480 are the same."""
    rng = random.Random(seed)

    def tokens(count: int) -> "array[int]":
        return array("I", rng.choices(range(VOCABULARY), k=count))

    common, requests = tokens(COMMON_TOKENS), []
    for _ in range(num_requests):
        head = common if rng.random() < shared else tokens(COMMON_TOKENS)
        requests.append(head + tokens(PROMPT_TOKENS - COMMON_TOKENS + ANSWER_TOKENS))
    return Trace(requests, tokens(LONG_PROMPT_TOKENS))


def read(path: Path) -> Trace:
    """What `Trace.write` wrote."""
    tokens = array("I", path.read_bytes())
    length, end = PROMPT_TOKENS + ANSWER_TOKENS, len(tokens) - LONG_PROMPT_TOKENS
    return Trace([tokens[start : start + length] for start in range(0, end, length)], tokens[end:])


class Manager(Protocol):
    """One manager, behind what a scheduler does with it. Tokens come in the form that `native` made of them."""

    def native(self, tokens: "array[int]") -> Any:
        """Not timed."""

    def admit(self, number: int, prompt: Any) -> Any:
        """Look up, allocate, compute, make findable; returns what the other calls need of it."""

    def grow(self, request: Any, tokens: Any) -> None:
        """A block's worth of tokens more, computed and findable."""

    def release(self, request: Any) -> None: ...

    def hash(self, prompt: Any) -> Any:
        """The keys of its blocks and nothing else."""

    def look_up(self, number: int, prompt: Any, keys: Any) -> int:
        """How many of its tokens are cached. Where a manager can't be given `keys`, it makes them again."""

    hashes_in_look_up: bool


Times = dict[str, list[float]]


def replay(manager: Manager, trace: Trace, num_untimed: int, num_look_ups: int) -> Times:
    """CPU seconds by operation, so that what else runs on the machine counts little. The first requests only fill the
    pool with what is cached and never hit.
    """
    times: Times = {name: [] for name in ("admit", "grow", "release", "request", "hash long", "look up long")}
    parts = [
        [manager.native(tokens[start:end]) for start, end in _parts()] for tokens in trace.requests
    ]  # before all: conversions are no manager's work
    for number, (prompt, *answer) in enumerate(parts):
        if number == num_untimed:
            gc.collect()
            for taken in times.values():
                taken.clear()
        _request(manager, number, prompt, answer, times)
    _look_ups(manager, manager.native(trace.long_prompt), len(parts), num_look_ups, times)
    return times


def _parts() -> list[tuple[int, int]]:
    ends = range(PROMPT_TOKENS, PROMPT_TOKENS + ANSWER_TOKENS + 1, BLOCK_SIZE)
    return [(0, PROMPT_TOKENS), *((end - BLOCK_SIZE, end) for end in ends[1:])]


def _request(manager: Manager, number: int, prompt: Any, answer: list[Any], times: Times) -> None:
    clock = time.thread_time
    began = clock()
    request = manager.admit(number, prompt)
    last = clock()
    times["admit"].append(last - began)
    for tokens in answer:
        manager.grow(request, tokens)
        now = clock()
        times["grow"].append(now - last)
        last = now
    manager.release(request)
    now = clock()
    times["release"].append(now - last)
    times["request"].append(now - began)


def _look_ups(manager: Manager, prompt: Any, number: int, count: int, times: Times) -> None:
    manager.release(manager.admit(number, prompt))
    clock = time.thread_time
    for _ in range(count):
        number += 1
        began = clock()
        keys = manager.hash(prompt)
        hashed = clock()
        found = manager.look_up(number, prompt, keys)
        looked_up = clock() - hashed
        assert found == (LONG_PROMPT_TOKENS - 1) // BLOCK_SIZE * BLOCK_SIZE, found
        times["hash long"].append(hashed - began)
        again = hashed - began if manager.hashes_in_look_up else 0.0
        times["look up long"].append(max(0.0, looked_up - again))


def percentiles(times: list[float]) -> dict[str, float]:
    """In microseconds."""
    ordered = sorted(times)
    last = len(ordered) - 1
    return {f"p{share:g}_us": 1e6 * ordered[min(last, int(len(ordered) * share / 100))] for share in (50, 99.9)}


def serve(version: str, make_manager: Callable[[int], Manager]) -> None:
    """Replay what standard input asks for, line by line; a new manager each time."""
    print(json.dumps({"version": version}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        manager = make_manager(asked["blocks"])
        times = replay(manager, read(Path(asked["trace"])), asked["untimed"], asked["look_ups"])
        del manager
        print(json.dumps({name: percentiles(taken) for name, taken in times.items()}), flush=True)
