"""Decode steps of the executor's runner in this process: no router, no cache service, no gRPC.

For each number of rows: wall and CPU milliseconds of a step at about the given context, medians. Variants are run in
turn within each round, so that a load that comes and goes meets all of them; the ratios are to the first variant.

    python -m benchmarks.executor_decode --variants attention=torch attention=cpu --rows 1 8 32
"""

import argparse
import json
import logging
import os
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from benchmarks.random_kv import fill_random
from executor.arena import private_arena
from executor.batch import pack_batch
from executor.config import ExecutorConfig
from executor.ids import StepId
from executor.loading import LoadedModel, load
from executor.runner import Runner
from executor.slots import SlotTable
from executor.step import NO_INTS, BlockTable, RowSampling, RowStart, Step


@dataclass
class Variant:
    """One configuration, loaded, with rows that have their context."""

    name: str
    loaded: LoadedModel
    threads: int

    def fill(self, rows: int, context: int, steps: int) -> float:
        """Rows whose KV is random numbers, which costs nothing. Returns the tokens per second of a prefill."""
        size = self.loaded.geometry.block_size
        per_row = -(-(context + steps + 1) // size)
        arena = private_arena(self.loaded.geometry, 1 + (rows + 1) * per_row)
        fill_random(arena)
        self.runner = Runner(self.loaded.model, arena, self.loaded.attention)
        self.table, self.rows, self.size = SlotTable(rows + 1), rows, size
        ids = np.random.default_rng(0).permutation((rows + 1) * per_row) + 1  # as scattered as a used arena's
        tokens = np.random.default_rng(1).integers(0, self.loaded.model.vocabulary_size, (rows + 1, context))
        for slot in range(rows + 1):
            blocks = (BlockTable(0, ids[slot * per_row : (slot + 1) * per_row].astype(np.int64)),)
            computed = context - 1 if slot < rows else 0
            start = RowStart(slot, 0, tokens[slot], computed, blocks, RowSampling())
            self.table.apply(Step(StepId(1), started_rows=(start,)))
        began = time.perf_counter()
        self._run(np.array([rows]), context)
        return context / (time.perf_counter() - began)

    def decode(self) -> tuple[float, float]:
        """Wall and CPU seconds of one step."""
        torch.set_num_threads(self.threads)
        began, cpu = time.perf_counter(), time.process_time()
        self._run(np.arange(self.rows), 1)
        return time.perf_counter() - began, time.process_time() - cpu

    def _run(self, slots: np.ndarray, count: int) -> None:
        counts = np.full(len(slots), count)
        batch = pack_batch(self.table, slots, self.table.rows["computed"][slots], counts, self.size)
        output = self.runner.begin(NO_INTS, NO_INTS, batch).take()
        assert output.finite.all()
        self.table.advance(slots, counts)
        self.table.append(slots, output.token_ids)


def make_variant(text: str, model: str, threads: int) -> Variant:
    """text: options of the executor, name=value,name=value."""
    options = dict(part.split("=", 1) for part in text.split(",") if part)
    config = ExecutorConfig(model=model, threads=threads, **options)  # type: ignore[arg-type]
    return Variant(text, load(config), threads)


def measure(variants: list[Variant], rows: int, context: int, steps: int) -> list[dict[str, object]]:
    """One line per variant."""
    prefill = [variant.fill(rows, context, steps + 3) for variant in variants]
    times: list[list[tuple[float, float]]] = [[] for _ in variants]
    for _ in range(3):
        for variant in variants:
            variant.decode()
    for _ in range(steps):
        for variant, into in zip(variants, times, strict=True):
            into.append(variant.decode())
    lines: list[dict[str, object]] = []
    for variant, own, speed in zip(variants, times, prefill, strict=True):
        wall, cpu = (statistics.median(column) * 1e3 for column in zip(*own, strict=True))
        line = {"variant": variant.name, "rows": rows, "context": context, "wall_ms": round(wall, 2)}
        line |= {
            "cpu_ms": round(cpu, 2),
            "tokens_per_s": round(rows / wall * 1e3, 1),
            "prefill_tokens_per_s": round(speed),
        }
        lines.append(line)
    for line in lines:
        line["ratio"] = round(float(lines[0]["wall_ms"]) / float(line["wall_ms"]), 2)  # type: ignore[arg-type]
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--variants", nargs="+", default=[""], help="options of the executor, name=value,...")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--context", type=int, default=200)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    variants = [make_variant(text, arguments.model, arguments.threads) for text in arguments.variants]
    lines = []
    for rows in arguments.rows:
        for line in measure(variants, rows, arguments.context, arguments.steps):
            print(line, flush=True)
            lines.append(line)
    print("load average", os.getloadavg())
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps({"load": os.getloadavg(), "lines": lines}, indent=1) + "\n")


if __name__ == "__main__":
    main()
