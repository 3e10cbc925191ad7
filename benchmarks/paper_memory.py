"""The memory figures of the PagedAttention paper, by simulation with the real block manager.

What each slot of the KV memory of OPT-13B on 40 GB holds, and how many requests run at once, when memory is reserved
contiguously and when it is paged; how the block size matters; what sharing the prompt among parallel samples saves.
docs/memory.md says what is assumed and what to make of it; this writes its figures and its plot.

    python -m benchmarks.paper_memory && python -m benchmarks.tables

Source: W. Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention", SOSP 2023,
figures 2, 13, 15 and 17, sections 6.1 to 6.3 and 7.2.
"""

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks.memory_policies import Contiguous, Paged, Policy
from benchmarks.memory_simulation import ALPACA, SHAREGPT, IterationTime, Result, Workload, simulate, trace
from benchmarks.results_file import write

ROOT = Path(__file__).parents[1]
NUM_SLOTS = 15_728  # tokens of KV that the paper leaves to OPT-13B on 40 GB
BLOCK_SIZE = 16
BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
NUM_ANSWERS = (2, 4, 6)
SHARING_RATE_PER_S = 2.0  # low enough that nothing is preempted
SEED = 1

POLICIES: dict[str, Callable[[], Policy]] = {
    "contiguous, longest possible (Orca Max)": lambda: Contiguous(NUM_SLOTS, "max"),
    "contiguous, next power of two (Orca Pow2)": lambda: Contiguous(NUM_SLOTS, "pow2"),
    "contiguous, length known (Orca Oracle)": lambda: Contiguous(NUM_SLOTS, "oracle"),
    "paged, blocks of 16": lambda: Paged(NUM_SLOTS, BLOCK_SIZE),
}
# % of the memory that holds tokens, and requests at once: figures 2 and 13.
PUBLISHED_TOKEN_STATES = {SHAREGPT.name: dict(zip(POLICIES, (20.4, 26.8, 38.2, 96.3), strict=True))}
PUBLISHED_BATCHED = {
    SHAREGPT.name: dict(zip(POLICIES, (7.00, 9.81, 13.62, 30.42), strict=True)),
    ALPACA.name: dict(zip(POLICIES, (7.00, 43.24, 72.75, 132.44), strict=True)),
}
PUBLISHED_SAVED = dict(zip(NUM_ANSWERS, (6.1, 8.5, 9.8), strict=True))  # % of the blocks, Alpaca


def run(workload: Workload, policy: Policy, seconds: float, num_answers: int = 1) -> dict[str, Any]:
    result: Result = simulate(trace(workload, seconds, SEED, num_answers), policy, IterationTime())
    return asdict(result)


def measure(seconds: float) -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
    """(where it belongs, what was found)"""
    for workload in (SHAREGPT, ALPACA):
        for name, make in POLICIES.items():
            yield ("policies", workload.name, name), run(workload, make(), seconds)
    for size in BLOCK_SIZES:
        yield ("block_sizes", str(size)), run(SHAREGPT, Paged(NUM_SLOTS, size), seconds)
    calm = replace(ALPACA, rate_per_s=SHARING_RATE_PER_S)
    for num_answers in NUM_ANSWERS:
        yield ("sharing", str(num_answers)), run(calm, Paged(NUM_SLOTS, BLOCK_SIZE), seconds, num_answers)


def draw(rows: dict[str, dict[str, Any]], path: Path) -> None:
    """What the memory holds, a bar for each policy; without matplotlib the picture stays as it is."""
    try:
        import matplotlib
    except ImportError:
        print(f"{path} is not drawn: it needs matplotlib, benchmarks/peers/requirements.txt has its version")
        return
    matplotlib.use("svg")
    from matplotlib import pyplot as plt

    plt.rcParams.update({"svg.hashsalt": "octavo", "font.size": 9})
    figure, axes = plt.subplots(figsize=(7.5, 2.6), layout="constrained")
    left = [0.0] * len(rows)
    parts = {"token_states": "#2b6cb0", "reservation": "#90cdf4", "internal": "#f6ad55", "external": "#e2e8f0"}
    for part, color in parts.items():
        widths = [100 * row["shares"][part] for row in rows.values()]
        axes.barh(list(rows), widths, left=left, color=color, label=part.replace("_", " "))
        left = [begin + width for begin, width in zip(left, widths, strict=True)]
    axes.set_xlabel("% of the KV memory")
    axes.invert_yaxis()
    axes.legend(ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3600.0, help="length of each trace; the paper's is an hour")
    arguments = parser.parse_args()
    found: dict[str, Any] = {}
    for (*path, last), result in measure(arguments.seconds):
        place = found
        for each in path:
            place = place.setdefault(each, {})
        place[last] = result
        print(f"{', '.join((*path, last))}: {json.dumps(result)}", flush=True)
    write("paper_memory", "benchmarks.paper_memory", {"seconds": arguments.seconds, "seed": SEED, **found})
    draw(found["policies"][SHAREGPT.name], ROOT / "docs" / "memory.svg")


if __name__ == "__main__":
    main()
