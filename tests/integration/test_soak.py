"""Crowds of streams through three processes, round after round: everything ends as asked, and nothing stays behind."""

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.servers import Server, cpu_seconds, resident_bytes, serving
from octavo.rpc import open_channel
from tests.soaking import Crowd, assert_settled
from tests.tiny_models import VOCABULARY_SIZE

ROUNDS = 5
STREAMS = 200
MAX_GROWTH_BYTES = 20e6  # of each process, between the ends of rounds 2 and 5
PROMPT_TOKENS = 200
# Blocks for about 4000 tokens, so that streams are preempted.
OPTIONS = ["--executor.threads=1", "--executor.kv-memory-mib=2", "--router.max-queued-requests=1000"]


@pytest.fixture
def server(tiny_llama: Path) -> Iterator[Server]:
    with serving(str(tiny_llama), OPTIONS) as server:
        yield server


async def run_round(server: Server, seed: int, num_streams: int) -> Crowd:
    """A crowd, and nothing of it left."""
    async with open_channel(server.address) as channel:
        crowd = Crowd(channel, seed, vocabulary_size=VOCABULARY_SIZE, max_prompt_tokens=PROMPT_TOKENS)
        await crowd.run(num_streams)
    assert crowd.endings.total() == num_streams
    await assert_settled(server.address, server.cache_service)
    return crowd


@pytest.mark.long
@pytest.mark.timeout(3600)
async def test_two_hundred_streams_with_random_ends(server: Server) -> None:
    """Memory is what each process holds in RAM, shared KV included."""
    memory = []
    for seed in range(1, ROUNDS + 1):
        began = time.monotonic()
        crowd = await run_round(server, seed, STREAMS)
        memory.append({name: resident_bytes(pid) for name, pid in server.pids.items()})
        report = {
            "round": seed,
            "wall_s": round(time.monotonic() - began, 1),
            "resident_mb": {name: round(size / 1e6, 1) for name, size in memory[-1].items()},
            "cpu_s": {name: round(cpu_seconds(pid), 1) for name, pid in server.pids.items()},
            "endings": {" -> ".join(key): count for key, count in sorted(crowd.endings.items())},
        }
        print(json.dumps(report))
    growth = {name: memory[-1][name] - memory[1][name] for name in server.pids}
    assert growth.keys() == {"router", "executor", "cache_service"}
    assert max(growth.values()) < MAX_GROWTH_BYTES, growth
