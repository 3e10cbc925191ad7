"""Paged attention with the KV range of each tile split over several programs, and the reduction after it.

For few query tiles and long contexts (decode at a small batch) one program per tile leaves most of the device idle.
Here `num_splits` programs share a tile's KV range; each leaves a normalized partial result and the base-2 logarithm
of its softmax sum, and a second kernel weighs them together (Flash-Decoding, Dao et al. 2023).

Grids: split (num_tiles, num_kv_heads, num_splits), reduction (num_tokens, num_q_heads). Both come from shapes alone.
A split boundary is a multiple of block_n, so every split reads whole tiles but the last.
"""

# ruff: noqa: N803, N806
import triton
import triton.language as tl

from kernels.attention_tile import attend_range, load_query, load_slope, locate_tile, tile_rows, visible_range
from kernels.numeric import cast_to


@triton.jit(do_not_specialize=["num_seqs"])
def split_attention_kernel(
    partial,  # [num_tokens, num_q_heads, NUM_SPLITS, v_head_dim] fp32, contiguous
    log_sum,  # [num_tokens, num_q_heads, NUM_SPLITS] fp32, contiguous; -inf where a split saw nothing
    query,  # Heads [num_tokens, num_q_heads, head_dim]
    kv,  # PagedKV
    query_start,  # [num_seqs + 1] int32, sequence -> its first token
    kv_lens,  # [num_seqs] int32, this step's tokens included
    alibi_slopes,  # [num_q_heads] fp32, or None
    softmax_scale,
    num_seqs,
    num_q_heads,
    NUM_SPLITS: tl.constexpr,
    TILE: tl.constexpr,
):
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    seq, query_offset = locate_tile(query_start, num_seqs, tl.program_id(0), TILE)
    first_token = tl.load(query_start + seq)
    query_len = tl.load(query_start + seq + 1) - first_token
    if query_offset >= query_len:
        return
    kv_len = tl.load(kv_lens + seq)
    query_idx, head, live = tile_rows(kv_head, query_offset, query_len, TILE)
    token = first_token + query_idx
    slope = load_slope(alibi_slopes, head, live, TILE)
    low, visible_low, all_visible, high = visible_range(kv_len, query_len, query_offset, TILE)
    tiles_per_split = tl.cdiv(tl.cdiv(high - low, TILE.block_n), NUM_SPLITS)
    split_low = low + split * tiles_per_split * TILE.block_n
    split_high = tl.minimum(split_low + tiles_per_split * TILE.block_n, high)
    partial_row = (token.to(tl.int64) * num_q_heads + head) * NUM_SPLITS + split
    if split_low >= split_high:
        BLOCK_M: tl.constexpr = TILE.block_m
        tl.store(log_sum + partial_row, tl.full([BLOCK_M], float("-inf"), tl.float32), mask=live)
        return

    q = load_query(query, token, head, live, TILE)
    table = kv.tables.ptr + seq.to(tl.int64) * kv.tables.stride_row
    acc, row_max, row_sum = attend_range(
        q, kv_len - query_len + query_idx, slope, kv, table, kv_head, softmax_scale,
        split_low, split_high, visible_low, all_visible, TILE,
    )  # fmt: skip

    saw = row_sum != 0.0  # a NaN was seen, and stays
    dims = tl.arange(0, TILE.block_dv)
    mask = (live & saw)[:, None] & (dims < TILE.v_head_dim)[None, :]
    result = acc / tl.where(saw, row_sum, 1.0)[:, None]
    tl.store(partial + partial_row[:, None] * TILE.v_head_dim + dims[None, :], result, mask=mask)
    tl.store(
        log_sum + partial_row, tl.where(saw, row_max + tl.log2(tl.where(saw, row_sum, 1.0)), float("-inf")), mask=live
    )


@triton.jit(do_not_specialize=["num_seqs"])
def reduce_splits_kernel(
    out,  # Heads [num_tokens, num_q_heads, v_head_dim]
    partial,  # [num_tokens, num_q_heads, NUM_SPLITS, v_head_dim] fp32, contiguous
    log_sum,  # [num_tokens, num_q_heads, NUM_SPLITS] fp32, contiguous
    query_start,  # [num_seqs + 1] int32
    num_seqs,
    num_q_heads,
    NUM_SPLITS: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,  # NUM_SPLITS as a power of two
    V_HEAD_DIM: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    token = tl.program_id(0)
    head = tl.program_id(1)
    if token >= tl.load(query_start + num_seqs):
        return  # a padding token that belongs to no sequence: nothing was computed for it
    splits = tl.arange(0, BLOCK_SPLITS)
    dims = tl.arange(0, BLOCK_DV)
    row = (token.to(tl.int64) * num_q_heads + head) * NUM_SPLITS + splits
    log_sums = tl.load(log_sum + row, mask=splits < NUM_SPLITS, other=float("-inf"))
    saw = log_sums != float("-inf")
    largest = tl.max(log_sums, axis=0)
    weights = tl.exp2(log_sums - tl.where(largest > float("-inf"), largest, 0.0))
    mask = saw[:, None] & (dims < V_HEAD_DIM)[None, :]
    parts = tl.load(partial + row[:, None] * V_HEAD_DIM + dims[None, :], mask=mask, other=0.0)
    total = tl.sum(weights, axis=0)
    result = tl.sum(parts * weights[:, None], axis=0) / tl.where(total > 0.0, total, 1.0)
    pointers = out.ptr + token.to(tl.int64) * out.stride_token + head.to(tl.int64) * out.stride_head
    tl.store(pointers + dims * out.stride_dim, cast_to(result, out.ptr.dtype.element_ty), mask=dims < V_HEAD_DIM)
