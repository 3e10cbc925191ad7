"""Paged attention, the one entry point: mixed batches of prefill chunks and decodes over block tables.

Here a call is checked, planned and launched; the kernels are in `attention_mixed` and `attention_split`, the choice
between them in `attention_plan`, the plain-torch definition in `kernels.reference.paged_attention`.
"""

from dataclasses import dataclass

import torch

from kernels import attention_plan as plan
from kernels import kv_format, view
from kernels.attention_mixed import mixed_attention_kernel
from kernels.attention_split import reduce_splits_kernel, split_attention_kernel
from kernels.attention_tile import Tile
from kernels.device import DeviceProperties, device_properties
from kernels.launch import Launch, next_power_of_2, run_all


@dataclass(frozen=True)
class PagedAttention:
    """Arguments of one call; see `paged_attention`."""

    query: torch.Tensor  # [num_tokens, num_q_heads, head_dim]
    k_cache: torch.Tensor  # [num_blocks, num_kv_heads, block_size, head_dim]
    v_cache: torch.Tensor  # [num_blocks, num_kv_heads, block_size, v_head_dim]
    block_tables: torch.Tensor  # [num_seqs, max_blocks] int32, sequence -> blocks
    query_start: torch.Tensor  # [num_seqs + 1] int32, sequence -> first token
    kv_lens: torch.Tensor  # [num_seqs] int32
    softmax_scale: float
    max_query_len: int
    max_kv_len: int
    k_scale: torch.Tensor | None = None  # [num_blocks, num_kv_heads, block_size] fp32
    v_scale: torch.Tensor | None = None
    sliding_window: int = 0
    softcap: float = 0.0
    alibi_slopes: torch.Tensor | None = None  # [num_q_heads] fp32
    num_splits: int | None = None

    def shape(self) -> plan.AttentionShape:
        num_tokens, num_q_heads, head_dim = self.query.shape
        _, num_kv_heads, _, v_head_dim = self.v_cache.shape
        return plan.AttentionShape(
            num_tokens=num_tokens,
            num_seqs=self.kv_lens.shape[0],
            num_kv_heads=num_kv_heads,
            group=num_q_heads // num_kv_heads,
            head_dim=head_dim,
            v_head_dim=v_head_dim,
            element_bytes=self.query.element_size(),
            kv_bytes=self.k_cache.element_size(),
            max_query_len=self.max_query_len,
            max_kv_len=self.max_kv_len,
        )

    def check(self) -> None:
        """ValueError or TypeError that names the argument, before anything is launched."""
        num_q_heads, head_dim = self.query.shape[1:]
        num_blocks, num_kv_heads, block_size, k_head_dim = self.k_cache.shape
        num_seqs = self.kv_lens.shape[0]
        if num_q_heads % num_kv_heads:
            raise ValueError(f"num_q_heads ({num_q_heads}) must be a multiple of num_kv_heads ({num_kv_heads})")
        if num_q_heads // num_kv_heads > plan.MAX_GROUP:
            raise ValueError(f"{num_q_heads // num_kv_heads} query heads per KV head; at most {plan.MAX_GROUP}")
        if head_dim != k_head_dim:
            raise ValueError(f"query head size {head_dim} differs from the K cache's {k_head_dim}")
        if max(head_dim, self.v_cache.shape[3]) > plan.MAX_HEAD_DIM:
            raise ValueError(f"head sizes {head_dim} and {self.v_cache.shape[3]}; at most {plan.MAX_HEAD_DIM}")
        if self.v_cache.shape[:3] != (num_blocks, num_kv_heads, block_size) or self.v_cache.dtype != self.k_cache.dtype:
            raise ValueError("K and V caches must agree in dtype, blocks, heads and block size")
        if self.query_start.shape != (num_seqs + 1,) or self.block_tables.shape[0] != num_seqs:
            raise ValueError("query_start must have num_seqs + 1 entries and block_tables num_seqs rows")
        for name in ("block_tables", "query_start", "kv_lens"):
            if getattr(self, name).dtype != torch.int32:
                raise TypeError(f"{name} must be int32, got {getattr(self, name).dtype}")
        if self.alibi_slopes is not None and self.alibi_slopes.shape != (num_q_heads,):
            raise ValueError(f"alibi_slopes must have one entry for each of {num_q_heads} query heads")
        if self.sliding_window < 0 or self.softcap < 0.0:
            raise ValueError("sliding_window and softcap are positive, or 0 for none")
        kv_format.check_scales(self.k_cache, self.k_scale, "k_scale")
        kv_format.check_scales(self.v_cache, self.v_scale, "v_scale")

    def launches(self, out: torch.Tensor, device: DeviceProperties) -> list[Launch]:
        """The launches of this call: one mixed kernel, or a split kernel and a reduction."""
        self.check()
        shape = self.shape()
        tiles = plan.choose_tile(shape, device)
        num_splits = self.num_splits or plan.choose_num_splits(shape, tiles, device)
        tile = plan.tile_constants(
            shape,
            tiles,
            self.k_cache.shape[2],
            kv_format.kv_format(self.k_cache.dtype, self.query.dtype, device),
            self.sliding_window,
            self.softcap,
            self.alibi_slopes is not None,
        )
        grid = (plan.num_query_tiles(shape.num_tokens, shape.num_seqs, tiles.block_q), shape.num_kv_heads)
        if num_splits == 1:
            args = {"out": view.heads(out), **self._kernel_args(), "TILE": tile}
            return [Launch(mixed_attention_kernel, grid, args, tiles.num_warps, tiles.num_stages)]
        return self._split_launches(out, tile, tiles, grid, num_splits)

    def _kernel_args(self) -> dict[str, object]:
        return {
            "query": view.heads(self.query),
            "kv": view.PagedKV(
                view.blocks(self.k_cache),
                view.blocks(self.v_cache),
                view.scales(self.k_scale),
                view.scales(self.v_scale),
                view.matrix(self.block_tables),
            ),
            "query_start": self.query_start,
            "kv_lens": self.kv_lens,
            "alibi_slopes": self.alibi_slopes,
            "softmax_scale": self.softmax_scale,
            "num_seqs": self.kv_lens.shape[0],
        }

    def _split_launches(
        self, out: torch.Tensor, tile: Tile, tiles: plan.TilePlan, grid: tuple[int, int], num_splits: int
    ) -> list[Launch]:
        num_tokens, num_q_heads, _ = self.query.shape
        partial_shape = (num_tokens, num_q_heads, num_splits, tile.v_head_dim)
        partial = torch.empty(partial_shape, dtype=torch.float32, device=out.device)
        log_sum = torch.empty(partial_shape[:3], dtype=torch.float32, device=out.device)
        split_args = {
            "partial": partial,
            "log_sum": log_sum,
            **self._kernel_args(),
            "num_q_heads": num_q_heads,
            "NUM_SPLITS": num_splits,
            "TILE": tile,
        }
        reduce_args = {
            "out": view.heads(out),
            "partial": partial,
            "log_sum": log_sum,
            "query_start": self.query_start,
            "num_seqs": self.kv_lens.shape[0],
            "num_q_heads": num_q_heads,
            "NUM_SPLITS": num_splits,
            "BLOCK_SPLITS": next_power_of_2(num_splits),
            "V_HEAD_DIM": tile.v_head_dim,
            "BLOCK_DV": tile.block_dv,
        }
        return [
            Launch(split_attention_kernel, (*grid, num_splits), split_args, tiles.num_warps, tiles.num_stages),
            Launch(reduce_splits_kernel, (num_tokens, num_q_heads), reduce_args, num_warps=4, num_stages=1),
        ]


def paged_attention(out: torch.Tensor, **arguments: object) -> torch.Tensor:
    """Causal attention of a mixed batch over a paged KV cache, into `out` [num_tokens, num_q_heads, v_head_dim].

    Arguments are the fields of `PagedAttention`, by name:
        query, k_cache, v_cache, block_tables, query_start, kv_lens: as shaped there. Any strides. Sequence s owns the
            tokens [query_start[s], query_start[s + 1]), the last ones of its kv_lens[s] positions; query_start[0] is 0.
        softmax_scale: factor of q . k.
        max_query_len, max_kv_len: bounds over the batch, known to the host; under a CUDA graph, of all its replays.
        k_scale, v_scale: for int8 and float8_e4m3fn caches, value = code * scale.
        sliding_window: query at p sees keys in (p - window, p]; 0 for all of [0, p].
        softcap: scores become cap * tanh(score / cap), before any bias; 0 for none.
        alibi_slopes: adds slope[head] * (key position - query position).
        num_splits: KV splits of each tile; chosen from shapes and device when None.

    dtypes: float16, bfloat16, float32; KV the same, or int8 / float8_e4m3fn with scales.
    A query that sees no key (kv_lens 0) gives zeros; tokens past query_start[-1] are not touched; block ids past a
    sequence's length are not read, nor the blocks of positions before its window. Grid and algorithm: see the kernels.
    Raises ValueError or TypeError for shapes and dtypes that do not fit, before anything is launched.
    """
    call = PagedAttention(**arguments)  # type: ignore[arg-type]
    if out.shape != (*call.query.shape[:2], call.v_cache.shape[3]) or out.dtype != call.query.dtype:
        raise ValueError(f"out must be {call.query.dtype} of shape [num_tokens, num_q_heads, v_head_dim]")
    run_all(call.launches(out, device_properties(call.query.device)))
    return out
