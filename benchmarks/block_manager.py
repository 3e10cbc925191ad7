"""What the operations of the block manager cost: in process, and over gRPC to a process of its own, idle and loaded.

    python -m benchmarks.block_manager && python -m benchmarks.tables

The trace: prompts of 512 tokens, of a share of them the first 480 in common; each is allocated, computed and committed,
grows by 64 tokens, block by block, and is released. The pool is full of cached blocks before anything is timed, so that
every new block is an evicted one. Then look-ups of a cached prompt of 50,000 tokens. Over gRPC a number of clients do
this at once, each with a lease of its own and without a pause; all of their calls are counted.
"""

import argparse
import asyncio
import gc
import inspect
import random
import sys
import tempfile
import time
from array import array
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from benchmarks.block_manager_doors import BLOCK_SIZE, Door, InProcess, open_doors
from benchmarks.results_file import write
from cache_service.prefix import KEY_BYTES, blake2b_key, pack_tokens
from octavo.guard import guarded
from octavo.rpc import is_serving

PROMPT_TOKENS, COMMON_TOKENS, NEW_TOKENS = 512, 480, 64
LONG_PROMPT_TOKENS = 50_000
VOCABULARY = 50_000
LOOK_UP = "look up 50,000 tokens"
OPERATIONS = ("allocate", "commit prompt", "extend and commit", "release", LOOK_UP)
MAX_HASHING_NS = 100.0  # a token
HASHING_ROUNDS = 50


class Trace:
    """The requests of one client; times in seconds by operation."""

    def __init__(self, door: Door, shared: float, seed: int = 0) -> None:
        self._door, self._shared, self._rng = door, shared, random.Random(seed)
        self._common = array("I", random.Random(-1).choices(range(VOCABULARY), k=COMMON_TOKENS))  # of all clients
        self._next_id = 1
        self.times: dict[str, list[float]] = {name: [] for name in OPERATIONS}

    def _random(self, count: int) -> "array[int]":
        return array("I", self._rng.choices(range(VOCABULARY), k=count))

    def _new_id(self) -> int:
        self._next_id += 1
        return self._next_id - 1

    async def fill(self) -> None:
        """Until no block is free."""
        while await _done(self._door.num_free()):
            await self._cache(self._random(PROMPT_TOKENS))

    async def _cache(self, prompt: "array[int]") -> None:
        sequence_id = self._new_id()
        await _done(self._door.allocate(sequence_id, prompt))
        await _done(self._door.commit(sequence_id, len(prompt), array("I")))
        await _done(self._door.release(sequence_id))

    async def request(self) -> None:
        """One request, timed."""
        sequence_id, door = self._new_id(), self._door
        is_shared = self._rng.random() < self._shared
        begin = self._common if is_shared else self._random(COMMON_TOKENS)
        prompt, new = begin + self._random(PROMPT_TOKENS - COMMON_TOKENS), self._random(BLOCK_SIZE)
        await self._timed("allocate", lambda: door.allocate(sequence_id, prompt))
        await self._timed("commit prompt", lambda: door.commit(sequence_id, PROMPT_TOKENS, array("I")))
        for num_computed in range(PROMPT_TOKENS, PROMPT_TOKENS + NEW_TOKENS, BLOCK_SIZE):
            have, until = num_computed // BLOCK_SIZE, num_computed + BLOCK_SIZE
            began = time.perf_counter()
            await _done(door.extend(sequence_id, have))
            await _done(door.commit(sequence_id, until, new))
            self.times["extend and commit"].append(time.perf_counter() - began)
        await self._timed("release", lambda: door.release(sequence_id))

    async def look_up(self, count: int) -> None:
        """The same cached prompt again and again, timed."""
        prompt = self._random(LONG_PROMPT_TOKENS)
        await self._cache(prompt)
        for _ in range(count):
            found = await self._timed(LOOK_UP, lambda: self._door.look_up(prompt))
            assert found == (len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE

    async def _timed(self, name: str, run: Callable[[], Any]) -> Any:
        began = time.perf_counter()
        result = await _done(run())
        self.times[name].append(time.perf_counter() - began)
        return result


async def _done(result: Any) -> Any:
    return await result if inspect.isawaitable(result) else result


async def measure(doors: Sequence[Door], num_blocks: int, shared: float, num_requests: int) -> dict[str, Any]:
    """Microseconds by operation, and requests a second, of all doors at once.

    A pool that does not hold the long prompt has no row for it.
    """
    traces = [Trace(door, shared, seed) for seed, door in enumerate(doors)]
    await traces[0].fill()
    gc.collect()
    began = time.perf_counter()
    await asyncio.gather(*(_requests(trace, num_requests // len(doors)) for trace in traces))
    elapsed_s = time.perf_counter() - began
    if num_blocks * BLOCK_SIZE > 2 * LONG_PROMPT_TOKENS:
        await traces[0].look_up(max(20, num_requests // 50))
    operations = {name: [each for trace in traces for each in trace.times[name]] for name in OPERATIONS}
    percentiles = {name: _percentiles(times) for name, times in operations.items() if times}
    return {"requests_per_s": num_requests // len(doors) * len(doors) / elapsed_s, "operations": percentiles}


async def _requests(trace: Trace, count: int) -> None:
    for _ in range(count):
        await trace.request()


def _percentiles(times: list[float]) -> dict[str, float]:
    ordered = sorted(times)
    return {
        f"p{share:g}_us": 1e6 * ordered[min(len(ordered) - 1, int(len(ordered) * share / 100))] for share in (50, 99.9)
    }


@asynccontextmanager
async def cache_service() -> AsyncIterator[str]:
    """The address of one in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        address = f"unix:{folder}/cache.sock"
        command = [sys.executable, "-m", "cache_service", f"--listen={address}", "--metrics-listen="]
        process = await asyncio.create_subprocess_exec(*guarded([*command, "--log-level=error"]))
        try:
            while not await is_serving(address, "octavo.v1.BlockManagerService"):
                assert process.returncode is None, "the cache service ended"
                await asyncio.sleep(0.1)
            yield address
        finally:
            process.terminate()
            await process.wait()


async def over_grpc(num_blocks: int, shared: float, num_requests: int, num_clients: int) -> dict[str, Any]:
    async with cache_service() as address:
        doors = await open_doors(address, num_blocks, num_clients)
        return await measure(doors, num_blocks, shared, num_requests)


def hashing_ns() -> float:
    """CPU time of the keys of a prompt of 50,000 tokens, a token: the least of many rounds."""
    tokens = array("I", random.Random(0).choices(range(VOCABULARY), k=LONG_PROMPT_TOKENS))
    width, least = BLOCK_SIZE * tokens.itemsize, float("inf")
    for _ in range(HASHING_ROUNDS):
        began = time.process_time_ns()
        packed, key = pack_tokens(tokens), bytes(KEY_BYTES)
        for start in range(0, len(packed), width):
            key = blake2b_key(key + packed[start : start + width])
        least = min(least, (time.process_time_ns() - began) / len(tokens))
    return least


def rows_of(sizes: Sequence[int], num_requests: int, num_clients: int) -> Iterator[dict[str, Any]]:
    """Every size in process, then the largest over gRPC, by one client and by several."""
    for num_blocks in sizes:
        for shared in (0.0, 0.9):
            found = asyncio.run(measure([InProcess(num_blocks)], num_blocks, shared, num_requests))
            yield {"door": "in process", "blocks": num_blocks, "clients": 1, "shared": shared, **found}
    for count in (1, num_clients):
        for shared in (0.0, 0.9):
            found = asyncio.run(over_grpc(sizes[-1], shared, num_requests, count))
            yield {"door": "gRPC", "blocks": sizes[-1], "clients": count, "shared": shared, **found}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, nargs="+", default=[1_000, 10_000, 100_000])
    parser.add_argument("--requests", type=int, default=3000)
    parser.add_argument("--clients", type=int, default=8, help="leases at once, for the loaded service")
    parser.add_argument("--json", type=Path, help="where the figures go, instead of benchmarks/results")
    arguments = parser.parse_args()
    hashing = hashing_ns()
    print(f"hashing: {hashing:.1f} ns a token", flush=True)
    rows = []
    for row in rows_of(arguments.blocks, arguments.requests, arguments.clients):
        rows.append(row)
        print(row, flush=True)
    content = {"requests": arguments.requests, "hashing_ns_per_token": hashing, "rows": rows}
    print(write("block_manager", "benchmarks.block_manager", content, arguments.json))
    if hashing > MAX_HASHING_NS:
        print(f"hashing takes more than {MAX_HASHING_NS:g} ns a token", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
