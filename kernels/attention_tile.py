"""What both attention kernels do: find a query tile, load it, attend to a range of paged KV.

A query tile packs block_q consecutive tokens of one sequence times the `group` query heads that share one KV head
into the block_m rows of `tl.dot`, so that K and V are read once for all of them:

    row r of the tile  =  token r // group of the tile,  head kv_head * group + r % group

KV is walked in tiles of block_n positions that are independent of the block size: each position looks its block up,
so that any block size, and any table, gives full tiles. Online softmax in base 2 (Milakov & Gimelshein 2018;
FlashAttention, Dao et al. 2022, algorithm 1; whole tiles first without masks, as in FlashAttention-2, section 3.1).

`TILE` is a `Tile` everywhere below: compile-time constants by name.
"""

# ruff: noqa: N803, N806
from typing import NamedTuple

import triton
import triton.language as tl

from kernels.kv_format import dequantize
from kernels.numeric import LOG2E, operand, tanh


class Tile(NamedTuple):
    """Compile-time constants of an attention kernel."""

    group: int  # query heads per KV head
    head_dim: int
    v_head_dim: int
    block_size: int  # tokens in a block of the cache
    kv_format: str
    window: int  # 0: none; else key > query - window
    softcap: float  # 0: none
    alibi: bool
    block_q: int  # query tokens in a tile
    block_m: int  # rows in a tile, >= block_q * group, power of two >= 16
    block_n: int  # KV positions in a tile
    block_d: int  # head_dim as a power of two >= 16
    block_dv: int


@triton.jit
def first_tile_of(query_start, seq, TILE: tl.constexpr):
    """Index of sequence `seq`'s first tile; `first_tile_of(num_seqs)` is the number of tiles.

    Consecutive values differ by at least ceil(query_len / block_q), and in a pure decode batch by exactly one.
    """
    return (tl.load(query_start + seq) + seq * (TILE.block_q - 1)) // TILE.block_q


@triton.jit
def locate_tile(query_start, num_seqs, tile, TILE: tl.constexpr):
    """Grid index of a tile -> (sequence, first token of the tile within that sequence), by bisection."""
    low = 0
    high = num_seqs
    while high - low > 1:
        middle = (low + high) // 2
        if first_tile_of(query_start, middle, TILE) <= tile:
            low = middle
        else:
            high = middle
    return low, (tile - first_tile_of(query_start, low, TILE)) * TILE.block_q


@triton.jit
def tile_rows(kv_head, query_offset, query_len, TILE: tl.constexpr):
    """-> (token within the sequence, query head, row is live), each [block_m]"""
    rows = tl.arange(0, TILE.block_m)
    query_idx = query_offset + rows // TILE.group
    live = (rows < TILE.block_q * TILE.group) & (query_idx < query_len)
    return query_idx, kv_head * TILE.group + rows % TILE.group, live


@triton.jit
def load_query(query, token, head, live, TILE: tl.constexpr):
    """-> [block_m, block_d], zero in dead rows and padded dimensions"""
    dims = tl.arange(0, TILE.block_d)
    rows = token.to(tl.int64) * query.stride_token + head.to(tl.int64) * query.stride_head
    mask = live[:, None] & (dims < TILE.head_dim)[None, :]
    return operand(tl.load(query.ptr + rows[:, None] + dims[None, :] * query.stride_dim, mask=mask, other=0.0))


@triton.jit
def load_slope(alibi_slopes, head, live, TILE: tl.constexpr):
    """-> ALiBi slopes [block_m] fp32, zero where there is no ALiBi"""
    if TILE.alibi:
        return tl.load(alibi_slopes + head, mask=live, other=0.0).to(tl.float32)
    else:
        BLOCK_M: tl.constexpr = TILE.block_m  # bound to a name: Triton 3.6 takes no attribute as an argument
        return tl.zeros([BLOCK_M], dtype=tl.float32)


@triton.jit
def visible_range(kv_len, query_len, query_offset, TILE: tl.constexpr):
    """-> (low, visible_low, all_visible, high): KV positions of a tile.

        0 ...... low ....... visible_low ......... all_visible ........... high ...... kv_len
                  | not read |  seen by some or all  | up to the causal edge |

    `low` is a multiple of block_n so that tiles fall on the same positions in whatever chunks a prompt came. Nothing
    below `visible_low` is read: those blocks may have been given away.
    """
    first_position = kv_len - query_len + query_offset
    num_queries = tl.minimum(TILE.block_q, query_len - query_offset)
    high = tl.maximum(tl.minimum(first_position + num_queries, kv_len), 0)
    if TILE.window > 0:
        visible_low = tl.maximum(first_position - TILE.window + 1, 0)
    else:
        visible_low = tl.minimum(kv_len, 0)
    low = visible_low // TILE.block_n * TILE.block_n
    return low, visible_low, tl.minimum(first_position + 1, high), high


@triton.jit
def load_block_ids(table, positions, inside, TILE: tl.constexpr, MASKED: tl.constexpr):
    """-> block ids [block_n], widened at once: block id times block stride passes 2^31 in any large pool"""
    if MASKED:
        return tl.load(table + positions // TILE.block_size, mask=inside, other=0).to(tl.int64)
    else:
        return tl.load(table + positions // TILE.block_size).to(tl.int64)


@triton.jit
def load_codes(kv, rows, dims, inside, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, MASKED: tl.constexpr):
    """Stored elements; `rows` and `dims` come broadcast against each other: K is read as [d, n], V as [n, d]."""
    pointers = kv.ptr + rows + dims * kv.stride_dim
    if MASKED:
        return tl.load(pointers, mask=inside & (dims < HEAD_DIM), other=0)
    elif HEAD_DIM != BLOCK_D:
        return tl.load(pointers, mask=dims < HEAD_DIM, other=0)
    else:
        return tl.load(pointers)


@triton.jit
def load_factor(scale, block_ids, kv_head, offsets, inside, TILE: tl.constexpr):
    """-> scales [block_n] fp32, zero outside; of a dense cache one, which nobody uses"""
    if TILE.kv_format == "dense":
        return 1.0
    else:
        rows = block_ids * scale.stride_block + kv_head.to(tl.int64) * scale.stride_head
        return tl.load(scale.ptr + rows + offsets * scale.stride_token, mask=inside, other=0.0)


@triton.jit
def biased_scores(q, k, k_factor, query_position, positions, slope, softmax_scale, TILE: tl.constexpr):
    """-> [block_m, block_n] base-2 logits: scaled, then capped, then biased by slope * (key - query)"""
    scores = tl.dot(q, k, input_precision="ieee") * softmax_scale
    if TILE.kv_format != "dense":
        scores *= k_factor[None, :]
    if TILE.softcap > 0.0:
        scores = TILE.softcap * tanh(scores / TILE.softcap)
    if TILE.alibi:
        scores += slope[:, None] * (positions[None, :] - query_position[:, None]).to(tl.float32)
    return scores * LOG2E


@triton.jit
def weighted_values(p, v, v_factor, TILE: tl.constexpr):
    """-> p @ (v * v_factor), [block_m, block_dv] fp32

    The factors go into p, which is the smaller tile, each divided by the largest of them so that p stays in [0, 1]:
    small scales would push it into fp16's subnormals.
    """
    if TILE.kv_format != "dense":
        largest = tl.max(v_factor, axis=0)
        p = p * (v_factor / tl.where(largest > 0.0, largest, 1.0))[None, :]
        return tl.dot(p.to(v.dtype), v, input_precision="ieee") * largest
    else:
        return tl.dot(p.to(v.dtype), v, input_precision="ieee")


@triton.jit
def attend(
    state,  # (acc [block_m, block_dv], row_max [block_m], row_sum [block_m]), fp32
    q,  # [block_m, block_d]
    query_position,  # [block_m]
    slope,  # [block_m] fp32
    kv,  # PagedKV
    table,  # pointer to the sequence's row of the block tables
    kv_head,
    softmax_scale,
    start,  # first position, a multiple of block_n
    stop,  # nothing from here on is read
    visible_low,  # nor anything below this
    TILE: tl.constexpr,
    MASKED: tl.constexpr,  # False promises that every live row sees every position of [start, stop), in whole tiles
):
    """Extend an online softmax by KV positions [start, stop)."""
    KV_FORMAT: tl.constexpr = TILE.kv_format
    HEAD_DIM: tl.constexpr = TILE.head_dim
    V_HEAD_DIM: tl.constexpr = TILE.v_head_dim
    BLOCK_D: tl.constexpr = TILE.block_d
    BLOCK_DV: tl.constexpr = TILE.block_dv
    acc, row_max, row_sum = state
    k_dims = tl.arange(0, TILE.block_d)[:, None]
    v_dims = tl.arange(0, TILE.block_dv)[None, :]
    for tile_start in tl.range(start, stop, TILE.block_n):
        positions = tile_start + tl.arange(0, TILE.block_n)
        inside = (positions < stop) & (positions >= visible_low)
        block_ids = load_block_ids(table, positions, inside, TILE, MASKED)
        offsets = positions % TILE.block_size
        k_rows = block_ids * kv.k.stride_block + kv_head.to(tl.int64) * kv.k.stride_head + offsets * kv.k.stride_token
        v_rows = block_ids * kv.v.stride_block + kv_head.to(tl.int64) * kv.v.stride_head + offsets * kv.v.stride_token
        k = load_codes(kv.k, k_rows[None, :], k_dims, inside[None, :], HEAD_DIM, BLOCK_D, MASKED)
        v = load_codes(kv.v, v_rows[:, None], v_dims, inside[:, None], V_HEAD_DIM, BLOCK_DV, MASKED)
        k_factor = load_factor(kv.k_scale, block_ids, kv_head, offsets, inside, TILE)
        v_factor = load_factor(kv.v_scale, block_ids, kv_head, offsets, inside, TILE)
        k = dequantize(k, q.dtype, KV_FORMAT)
        v = dequantize(v, q.dtype, KV_FORMAT)

        scores = biased_scores(q, k, k_factor, query_position, positions, slope, softmax_scale, TILE)
        if MASKED:
            visible = inside[None, :] & (positions[None, :] <= query_position[:, None])
            if TILE.window > 0:
                visible &= positions[None, :] > query_position[:, None] - TILE.window
            scores = tl.where(visible, scores, float("-inf"))

        new_max = tl.maximum(row_max, tl.max(scores, axis=1))
        reference = tl.where(new_max == float("-inf"), 0.0, new_max)  # a row that has seen nothing yet
        p = tl.exp2(scores - reference[:, None])
        shrink = tl.exp2(row_max - reference)
        row_sum = row_sum * shrink + tl.sum(p, axis=1)
        acc = acc * shrink[:, None] + weighted_values(p, v, v_factor, TILE)
        row_max = new_max
    return acc, row_max, row_sum


@triton.jit
def attend_range(
    q,
    query_position,
    slope,
    kv,
    table,
    kv_head,
    softmax_scale,
    low,  # a multiple of block_n
    high,
    visible_low,
    all_visible,
    TILE: tl.constexpr,
):
    """Softmax over [low, high): whole tiles below `all_visible` without masks, the rest with. -> (acc, max, sum)"""
    BLOCK_M: tl.constexpr = TILE.block_m
    BLOCK_DV: tl.constexpr = TILE.block_dv
    state = (
        tl.zeros([BLOCK_M, BLOCK_DV], dtype=tl.float32),
        tl.full([BLOCK_M], float("-inf"), dtype=tl.float32),
        tl.zeros([BLOCK_M], dtype=tl.float32),
    )
    edge = low
    if TILE.window == 0:
        edge = low + tl.maximum(tl.minimum(all_visible, high) - low, 0) // TILE.block_n * TILE.block_n
        state = attend(
            state, q, query_position, slope, kv, table, kv_head, softmax_scale, low, edge, visible_low, TILE, False
        )
    return attend(
        state, q, query_position, slope, kv, table, kv_head, softmax_scale, edge, high, visible_low, TILE, True
    )
