"""`make bench-peers`: workload W on Octavo and on a peer in turn, and the ratios of their medians.

Octavo is asked over gRPC, all three processes and this client on the same cores; OpenVINO GenAI runs in process,
without a server, on the very GGUF file. All are loaded once and then take turns, run by run, so that a machine that
slows down slows all of them. A peer whose package is missing is left out, with a word.

    python -m benchmarks.bench_peers --peers-python build/bench-peers-venv/bin/python [--runs 3] [--quick]
"""

import argparse
import statistics
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import results_file
from benchmarks.bench import CONFIGURATIONS
from benchmarks.load import measure
from benchmarks.loads import Load, workload_w
from benchmarks.peer import has_package, openvino_genai
from benchmarks.servers import serving
from octavo.model_source import resolve_model

FIGURES = ("output_tokens_per_s", "first_token_p50_ms", "between_tokens_p50_ms", "between_tokens_p99_ms")
OPENVINO = "OpenVINO GenAI"


@dataclass
class Contender:
    """Somebody who takes turns."""

    name: str
    measure: Callable[[Load], Any]
    found: dict[int, list[dict[str, float]]] = field(default_factory=dict)  # streams -> run by run

    def take(self, streams: int, load: Load) -> None:
        figures = self.measure(load)
        line = {name: getattr(figures, name) for name in FIGURES}
        self.found.setdefault(streams, []).append(line)
        print(f"{streams:3} streams  {self.name:24} {line}", flush=True)

    def medians(self, streams: int) -> dict[str, float]:
        """Of each figure over the runs."""
        return {name: statistics.median(run[name] for run in self.found[streams]) for name in FIGURES}


def rows_of(contenders: list[Contender], streams: list[int]) -> list[dict[str, Any]]:
    """One per contender and number of streams; ratios are to the last contender, of medians."""
    rows: list[dict[str, Any]] = []
    for each in streams:
        base = contenders[-1].medians(each)
        for contender in contenders:
            own = contender.medians(each)
            ratios = {"output": round(own[FIGURES[0]] / base[FIGURES[0]], 2)}
            ratios["first_token"] = round(own[FIGURES[1]] / base[FIGURES[1]], 2)
            rows.append({"streams": each, "who": contender.name, **own, "ratios": ratios})
    return rows


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Start everybody, let them take turns, and say what came of it."""
    gguf = resolve_model(arguments.model).path
    with ExitStack() as stack:
        contenders = []
        for name in arguments.configurations:
            options = [*CONFIGURATIONS[name], *arguments.options]
            server = stack.enter_context(serving(arguments.model, options))
            contenders.append(Contender(f"Octavo {name}", lambda load, own=server: measure(own, load)))
        if has_package(arguments.peers_python, "openvino_genai") and gguf is not None:
            peer = stack.enter_context(openvino_genai(arguments.peers_python, gguf))
            contenders.append(Contender(f"{OPENVINO} {peer.version.split('-')[0]}", peer.measure))
        else:
            print(
                f"{OPENVINO} is left out: {arguments.peers_python} has no openvino_genai, or the model is no GGUF file"
            )
        for contender in contenders:
            contender.measure(workload_w(2, 2, seed=0))  # warm-up
        for number in range(arguments.runs):
            for streams in arguments.streams:
                load = workload_w(streams, streams, seed=1 + number)
                for contender in contenders:
                    contender.take(streams, load)
        rows = rows_of(contenders, arguments.streams)
        runs = {each.name: each.found for each in contenders}
    return {"runs": arguments.runs, "options": arguments.options, "rows": rows, "each_run": runs}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--configurations", nargs="+", choices=CONFIGURATIONS, default=list(CONFIGURATIONS))
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one run instead of three; figures for a look")
    parser.add_argument("--peers-python", type=Path, default=Path("build/bench-peers-venv/bin/python"))
    parser.add_argument("--json", type=Path, help="where the JSON goes; without it, results/bench_peers.json")
    parser.add_argument("options", nargs="*", help="more options of octavo serve, behind --")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.runs = 1
    content = run(arguments)
    for row in content["rows"]:
        print(row)
    print(results_file.write("bench_peers", "benchmarks.bench_peers", content, arguments.json))


if __name__ == "__main__":
    main()
