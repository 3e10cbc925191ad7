"""Tile sizes and KV splits of paged attention, from shapes and device properties alone.

Nothing here looks at a length on the device, so a captured CUDA graph replays with the choice it was captured with.
The tables are short on purpose; docs/kernels.md derives them.
"""

from dataclasses import dataclass

from kernels.attention_tile import Tile
from kernels.device import DeviceProperties
from kernels.launch import cdiv, next_power_of_2

MAX_GROUP = 128  # query heads per KV head that one tile can hold
MAX_HEAD_DIM = 256
MAX_SPLITS = 64
SMALL_SHARED_MEMORY = 128 * 1024  # below it, narrower tiles
RESIDENT_PROGRAMS = 2  # per multiprocessor, what tiles of this size leave room for
MAX_PARTIAL_SHARE = 1 / 8  # of the KV bytes of a split, spent on writing and reading its partial result
MIN_WAVE_EFFICIENCY = 0.9  # of the best, below which more splits are tried


@dataclass(frozen=True)
class AttentionShape:
    """What a plan may depend on."""

    num_tokens: int
    num_seqs: int
    num_kv_heads: int
    group: int  # query heads per KV head
    head_dim: int
    v_head_dim: int
    element_bytes: int  # of query and dot operands
    kv_bytes: int  # of a stored KV element
    max_query_len: int
    max_kv_len: int


@dataclass(frozen=True)
class TilePlan:
    block_q: int
    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


def num_query_tiles(num_tokens: int, num_seqs: int, block_q: int) -> int:
    """Upper bound of the number of tiles, exact when every token belongs to a sequence.

    It is `first_tile_of(num_seqs)` of kernels.attention_tile: num_seqs for a pure decode batch, ceil(tokens /
    block_q) for one prompt.
    """
    return (num_tokens + num_seqs * (block_q - 1)) // block_q


def choose_tile(shape: AttentionShape, device: DeviceProperties) -> TilePlan:
    """Rows by the average work of a sequence, columns by registers, stages by what shared memory holds."""
    widest = max(next_power_of_2(shape.head_dim), next_power_of_2(shape.v_head_dim))
    if shape.max_query_len == 1:
        rows = shape.group
    else:
        rows = shape.group * cdiv(shape.num_tokens, max(shape.num_seqs, 1))
    block_m = max(min(next_power_of_2(rows), _row_limit(shape, widest, device)), next_power_of_2(shape.group), 16)
    block_q = 1 if shape.max_query_len == 1 else block_m // shape.group
    narrow = widest > 128 or shape.element_bytes == 4 or device.shared_memory_bytes < SMALL_SHARED_MEMORY
    decoded = shape.kv_bytes < shape.element_bytes and (block_m > 16 or not device.native_fp8)
    block_n = 32 if narrow or decoded else 64
    num_stages = _stages_that_fit(shape, block_m, block_n, device)
    most_for_four_warps = 64 * 128 if device.warpgroup_dots or device.registers_per_thread > 255 else 32 * 128
    num_warps = 8 if block_m * widest > most_for_four_warps else 4
    return TilePlan(block_q, block_m, block_n, num_warps, num_stages)


def _row_limit(shape: AttentionShape, widest: int, device: DeviceProperties) -> int:
    """Largest tile whose accumulator and operands stay in registers; fp32 dots run on the vector units."""
    if shape.element_bytes == 4:
        return 16
    if widest > 128:
        return 32 if device.shared_memory_bytes < SMALL_SHARED_MEMORY else 64
    return 64 if shape.kv_bytes < shape.element_bytes else 128


def _stages_that_fit(shape: AttentionShape, block_m: int, block_n: int, device: DeviceProperties) -> int:
    """Stages of Triton's software pipeline. A load behind a table look-up needs two stages for each tile in flight:
    2n + 1 stages keep n tiles of K and V in shared memory (and one more where the dot reads it there).
    """
    dims = next_power_of_2(shape.head_dim) + next_power_of_2(shape.v_head_dim)
    tile_bytes = block_n * dims * shape.kv_bytes
    query_bytes = block_m * next_power_of_2(shape.head_dim) * shape.element_bytes
    in_use = 1 if block_m >= 64 else 0
    for tiles_in_flight in (2, 1):
        bytes_needed = query_bytes + (tiles_in_flight + in_use) * tile_bytes
        if bytes_needed * RESIDENT_PROGRAMS <= device.shared_memory_bytes:
            return 2 * tiles_in_flight + 1
    return 2


def min_split_tokens(shape: AttentionShape, block_q: int) -> int:
    """Shortest split worth its partial result.

    A split reads tokens * (head_dim + v_head_dim) * kv_bytes and costs, for each of its rows, v_head_dim + 1 fp32
    numbers written once and read once.
    """
    partial_bytes = 2 * 4 * (shape.v_head_dim + 1) * shape.group * block_q
    token_bytes = (shape.head_dim + shape.v_head_dim) * shape.kv_bytes
    return cdiv(partial_bytes, int(token_bytes * MAX_PARTIAL_SHARE) or 1)


def choose_num_splits(shape: AttentionShape, tile: TilePlan, device: DeviceProperties) -> int:
    """Splits of each tile's KV range: 1 when the tiles fill the device, else the fewest that nearly do.

    Powers of two, so that few variants are compiled. Among those that keep a split above `min_split_tokens`, the
    smallest whose last wave of programs is nearly as full as the best one's (as in FlashAttention's split heuristic).
    """
    slots = device.num_multiprocessors * RESIDENT_PROGRAMS
    num_programs = num_query_tiles(shape.num_tokens, shape.num_seqs, tile.block_q) * shape.num_kv_heads
    if num_programs >= device.num_multiprocessors or num_programs == 0:
        return 1
    longest = max(shape.max_kv_len // max(min_split_tokens(shape, tile.block_q), tile.block_n), 1)
    candidates = [1 << power for power in range(MAX_SPLITS.bit_length()) if 1 << power <= min(longest, MAX_SPLITS)]
    efficiency = {splits: _wave_efficiency(num_programs * splits, slots) for splits in candidates}
    enough = MIN_WAVE_EFFICIENCY * max(efficiency.values())
    return next(splits for splits in candidates if efficiency[splits] >= enough)


def _wave_efficiency(num_programs: int, slots: int) -> float:
    waves = num_programs / slots
    return waves / cdiv(num_programs, slots)


def tile_constants(
    shape: AttentionShape, plan: TilePlan, block_size: int, kv_format: str, window: int, softcap: float, alibi: bool
) -> Tile:
    return Tile(
        group=shape.group,
        head_dim=shape.head_dim,
        v_head_dim=shape.v_head_dim,
        block_size=block_size,
        kv_format=kv_format,
        window=window,
        softcap=softcap,
        alibi=alibi,
        block_q=plan.block_q,
        block_m=plan.block_m,
        block_n=plan.block_n,
        block_d=max(next_power_of_2(shape.head_dim), 16),
        block_dv=max(next_power_of_2(shape.v_head_dim), 16),
    )
