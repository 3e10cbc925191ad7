"""One layer's paged attention on a CPU: CPU microseconds of a call, by back end and as Inductor compiles it.

The candidates run in turn, single-threaded; a row is SmolLM2's: 9 heads, 3 KV heads, head size 64, blocks of 16 tokens.
`inductor` is torch.compile's code for: gather the blocks by table, then torch's scaled_dot_product_attention; decodes
of equal length only, which flatters it.

    python -m benchmarks.cpu_attention
"""

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from benchmarks.random_kv import fill_random
from executor.arena import KvGeometry, LayerGeometry, private_arena
from executor.attention import LayerAttention
from executor.attention_choice import choose_attention
from executor.batch import AttentionBatch

HEADS, KV_HEADS, HEAD_DIM, BLOCK = 9, 3, 64, 16
LAYERS = 8  # in turn, so that no layer's blocks stay in the caches


def make_batch(rows: int, context: int, new: int) -> AttentionBatch:
    """Rows of one length, their blocks scattered; each runs its last `new` tokens."""
    per_row = -(-context // BLOCK)
    tables = (np.random.default_rng(0).permutation(rows * per_row) + 1).reshape(rows, per_row)
    positions = np.arange(context - new, context)
    return AttentionBatch(
        query_starts=torch.arange(rows + 1) * new,
        context_lengths=torch.full((rows,), context),
        tables=torch.from_numpy(tables.astype(np.int32)),
        write_blocks=torch.from_numpy(tables[:, positions // BLOCK].ravel()),
        write_offsets=torch.from_numpy(np.tile(positions % BLOCK, rows)),
    )


def gathered(query: Tensor, k: Tensor, v: Tensor, tables: Tensor, context: int) -> Tensor:
    """query: [rows, HEADS, 1, HEAD_DIM]; k, v: [num_blocks, KV_HEADS, BLOCK, HEAD_DIM]"""
    shape = (len(query), KV_HEADS, -1, HEAD_DIM)
    keys, values = (x[tables].permute(0, 2, 1, 3, 4).reshape(shape)[:, :, :context] for x in (k, v))
    return torch.nn.functional.scaled_dot_product_attention(query, keys, values, enable_gqa=True)


def calls(dtype: str, rows: int, context: int, new: int) -> dict[str, Callable[[int], object]]:
    """Candidate -> its call on a layer."""
    batch = make_batch(rows, context, new)
    geometry = KvGeometry(BLOCK, dtype, (LayerGeometry(KV_HEADS, HEAD_DIM, HEAD_DIM),) * LAYERS)
    arena = private_arena(geometry, 1 + batch.tables.numel())
    fill_random(arena)
    query, key, value = (torch.randn(rows * new, heads, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
    found: dict[str, Callable[[int], object]] = {}
    for name in ("torch", "cpu"):
        step = choose_attention(name, "cpu").prepare(batch, arena.views)
        found[name] = lambda layer, step=step: step.attend(LayerAttention(layer, 0.125), query, key, value)
    if new == 1 and dtype == "float32":
        compiled, tables = torch.compile(gathered, dynamic=True), batch.tables.long()
        found["inductor"] = lambda layer: compiled(
            query[:, :, None], arena.views[layer].k, arena.views[layer].v, tables, context
        )
    return found


def measure(call: Callable[[int], object], repeats: int) -> float:
    """CPU microseconds of one call."""
    began = time.process_time()
    for index in range(repeats):
        call(index % LAYERS)
    return (time.process_time() - began) / repeats * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print("| KV | rows | context | new | CPU us |\n|---|---|---|---|---|")
    for dtype, rows, context, new in (
        *(("float32", rows, context, 1) for rows, context in ((1, 200), (8, 200), (32, 200), (8, 2000))),
        *((kv, rows, context, 1) for kv in ("bfloat16", "int8") for rows, context in ((32, 200), (8, 2000))),
        *(("float32", 1, context, 128) for context in (128, 1024)),
    ):
        found = calls(dtype, rows, context, new)
        with torch.inference_mode():
            for call in found.values():
                measure(call, 3)
            rounds = [{name: measure(call, 24) for name, call in found.items()} for _ in range(arguments.rounds)]
        medians = {name: round(statistics.median(each[name] for each in rounds)) for name in found}
        print(f"| {dtype} | {rows} | {context} | {new} | {medians} |", flush=True)


if __name__ == "__main__":
    main()
