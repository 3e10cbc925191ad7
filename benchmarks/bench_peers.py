"""`make bench-peers`: workload W on Octavo and on a peer in turn, and the ratios of their medians.

Octavo is asked over gRPC, all three processes and this client on the same cores; OpenVINO GenAI runs in process,
without a server, on the very GGUF file; vLLM behind its own OpenAI server, on the weights that Octavo makes of that
file. All are loaded once and then take turns, run by run, so that a machine that slows down slows all of them; peers
are stopped (SIGSTOP) between their turns, since some go on working after their last answer. A peer whose package is
missing is left out, with a word. Ratios are to each peer.

    python -m benchmarks.bench_peers --peers-python build/bench-peers-venv/bin/python [--runs 3] [--quick]
    python -m benchmarks.bench_peers --vllm-python build/vllm-venv/bin/python    # vLLM too; make vllm-venv makes it
"""

import argparse
import signal
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
from benchmarks.servers import serving, signal_tree
from benchmarks.vllm_server import dense_folder, fastest_dtype, vllm_serving
from octavo.model_source import resolve_model

FIGURES = ("output_tokens_per_s", "first_token_p50_ms", "between_tokens_p50_ms", "between_tokens_p99_ms")
OCTAVO, OPENVINO, VLLM = "Octavo", "OpenVINO GenAI", "vLLM"


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


def resting(stack: ExitStack, pid: int, measure: Callable[[Load], Any]) -> Callable[[Load], Any]:
    """The same, for a peer whose processes stand still while it is not measured."""

    def awake(load: Load) -> Any:
        signal_tree(pid, signal.SIGCONT)
        try:
            return measure(load)
        finally:
            signal_tree(pid, signal.SIGSTOP)

    signal_tree(pid, signal.SIGSTOP)
    stack.callback(signal_tree, pid, signal.SIGCONT)  # so that it can end in order
    return awake


def rows_of(contenders: list[Contender], streams: list[int]) -> list[dict[str, Any]]:
    """One per contender and number of streams, with the ratios of its medians to those of each peer."""
    rows: list[dict[str, Any]] = []
    for each in streams:
        medians = {contender.name: contender.medians(each) for contender in contenders}
        peers = {name: found for name, found in medians.items() if not name.startswith(OCTAVO)}
        for name, own in medians.items():
            rows.append({"streams": each, "who": name, **own, "ratios": _ratios(own, peers)})
    return rows


def _ratios(own: dict[str, float], peers: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    """By peer: of output and of the first token, which is the better the smaller it is."""
    names = {"output": FIGURES[0], "first_token": FIGURES[1]}
    return {
        peer: {short: round(own[figure] / found[figure], 2) for short, figure in names.items()}
        for peer, found in peers.items()
    }


class Contenders:
    """Everybody who is there, and a word about who is not."""

    def __init__(self) -> None:
        self.there: list[Contender] = []
        self.left_out: list[str] = []

    def add_octavo(self, stack: ExitStack, arguments: argparse.Namespace) -> None:
        """A server of each configuration."""
        for name in arguments.configurations:
            options = [*CONFIGURATIONS[name], *arguments.options]
            server = stack.enter_context(serving(arguments.model, options))
            self.there.append(Contender(f"{OCTAVO} {name}", lambda load, own=server: measure(own, load)))

    def add_openvino(self, stack: ExitStack, python: Path, model: str) -> None:
        """In process."""
        gguf = resolve_model(model).path
        if gguf is None or not gguf.is_file():
            return self._leave_out(OPENVINO, f"{model} is no GGUF file")
        if not has_package(python, "openvino_genai"):
            return self._leave_out(OPENVINO, f"{python} has no openvino_genai; make bench-peers installs it")
        try:
            peer = stack.enter_context(openvino_genai(python, gguf))
        except RuntimeError as error:
            return self._leave_out(OPENVINO, str(error))
        name = f"{OPENVINO} {peer.process.version.split('-')[0]}"
        self.there.append(Contender(name, resting(stack, peer.process.pid, peer.measure)))

    def add_vllm(self, stack: ExitStack, python: Path, model: str, dtype: str, options: list[str]) -> None:
        """Behind its own server."""
        if not has_package(python, "vllm"):
            return self._leave_out(VLLM, f"{python} has no vllm; make vllm-venv makes an environment that has")
        folder = stack.enter_context(dense_folder(model))
        try:
            server = stack.enter_context(vllm_serving(python, folder, dtype, options))
        except RuntimeError as error:
            return self._leave_out(VLLM, str(error))
        self.there.append(Contender(f"{VLLM} {server.version} {dtype}", resting(stack, server.pid, server.measure)))

    def _leave_out(self, name: str, reason: str) -> None:
        self.left_out.append(f"{name} is left out: {reason}")
        print(self.left_out[-1], flush=True)


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Start everybody, let them take turns, and say what came of it."""
    with ExitStack() as stack:
        found = Contenders()
        found.add_octavo(stack, arguments)
        found.add_openvino(stack, arguments.peers_python, arguments.model)
        vllm = (arguments.vllm_dtype, arguments.vllm_option)
        found.add_vllm(stack, arguments.vllm_python, arguments.model, *vllm)
        contenders = found.there
        for contender in contenders:
            contender.measure(workload_w(2, 2, seed=0))  # warm-up
        for number in range(arguments.runs):
            for streams in arguments.streams:
                load = workload_w(streams, streams, seed=1 + number)
                for contender in contenders:
                    contender.take(streams, load)
        rows = rows_of(contenders, arguments.streams)
        runs = {each.name: each.found for each in contenders}
    asked = {"runs": arguments.runs, "options": arguments.options, "vllm_options": arguments.vllm_option}
    return {**asked, "rows": rows, "left_out": found.left_out, "each_run": runs}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--configurations", nargs="+", choices=CONFIGURATIONS, default=list(CONFIGURATIONS))
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one run instead of three; figures for a look")
    parser.add_argument("--peers-python", type=Path, default=Path("build/bench-peers-venv/bin/python"))
    parser.add_argument("--vllm-python", type=Path, default=Path("build/vllm-venv/bin/python"))
    parser.add_argument("--vllm-dtype", default=fastest_dtype(), help="bfloat16 or float32; without it, the faster one")
    parser.add_argument(
        "--vllm-option", action="append", default=[], help="more of vLLM's: --vllm-option=--enforce-eager"
    )
    parser.add_argument("--json", type=Path, help="where the JSON goes; without it, results/bench_peers.json")
    parser.add_argument("options", nargs="*", help="more options of octavo serve, behind --")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.runs = 1
    content = run(arguments)
    for row in content["rows"]:
        print(row)
    print(*content["left_out"], sep="\n")
    print(results_file.write("bench_peers", "benchmarks.bench_peers", content, arguments.json))


if __name__ == "__main__":
    main()
