"""Paged attention of a mixed batch, one program per query tile and KV head.

Grid: (num_tiles, num_kv_heads), where num_tiles is a bound from shapes alone (`num_query_tiles`), so that the launch
is the same for every step of a captured shape; a program without a tile returns at once.
"""

# ruff: noqa: N803
import triton
import triton.language as tl

from kernels.attention_tile import attend_range, load_query, load_slope, locate_tile, tile_rows, visible_range
from kernels.numeric import cast_to


@triton.jit(do_not_specialize=["num_seqs"])
def mixed_attention_kernel(
    out,  # Heads [num_tokens, num_q_heads, v_head_dim]
    query,  # Heads [num_tokens, num_q_heads, head_dim]
    kv,  # PagedKV
    query_start,  # [num_seqs + 1] int32, sequence -> its first token
    kv_lens,  # [num_seqs] int32, this step's tokens included
    alibi_slopes,  # [num_q_heads] fp32, or None
    softmax_scale,
    num_seqs,
    TILE: tl.constexpr,
):
    kv_head = tl.program_id(1)
    seq, query_offset = locate_tile(query_start, num_seqs, tl.program_id(0), TILE)
    first_token = tl.load(query_start + seq)
    query_len = tl.load(query_start + seq + 1) - first_token
    if query_offset >= query_len:
        return
    kv_len = tl.load(kv_lens + seq)
    query_idx, head, live = tile_rows(kv_head, query_offset, query_len, TILE)
    token = first_token + query_idx
    q = load_query(query, token, head, live, TILE)
    slope = load_slope(alibi_slopes, head, live, TILE)
    low, visible_low, all_visible, high = visible_range(kv_len, query_len, query_offset, TILE)
    table = kv.tables.ptr + seq.to(tl.int64) * kv.tables.stride_row

    acc, _, row_sum = attend_range(
        q, kv_len - query_len + query_idx, slope, kv, table, kv_head, softmax_scale,
        low, high, visible_low, all_visible, TILE,
    )  # fmt: skip

    result = acc / tl.where(row_sum > 0.0, row_sum, 1.0)[:, None]  # a row that saw nothing is zero
    dims = tl.arange(0, TILE.block_dv)
    rows = token.to(tl.int64) * out.stride_token + head.to(tl.int64) * out.stride_head
    mask = live[:, None] & (dims < TILE.v_head_dim)[None, :]
    pointers = out.ptr + rows[:, None] + dims[None, :] * out.stride_dim
    tl.store(pointers, cast_to(result, out.ptr.dtype.element_ty), mask=mask)
