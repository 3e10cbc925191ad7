"""`make bench`: loads of several shapes through the public API of a stack that this starts, as `octavo serve` does.

W at each number of streams, ShareGPT-shaped requests, and prompts that share 0 % and 94 % of their tokens. For each:
output tokens per second, first token and between tokens, and where the time of a step goes. Writes JSON under
`results/`; `tables` puts it into docs/performance.md.

    python -m benchmarks.bench [--quick] [--configurations fp32 int8]
"""

import argparse
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from benchmarks import results_file
from benchmarks.load import Figures, measure
from benchmarks.loads import Load, shared_prefix, sharegpt_shaped, workload_w
from benchmarks.servers import serving

# What of `octavo serve` differs; the JSON has them too.
CONFIGURATIONS = {
    "fp32": ["--executor.weights=fp32"],
    "int8": ["--executor.weights=int8"],
}


def loads_of(streams: list[int], quick: bool) -> Iterator[Load]:
    """In order. Quick: an eighth of the work, figures for a look and not to be quoted."""
    for each in streams:
        yield workload_w(each, each if quick else max(2, each), seed=each)
    yield sharegpt_shaped(8 if quick else 24, per_s=0.3 if not quick else 1.0, seed=1, scale=0.25 if quick else 1.0)
    for shared in (0, 480):
        yield shared_prefix(4 if quick else 12, shared, num_prompt=512, num_generated=16, seed=2 + shared)


def run(name: str, model: str, streams: list[int], quick: bool, options: list[str]) -> list[Figures]:
    """All loads on one configuration."""
    found = []
    with serving(model, [*CONFIGURATIONS[name], *options]) as server:
        measure(server, workload_w(2, 2, seed=0))  # warm-up
        for load in loads_of(streams, quick):
            found.append(measure(server, load))
            print(name, found[-1], flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--configurations", nargs="+", choices=CONFIGURATIONS, default=list(CONFIGURATIONS))
    parser.add_argument("--quick", action="store_true", help="about a minute; figures for a look")
    parser.add_argument("--json", type=Path, help="where the JSON goes; without it, results/bench.json")
    parser.add_argument("options", nargs="*", help="more options of octavo serve, behind --")
    arguments = parser.parse_args()
    rows = [
        {"configuration": name, **asdict(figures)}
        for name in arguments.configurations
        for figures in run(name, arguments.model, arguments.streams, arguments.quick, arguments.options)
    ]
    content = {"quick": arguments.quick, "configurations": CONFIGURATIONS, "options": arguments.options, "rows": rows}
    print(results_file.write("bench", "benchmarks.bench", content, arguments.json))


if __name__ == "__main__":
    main()
