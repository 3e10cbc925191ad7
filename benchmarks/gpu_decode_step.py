"""A decode step of models of real sizes with random weights on a GPU, against the time to read what it must read.

The step is the executor's: rows are packed, a CUDA graph is replayed, tokens are sampled and copied back. Least time:
all weights but the embedding once, and every row's keys and values once, at the copy bandwidth of the same run.

    python -m benchmarks.gpu_decode_step --json benchmarks/results/gpu_decode_step.json
"""

import gc
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from benchmarks.gpu_timing import machine, median_seconds, parse_arguments, write_results
from benchmarks.random_kv import fill_random
from executor.arena import Arena, KvGeometry, private_arena
from executor.attention_triton import TritonAttention
from executor.batch import Batch, FedTokens, pack_batch
from executor.cuda.graphs import Capture
from executor.cuda.runner import CudaRunner
from executor.ids import StepId
from executor.model.forward import CausalModel
from executor.model.hook import IMPLEMENTATION, AttentionHook
from executor.model.probe import probe_geometry
from executor.slots import SlotTable
from executor.step import NO_INTS, BlockTable, RowSampling, RowStart, Step

BLOCK = 16


@dataclass(frozen=True)
class Size:
    """A Llama of this size."""

    name: str
    layers: int
    hidden: int
    intermediate: int
    heads: tuple[int, int]
    head_dim: int
    vocabulary: int = 128256


SIZES = (
    Size("1B", 16, 2048, 8192, (32, 8), 64),
    Size("8B", 32, 4096, 14336, (32, 8), 128),
)
BATCHES = ((1, 4096), (32, 2048), (256, 1024))  # rows, context


def make_model(size: Size, device: str, dtype: torch.dtype) -> CausalModel:
    """Random weights, made on the device."""
    config = LlamaConfig(
        hidden_size=size.hidden,
        intermediate_size=size.intermediate,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads[0],
        num_key_value_heads=size.heads[1],
        head_dim=size.head_dim,
        vocab_size=size.vocabulary,
        max_position_embeddings=8192,
        tie_word_embeddings=False,
    )
    with torch.device(device):
        module = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=IMPLEMENTATION).eval()
    hook = AttentionHook(module)
    return CausalModel(module, hook, config, probe_geometry(module, hook, config), dtype)


def make_batch(rows: int, context: int, vocabulary: int) -> tuple[Batch, int]:
    """A decode of `rows` rows at this context, their blocks in random order; and the number of blocks."""
    per_row = -(-context // BLOCK)
    blocks = (np.random.default_rng(0).permutation(rows * per_row) + 1).reshape(rows, per_row)
    table = SlotTable(rows)
    rng = np.random.default_rng(1)
    for slot in range(rows):
        tokens = rng.integers(0, vocabulary, context)
        start = RowStart(slot, 0, tokens, context - 1, (BlockTable(0, blocks[slot]),), RowSampling())
        table.apply(Step(StepId(1), started_rows=(start,)))
    slots = np.arange(rows)
    batch = pack_batch(table, slots, table.rows["computed"][slots], np.ones(rows, np.int64), BLOCK)
    return batch, rows * per_row + 1


def random_arena(geometry: KvGeometry, num_blocks: int, device: str) -> Arena:
    """Blocks full of random numbers."""
    arena = private_arena(geometry, num_blocks, device)
    fill_random(arena)
    return arena


def least_bytes(model: CausalModel, rows: int, context: int, kv_bytes: int) -> int:
    """Weights that a step reads, and keys and values of all rows."""
    embedding = model.module.get_input_embeddings().weight
    weights = sum(each.numel() * each.element_size() for each in model.module.parameters())
    per_token = sum(layer.num_kv_heads * (layer.k_head_dim + layer.v_head_dim) for layer in model.layers) * kv_bytes
    return weights - embedding.numel() * embedding.element_size() + rows * context * per_token


def measure(
    model: CausalModel, rows: int, context: int, device: str, *, with_graphs: bool, capture: Capture | None = None
) -> dict[str, Any]:
    """Seconds of a step, of its forward pass alone, and of one of many that begin ahead of each other's end."""
    dtype = str(model.weights_dtype).removeprefix("torch.")
    batch, num_blocks = make_batch(rows, context, model.vocabulary_size)
    arena = random_arena(KvGeometry(BLOCK, dtype, model.layers), num_blocks, device)
    runner = CudaRunner(model, arena, TritonAttention("triton"))
    if with_graphs:
        runner.capture_graphs(rows, context, capture, sizes=[rows])
    with torch.inference_mode():
        forward = median_seconds(lambda: runner._logits(batch), seconds=1.0)
    step = median_seconds(lambda: runner.begin(NO_INTS, NO_INTS, batch).take(), seconds=1.0)
    return {
        "ahead_seconds": seconds_ahead(runner, batch),
        "rows": rows,
        "context": context,
        "graphs": with_graphs,
        "forward_seconds": forward,
        "step_seconds": step,
        "least_bytes": least_bytes(model, rows, context, model.weights_dtype.itemsize),
    }


def seconds_ahead(runner: CudaRunner, batch: Batch) -> float:
    """Of a step that begins before the one before is taken, and goes on with its tokens on the device."""
    every = torch.arange(batch.num_tokens)
    fed = replace(batch, fed=FedTokens(every, every))
    begun = [runner.begin(NO_INTS, NO_INTS, batch)]

    def step() -> None:
        begun.append(runner.begin(NO_INTS, NO_INTS, fed, begun[0]))
        begun.pop(0).take()

    return median_seconds(step, seconds=1.0)


def line_of(size: str, row: dict[str, Any], limits: dict[str, Any]) -> str:
    """One line of the table."""
    least = row["least_bytes"] / limits["copy_gb_s"] / 1e9
    how = "graph" if row["graphs"] else "eager"
    forward, step, ahead = (row[f"{each}_seconds"] for each in ("forward", "step", "ahead"))
    return (
        f"{size:3s} {row['rows']:4d} x {row['context']:5d} {how:6s} forward {forward * 1e3:8.2f} ms, "
        f"step {step * 1e3:8.2f} ms, ahead {ahead * 1e3:8.2f} ms, {row['rows'] / ahead:8.0f} tokens/s, least "
        f"{least * 1e3:7.2f} ms: forward {forward / least:5.2f}x, step {step / least:5.2f}x, "
        f"ahead {ahead / least:5.2f}x"
    )


def main(argv: list[str] | None = None) -> int:
    arguments = parse_arguments(__doc__ or "", argv)
    limits = machine(arguments.device)
    print(f"{limits['device']}: copy {limits['copy_gb_s']:.0f} GB/s")
    found: dict[str, list[dict[str, Any]]] = {}
    for size in SIZES:
        model = make_model(size, arguments.device, torch.bfloat16)
        found[size.name] = []
        for rows, context in BATCHES:
            for with_graphs in (True, False):
                row = measure(model, rows, context, arguments.device, with_graphs=with_graphs)
                found[size.name].append(row)
                print(line_of(size.name, row, limits), flush=True)
                gc.collect()
                torch.cuda.empty_cache()
        del model
    if arguments.json:
        write_results(arguments.json, {"machine": limits, "decode_step": found})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
