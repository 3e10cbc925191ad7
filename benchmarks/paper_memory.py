"""The memory figures of the PagedAttention paper, by simulation with the real block manager.

What each slot of the KV memory of OPT-13B on 40 GB holds, and how many requests run at once, when memory is reserved
contiguously and when it is paged; how the block size matters; what sharing saves among parallel samples of a prompt,
and among the beams of real searches (benchmarks/beam_traces.py).
docs/memory.md says what is assumed and what to make of it; this writes its figures and its plot.

    python -m benchmarks.paper_memory && python -m benchmarks.tables

Source: W. Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention", SOSP 2023,
figures 2, 13, 15 and 17, sections 6.1 to 6.3 and 7.2.
"""

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.memory_beams import PagedBeams, read_searches
from benchmarks.memory_policies import Contiguous, Paged, Policy
from benchmarks.memory_simulation import ALPACA, SHAREGPT, IterationTime, Result, Workload, simulate, trace
from benchmarks.results_file import RESULTS, write

ROOT = Path(__file__).parents[1]
NUM_SLOTS = 15_728  # tokens of KV that the paper leaves to OPT-13B on 40 GB
BLOCK_SIZE = 16
BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
NUM_ANSWERS = (2, 4, 6)
PARTS = ("policies", "block_sizes", "sharing")
SHARING_RATES_PER_S = {ALPACA.name: 2.0, SHAREGPT.name: 0.1}  # low enough that nothing is preempted
SHARING_REQUESTS = {ALPACA.name: 1000, SHAREGPT.name: 200}
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
# % of the blocks, from section 6.3: by the number of answers for Alpaca, and a range over them for ShareGPT.
PUBLISHED_SAVED = {
    ("samples", ALPACA.name): ("6.1", "8.5", "9.8"),
    ("beams", ALPACA.name): ("37.6", "53.1", "55.2"),
    ("samples", SHAREGPT.name): ("16.2 to 30.5",) * len(NUM_ANSWERS),
    ("beams", SHAREGPT.name): ("44.3 to 66.3",) * len(NUM_ANSWERS),
}


def run(workload: Workload, policy: Policy, seconds: float, num_answers: int = 1) -> dict[str, Any]:
    result: Result = simulate(trace(workload, seconds, SEED, num_answers), policy, IterationTime())
    return asdict(result)


def measure(part: str, seconds: float) -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
    """(where in the part it belongs, what was found)"""
    if part == "policies":
        for workload in (SHAREGPT, ALPACA):
            for name, make in POLICIES.items():
                yield (workload.name, name), run(workload, make(), seconds)
    elif part == "block_sizes":
        for size in BLOCK_SIZES:
            yield (str(size),), run(SHAREGPT, Paged(NUM_SLOTS, size), seconds)
    else:
        searches = json.loads((RESULTS / "beam_traces.json").read_text())["parents"]
        for workload, count in product((ALPACA, SHAREGPT), NUM_ANSWERS):
            calm = replace(workload, rate_per_s=SHARING_RATES_PER_S[workload.name])
            seconds = SHARING_REQUESTS[workload.name] / calm.rate_per_s
            beams = PagedBeams(NUM_SLOTS, BLOCK_SIZE, read_searches(searches[str(count)]))
            for kind, policy in (("samples", Paged(NUM_SLOTS, BLOCK_SIZE)), ("beams", beams)):
                result = run(calm, policy, seconds, count)
                del result["shares"]  # of a memory that is nearly empty
                yield (kind, workload.name, str(count)), result


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
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="what is measured; the rest stays")
    arguments = parser.parse_args()
    path = RESULTS / "paper_memory.json"
    found: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    for part in arguments.parts:
        found[part] = {}
        for (*place, last), result in measure(part, arguments.seconds):
            inner = found[part]
            for each in place:
                inner = inner.setdefault(each, {})
            inner[last] = result
            print(f"{', '.join((part, *place, last))}: {json.dumps(result)}", flush=True)
    parts = {part: found[part] for part in PARTS if part in found}
    write("paper_memory", "benchmarks.paper_memory", {"seconds": arguments.seconds, "seed": SEED, **parts})
    if "policies" in arguments.parts:
        draw(parts["policies"][SHAREGPT.name], ROOT / "docs" / "memory.svg")


if __name__ == "__main__":
    main()
