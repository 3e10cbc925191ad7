"""What the operations of the block manager cost: in process, and over gRPC from a process of their own.

    python -m benchmarks.block_manager && python -m benchmarks.tables

The trace: prompts of 512 tokens, of a share of them the first 480 in common; each is allocated, computed and committed,
grows by 64 tokens, block by block, and is released. The pool is full of cached blocks before anything is timed, so that
every new block is an evicted one. Then look-ups of a cached prompt of 50,000 tokens.
"""

import argparse
import asyncio
import gc
import os
import random
import subprocess
import sys
import tempfile
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from benchmarks.results_file import write
from cache_service.geometry import KvGeometry, LayerGeometry, lay_out
from cache_service.manager import BlockManager
from cache_service.operation import Allocation, Commit, Extension, LeaseId, Release, SequenceId
from cache_service.prefix import Extras
from octavo.rpc import is_serving, open_channel
from octavo.v1 import cache_pb2, cache_pb2_grpc

BLOCK_SIZE = 16
PROMPT_TOKENS, COMMON_TOKENS, NEW_TOKENS = 512, 480, 64
LONG_PROMPT_TOKENS = 50_000
VOCABULARY = 50_000
OPERATIONS = ("allocate", "commit prompt", "extend and commit", "release", "look up 50,000 tokens")
LEASE = LeaseId(1)


class Door(Protocol):
    """One way to the manager."""

    def allocate(self, sequence_id: int, tokens: "array[int]") -> int:
        """Blocks of the prompt."""
        ...

    def commit(self, sequence_id: int, num_computed: int, new: "array[int]") -> None:
        """`new` are the last of the computed tokens."""
        ...

    def extend(self, sequence_id: int, have: int) -> None: ...

    def release(self, sequence_id: int) -> None: ...

    def look_up(self, tokens: "array[int]") -> int: ...

    def stats(self) -> tuple[int, int]:
        """Free and cached blocks."""
        ...


class InProcess:
    """The manager itself."""

    def __init__(self, num_blocks: int) -> None:
        self._manager = BlockManager(num_blocks, BLOCK_SIZE)

    def allocate(self, sequence_id: int, tokens: "array[int]") -> int:
        (answer,) = self._manager.allocate(LEASE, [Allocation(SequenceId(sequence_id), tokens)], 0.0)
        return len(answer.block_ids)  # type: ignore[union-attr] - an error here ends the benchmark

    def commit(self, sequence_id: int, num_computed: int, new: "array[int]") -> None:
        self._manager.commit(LEASE, Commit(SequenceId(sequence_id), num_computed, num_computed - len(new), new), 0.0)

    def extend(self, sequence_id: int, have: int) -> None:
        (answer,) = self._manager.extend(LEASE, [Extension(SequenceId(sequence_id), have, have + 1, have + 1)], 0.0)
        assert len(answer.block_ids) == 1  # type: ignore[union-attr]

    def release(self, sequence_id: int) -> None:
        self._manager.release(LEASE, Release(SequenceId(sequence_id)), 0.0)

    def look_up(self, tokens: "array[int]") -> int:
        return self._manager.match_prefix(tokens, Extras())

    def stats(self) -> tuple[int, int]:
        stats = self._manager.stats()
        return stats.free_blocks, stats.cached_blocks


class OverGrpc:
    """A cache service in a process of its own, one call at a time."""

    def __init__(self, address: str, num_blocks: int) -> None:
        self._loop = asyncio.new_event_loop()
        self._number = 0
        self._loop.run_until_complete(self._open(address, num_blocks))

    async def _open(self, address: str, num_blocks: int) -> None:
        self._stub = cache_pb2_grpc.BlockManagerServiceStub(open_channel(address))
        layer = cache_pb2.LayerGeometry(num_kv_heads=1, k_head_dim=1, v_head_dim=1)
        block_bytes = lay_out(KvGeometry(BLOCK_SIZE, "float32", (LayerGeometry(1, 1, 1),))).block_bytes
        geometry = cache_pb2.KvGeometry(block_size=BLOCK_SIZE, dtype="float32", layers=[layer])
        about = {"executor_id": "benchmark", "arena_id": "cpu", "model_fingerprint": "none", "pid": os.getpid()}
        request = cache_pb2.RegisterExecutorRequest(geometry=geometry, kv_bytes=num_blocks * block_bytes, **about)
        registered = await self._stub.RegisterExecutor(request)
        assert registered.arena.num_blocks == num_blocks
        lease = await self._stub.OpenLease(cache_pb2.OpenLeaseRequest(client_id="benchmark"))
        self._lease_id = lease.lease_id

    def _call(self, method: Callable[..., Any], request: Any) -> Any:
        return self._loop.run_until_complete(_await(method, request))

    def _header(self) -> cache_pb2.LeaseHeader:
        self._number += 1
        return cache_pb2.LeaseHeader(lease_id=self._lease_id, sequence_number=self._number)

    def allocate(self, sequence_id: int, tokens: "array[int]") -> int:
        item = cache_pb2.SequenceAllocation(sequence_id=sequence_id, token_ids=tokens)
        request = cache_pb2.AllocateSequencesRequest(header=self._header(), arena_id="cpu", allocations=[item])
        answer = self._call(self._stub.AllocateSequences, request).sequences[0]
        assert not answer.status.code, answer.status
        return len(answer.tables[0].block_ids)

    def commit(self, sequence_id: int, num_computed: int, new: "array[int]") -> None:
        offset = num_computed - len(new)
        item = cache_pb2.SequenceCommit(
            sequence_id=sequence_id, num_computed_tokens=num_computed, token_offset=offset, token_ids=new
        )
        self._call(self._stub.CommitBlocks, cache_pb2.CommitBlocksRequest(header=self._header(), commits=[item]))

    def extend(self, sequence_id: int, have: int) -> None:
        item = cache_pb2.SequenceExtension(
            sequence_id=sequence_id, have_blocks=have, need_blocks=have + 1, want_blocks=have + 1
        )
        self._call(
            self._stub.ExtendSequences, cache_pb2.ExtendSequencesRequest(header=self._header(), extensions=[item])
        )

    def release(self, sequence_id: int) -> None:
        item = cache_pb2.SequenceRelease(sequence_id=sequence_id)
        self._call(
            self._stub.ReleaseSequences, cache_pb2.ReleaseSequencesRequest(header=self._header(), releases=[item])
        )

    def look_up(self, tokens: "array[int]") -> int:
        request = cache_pb2.MatchPrefixRequest(arena_id="cpu", token_ids=tokens)
        return int(self._call(self._stub.MatchPrefix, request).num_cached_tokens)

    def stats(self) -> tuple[int, int]:
        arena = self._call(self._stub.GetStats, cache_pb2.GetStatsRequest()).arenas[0]
        return arena.free_blocks, arena.cached_blocks


async def _await(method: Callable[..., Any], request: Any) -> Any:
    return await method(request)


class Trace:
    """The same requests for every door; times in seconds by operation."""

    def __init__(self, door: Door, shared: float) -> None:
        self._door, self._shared, self._rng = door, shared, random.Random(0)
        self._common = self._random(COMMON_TOKENS)
        self._next_id = 1
        self.times: dict[str, list[float]] = {name: [] for name in OPERATIONS}

    def _random(self, count: int) -> "array[int]":
        return array("I", self._rng.choices(range(VOCABULARY), k=count))

    def fill(self) -> None:
        """Until no block is free."""
        while self._door.stats()[0]:
            self.request()
        for times in self.times.values():
            times.clear()

    def request(self) -> None:
        sequence_id, self._next_id = self._next_id, self._next_id + 1
        is_shared = self._rng.random() < self._shared
        prompt = (self._common if is_shared else self._random(COMMON_TOKENS)) + self._random(
            PROMPT_TOKENS - COMMON_TOKENS
        )
        new = self._random(BLOCK_SIZE)
        num_blocks = self._timed("allocate", lambda: self._door.allocate(sequence_id, prompt))
        self._timed("commit prompt", lambda: self._door.commit(sequence_id, PROMPT_TOKENS, array("I")))
        for num_computed in range(PROMPT_TOKENS, PROMPT_TOKENS + NEW_TOKENS, BLOCK_SIZE):
            num_blocks += 1

            def grow(have: int = num_blocks - 1, until: int = num_computed + BLOCK_SIZE) -> None:
                self._door.extend(sequence_id, have)
                self._door.commit(sequence_id, until, new)

            self._timed("extend and commit", grow)
        self._timed("release", lambda: self._door.release(sequence_id))

    def look_up(self, count: int) -> None:
        prompt, sequence_id = self._random(LONG_PROMPT_TOKENS), self._next_id
        self._next_id += 1
        self._door.allocate(sequence_id, prompt)
        self._door.commit(sequence_id, len(prompt), array("I"))
        self._door.release(sequence_id)
        for _ in range(count):
            found = self._timed("look up 50,000 tokens", lambda: self._door.look_up(prompt))
            assert found == (len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE

    def _timed(self, name: str, run: Callable[[], Any]) -> Any:
        began = time.perf_counter()
        result = run()
        self.times[name].append(time.perf_counter() - began)
        return result


def measure(door: Door, shared: float, num_requests: int) -> dict[str, dict[str, float]]:
    """Microseconds by operation."""
    trace = Trace(door, shared)
    trace.fill()
    gc.collect()
    for _ in range(num_requests):
        trace.request()
    trace.look_up(max(20, num_requests // 50))
    return {name: _percentiles(times) for name, times in trace.times.items()}


def _percentiles(times: list[float]) -> dict[str, float]:
    ordered = sorted(times)
    return {
        f"p{share:g}_us": 1e6 * ordered[min(len(ordered) - 1, int(len(ordered) * share / 100))] for share in (50, 99.9)
    }


def over_grpc(num_blocks: int, shared: float, num_requests: int) -> dict[str, dict[str, float]]:
    with tempfile.TemporaryDirectory() as folder:
        address = f"unix:{folder}/cache.sock"
        command = [
            sys.executable,
            "-m",
            "cache_service",
            f"--listen={address}",
            "--metrics-listen=",
            "--log-level=error",
        ]
        process = subprocess.Popen(command)
        try:
            while not asyncio.run(is_serving(address, "octavo.v1.BlockManagerService")):
                time.sleep(0.1)
            return measure(OverGrpc(address, num_blocks), shared, num_requests)
        finally:
            process.terminate()
            process.wait(30)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, nargs="+", default=[10_000, 100_000])
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--json", type=Path, help="where the figures go, instead of benchmarks/results")
    arguments = parser.parse_args()
    rows = []
    for num_blocks in arguments.blocks:
        for shared in (0.0, 0.9):
            operations = measure(InProcess(num_blocks), shared, arguments.requests)
            rows.append({"door": "in process", "blocks": num_blocks, "shared": shared, "operations": operations})
            print(rows[-1], flush=True)
    num_blocks = arguments.blocks[-1]
    operations = over_grpc(num_blocks, 0.0, arguments.requests)
    rows.append({"door": "gRPC", "blocks": num_blocks, "shared": 0.0, "operations": operations})
    print(rows[-1], flush=True)
    content = {"requests": arguments.requests, "rows": rows}
    print(write("block_manager", "benchmarks.block_manager", content, arguments.json))


if __name__ == "__main__":
    main()
