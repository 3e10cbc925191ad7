"""Which policy of eviction finds more of a prompt in the cache: each on the same traces, with the real block manager.

    python -m benchmarks.eviction && python -m benchmarks.tables

Every request allocates its prompt, computes it and ends, so that the memory holds what the policy kept. Counted is
the share of prompt tokens that were cached.
"""

import argparse
import random
from array import array
from collections.abc import Callable, Iterator

from benchmarks.results_file import write
from cache_service.eviction import POLICIES, Eviction
from cache_service.manager import BlockManager
from cache_service.operation import Allocated, Allocation, Commit, LeaseId, Release, SequenceId

BLOCK_SIZE = 16
SIZES = (500, 1000, 2000, 4000)  # blocks
LEASE = LeaseId(1)
KINDS = ("system", "question", "talk", "turn", "document")
Prompt = list[int]  # a number for each block


def system_prompts(rng: random.Random, count: int) -> Iterator[Prompt]:
    """Forty applications, by Zipf's law, each with 48 blocks of its own before a question of 4 to 24."""
    weights = [1 / rank for rank in range(1, 41)]
    for serial in range(count):
        (application,) = rng.choices(range(40), weights)
        yield [*blocks_of("system", application, 48), *blocks_of("question", serial, rng.randint(4, 24))]


def conversations(rng: random.Random, count: int) -> Iterator[Prompt]:
    """Sixty at once; each turn is all that was said before and 2 to 12 blocks more, and one in ten ends with it."""
    live = [blocks_of("talk", serial, 4) for serial in range(60)]
    for serial in range(60, 60 + count):
        place = rng.randrange(len(live))
        live[place] = [*live[place], *blocks_of("turn", serial, rng.randint(2, 12))]
        yield live[place]
        if rng.random() < 0.1:
            live[place] = blocks_of("talk", serial, 4)


def documents(rng: random.Random, count: int) -> Iterator[Prompt]:
    """The system prompts, and every third request a document of 100 to 300 blocks that never comes again."""
    for serial, prompt in enumerate(system_prompts(rng, count)):
        yield blocks_of("document", serial, rng.randint(100, 300)) if serial % 3 == 0 else prompt


TRACES: dict[str, Callable[[random.Random, int], Iterator[Prompt]]] = {
    "system prompts": system_prompts,
    "system prompts and documents": documents,
    "conversations": conversations,
}


def blocks_of(kind: str, serial: int, count: int) -> Prompt:
    """Content that no other kind or serial has."""
    first = (KINDS.index(kind) << 28) + (serial << 10)
    return [first + place for place in range(count)]


def hit_share(prompts: list[Prompt], policy: str, num_blocks: int) -> float:
    manager = BlockManager(num_blocks + 1, BLOCK_SIZE, eviction=Eviction(POLICIES[policy]))
    for number, prompt in enumerate(prompts, 1):
        tokens = array("I", [block for block in prompt for _ in range(BLOCK_SIZE)])
        (answer,) = manager.allocate(LEASE, [Allocation(SequenceId(number), tokens)], 0.0)
        assert isinstance(answer, Allocated), answer
        manager.commit(LEASE, Commit(SequenceId(number), len(tokens), 0, array("I")), 0.0)
        manager.release(LEASE, Release(SequenceId(number)), 0.0)
    stats = manager.stats()
    return stats.hit_tokens / stats.queried_tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1500)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    found = {
        name: {str(size): {policy: hit_share(prompts, policy, size) for policy in POLICIES} for size in SIZES}
        for name, make in TRACES.items()
        for prompts in [list(make(random.Random(arguments.seed), arguments.requests))]
    }
    content = {"requests": arguments.requests, "seed": arguments.seed, "hit_share": found}
    write("eviction", "benchmarks.eviction", content)


if __name__ == "__main__":
    main()
