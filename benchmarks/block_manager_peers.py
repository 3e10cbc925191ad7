"""`make block-manager-peers`: the block manager against vLLM's KVCacheManager, both in process, on one recorded trace.

Each manager lives in a process of its own (`peers/`), and they take turns, round by round, each round on requests of
its own and with a new pool, which is full of cached blocks before anything is timed. Times are CPU time. Without an
environment that has vLLM it is left out, with a word; `make vllm-venv` makes one.

    python -m benchmarks.block_manager_peers --vllm-python build/vllm-venv/bin/python && python -m benchmarks.tables
"""

import argparse
import statistics
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks import results_file
from benchmarks.peer import PEERS, PeerProcess, has_package, peer_process
from benchmarks.peers import block_trace

OCTAVO, VLLM = "Octavo", "vLLM"
Operations = dict[str, dict[str, float]]


def start(stack: ExitStack, vllm_python: Path) -> dict[str, PeerProcess]:
    """Everybody, by name."""
    script = str(PEERS / "octavo_blocks_peer.py")
    peers = {
        OCTAVO: stack.enter_context(peer_process([sys.executable, script])),
        f"{OCTAVO}, with its ledger": stack.enter_context(peer_process([sys.executable, script, "--ledger"])),
    }
    if has_package(vllm_python, "vllm"):
        vllm = stack.enter_context(peer_process([str(vllm_python), str(PEERS / "vllm_blocks_peer.py")]))
        peers[f"{VLLM} {vllm.version}"] = vllm
    else:
        print(f"{VLLM} is left out: {vllm_python} has no vllm; see make vllm-venv")
    return peers


def measure(
    peers: dict[str, PeerProcess], num_blocks: int, shared: float, arguments: argparse.Namespace
) -> dict[str, Operations]:
    """Of each peer: medians over the rounds."""
    num_untimed = num_blocks // block_trace.REQUEST_BLOCKS + 1
    rounds: dict[str, list[Operations]] = {name: [] for name in peers}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace"
        asked = {"blocks": num_blocks, "trace": str(path), "untimed": num_untimed, "look_ups": arguments.look_ups}
        for number in range(arguments.rounds):
            block_trace.record(num_untimed + arguments.requests, shared, seed=number).write(path)
            for name in list(peers)[:: 1 if number % 2 == 0 else -1]:  # nobody is always the first
                rounds[name].append(peers[name].ask(asked))
    return {name: _medians(found) for name, found in rounds.items()}


def _medians(rounds: list[Operations]) -> Operations:
    return {
        name: {figure: statistics.median(each[name][figure] for each in rounds) for figure in rounds[0][name]}
        for name in rounds[0]
    }


def rows_of(found: dict[str, Operations], num_blocks: int, shared: float) -> list[dict[str, Any]]:
    """One per manager; ratios of p50 to vLLM's: below 1 is faster than vLLM."""
    base = next((operations for who, operations in found.items() if who.startswith(VLLM)), None)
    rows: list[dict[str, Any]] = []
    for who, operations in found.items():
        row: dict[str, Any] = {"who": who, "blocks": num_blocks, "shared": shared, "operations": operations}
        if base is not None:
            row["ratios"] = {
                name: round(times["p50_us"] / base[name]["p50_us"], 2) for name, times in operations.items()
            }
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm-python", type=Path, default=Path("build/vllm-venv/bin/python"))
    parser.add_argument("--blocks", type=int, nargs="+", default=[10_000, 100_000])
    parser.add_argument("--shared", type=float, nargs="+", default=[0.0, 0.9], help="shares of prompts in common")
    parser.add_argument("--requests", type=int, default=1000, help="timed ones of a round")
    parser.add_argument("--look-ups", type=int, default=20, help="of the long prompt, in a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="where the figures go, instead of benchmarks/results")
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with ExitStack() as stack:
        peers = start(stack, arguments.vllm_python)
        for num_blocks in arguments.blocks:
            for shared in arguments.shared:
                rows += rows_of(measure(peers, num_blocks, shared, arguments), num_blocks, shared)
                for row in rows[-len(peers) :]:
                    print(row, flush=True)
    content = {"requests": arguments.requests, "rounds": arguments.rounds, "rows": rows}
    print(results_file.write("block_manager_peers", "benchmarks.block_manager_peers", content, arguments.json))


if __name__ == "__main__":
    main()
