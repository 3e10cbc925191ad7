"""Paged attention in plain torch: gathers each row's blocks, then matrix products and a softmax in float32.

Correct everywhere torch runs, and the yardstick of the faster back ends. Rows are cut into pieces of at most
`_MAX_PIECE_TOKENS` query tokens, each of which reads only the blocks that it can see; pieces of one shape and a
similar number of blocks are computed together.

    row of 300 new tokens after 20 computed ones, window off         piece 0: queries  20..147, keys 0..147
                                                                     piece 1: queries 148..275, keys 0..275
                                                                     piece 2: queries 276..319, keys 0..319
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from executor.attention import KvViews, LayerAttention
from executor.batch import AttentionBatch
from executor.kv_codes import dequantize, quantize
from executor.slots import ranges
from executor.step import Ints

_MAX_PIECE_TOKENS = 128  # bounds the scores that are in memory at a time
_MAX_PADDING = 0.25  # blocks that a piece may be padded by, to be computed with longer ones


@dataclass(frozen=True, slots=True)
class _Pieces:
    """Pieces of one number of queries, from whichever rows."""

    tokens: Tensor  # [num_pieces * num_queries] int64 -> token of the batch
    blocks: Tensor  # [num_pieces * num_blocks] int64, block ids, padded with block 0
    hidden: Tensor  # [num_pieces, 1, num_queries, num_keys] bool: the query does not see the key
    unwritten: Tensor  # [num_unwritten] int64, index into [num_pieces * num_keys]: past the last key of its piece
    num_pieces: int
    num_queries: int


class TorchAttention:
    """The back end `torch`."""

    name = "torch"

    def copy_blocks(self, blocks: Tensor, sources: Ints, targets: Ints) -> None:
        """See `AttentionBackend`."""
        blocks[torch.from_numpy(targets)] = blocks[torch.from_numpy(sources)]

    def prepare(self, batch: AttentionBatch, views: tuple[KvViews, ...]) -> "_TorchStep":
        """See `AttentionBackend`."""
        return _TorchStep(batch, views)


class _TorchStep:
    """One step; the pieces are made once per window size that the model's layers have."""

    def __init__(self, batch: AttentionBatch, views: tuple[KvViews, ...]) -> None:
        self._batch = batch
        self._views = views
        self._pieces: dict[int | None, list[_Pieces]] = {}

    def attend(self, layer: LayerAttention, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """See `PreparedAttention`."""
        views = self._views[layer.layer]
        self._write(views.k, views.k_scale, key)
        self._write(views.v, views.v_scale, value)
        if layer.window not in self._pieces:
            self._pieces[layer.window] = _cut(self._batch, views.k.shape[2], layer.window)
        output = query.new_empty((*query.shape[:2], views.v.shape[3]))
        for pieces in self._pieces[layer.window]:
            output[pieces.tokens] = _attend_pieces(pieces, layer, query, views).to(output.dtype)
        return output

    def _write(self, view: Tensor, scale: Tensor | None, new: Tensor) -> None:
        where = (self._batch.write_blocks, self._batch.write_offsets)
        by_token = view.permute(0, 2, 1, 3)  # [num_blocks, block_size, num_kv_heads, head_dim]
        if scale is None:
            by_token[where] = new.to(view.dtype)
        else:
            by_token[where], scale.permute(0, 2, 1)[where] = quantize(new, view.dtype)


def _attend_pieces(pieces: _Pieces, layer: LayerAttention, query: Tensor, views: KvViews) -> Tensor:
    """[num_pieces * num_queries, num_heads, v_head_dim] float32"""
    num_heads, num_kv_heads = query.shape[1], views.k.shape[1]
    group = num_heads // num_kv_heads
    # [num_pieces, num_kv_heads, num_keys, head_dim]
    keys, values = _gather(views.k, views.k_scale, pieces), _gather(views.v, views.v_scale, pieces)
    # The heads that share a KV head become one matrix: [num_pieces, num_kv_heads, group * num_queries, head_dim].
    queries = query[pieces.tokens].float().view(pieces.num_pieces, pieces.num_queries, num_kv_heads, group, -1)
    queries = queries.permute(0, 2, 3, 1, 4).reshape(pieces.num_pieces, num_kv_heads, group * pieces.num_queries, -1)
    scores = torch.matmul(queries * layer.scale, keys.transpose(-1, -2))
    if layer.softcap is not None:
        scores = torch.tanh(scores / layer.softcap) * layer.softcap
    by_query = scores.view(pieces.num_pieces, num_kv_heads * group, pieces.num_queries, -1)
    by_query.masked_fill_(pieces.hidden, -torch.inf)
    mixed = torch.matmul(scores.softmax(dim=-1), values)
    mixed = mixed.view(pieces.num_pieces, num_heads, pieces.num_queries, -1).transpose(1, 2)
    return mixed.reshape(len(pieces.tokens), num_heads, -1)


def _gather(view: Tensor, scale: Tensor | None, pieces: _Pieces) -> Tensor:
    """[num_pieces, num_kv_heads, num_keys, head_dim] float32, with zeros for what no piece may see.

    Unwritten positions may hold anything, NaN too, and 0 * NaN is NaN: masking the scores alone would not do.
    """
    num_kv_heads, block_size, head_dim = view.shape[1:]
    blocks = view.index_select(0, pieces.blocks)
    if scale is not None:
        blocks = dequantize(blocks, scale.index_select(0, pieces.blocks))
    blocks = blocks.view(pieces.num_pieces, -1, num_kv_heads, block_size, head_dim)
    by_head = blocks.permute(2, 0, 1, 3, 4).reshape(num_kv_heads, -1, head_dim).float()
    by_head.index_fill_(1, pieces.unwritten, 0)
    return by_head.view(num_kv_heads, pieces.num_pieces, -1, head_dim).transpose(0, 1)


# ------------------------------------------------------------------------------------------------------------- pieces


def _cut(batch: AttentionBatch, block_size: int, window: int | None) -> list[_Pieces]:
    """All pieces of a step, grouped by number of queries and by number of blocks."""
    query_starts = batch.query_starts.numpy()
    counts = np.diff(query_starts)
    num_per_row = -(-counts // _MAX_PIECE_TOKENS)
    row = np.repeat(np.arange(len(counts)), num_per_row)  # [num_pieces] -> row
    within = ranges(np.zeros_like(counts), num_per_row) * _MAX_PIECE_TOKENS  # first query, counted in the row
    num_queries = np.minimum(counts[row] - within, _MAX_PIECE_TOKENS)
    first_token = query_starts[:-1][row] + within
    first_query = (batch.context_lengths.numpy() - counts)[row] + within  # position in the sequence
    last_query = first_query + num_queries - 1
    first_key = np.zeros_like(last_query) if window is None else np.maximum(first_query - window + 1, 0)
    first_block = first_key // block_size
    num_blocks = last_query // block_size + 1 - first_block
    groups = _group(num_queries, num_blocks)
    columns = (row, first_token, first_query, num_queries, first_block, num_blocks)
    return [_make(batch.tables.numpy(), block_size, window, *(column[group] for column in columns)) for group in groups]


def _group(num_queries: Ints, num_blocks: Ints) -> list[Ints]:
    """Indices of pieces that are computed together: equal queries, blocks within the padding allowed."""
    groups: list[list[int]] = []
    queries = smallest = -1
    for piece in np.lexsort((num_blocks, num_queries)).tolist():
        if num_queries[piece] != queries or num_blocks[piece] > smallest * (1 + _MAX_PADDING) + 1:
            queries, smallest = int(num_queries[piece]), int(num_blocks[piece])
            groups.append([])
        groups[-1].append(piece)
    return [np.array(group, dtype=np.int64) for group in groups]


def _make(
    tables: np.ndarray,
    block_size: int,
    window: int | None,
    row: Ints,
    first_token: Ints,
    first_query: Ints,
    num_queries: Ints,
    first_block: Ints,
    num_blocks: Ints,
) -> _Pieces:
    """The tensors of one group. Arrays: [num_pieces]."""
    queries = np.arange(num_queries[0])
    block = first_block[:, None] + np.arange(num_blocks.max())  # [num_pieces, num_blocks], index into the table
    inside = np.arange(num_blocks.max()) < num_blocks[:, None]
    blocks = np.where(inside, tables[row[:, None], np.where(inside, block, 0)], 0).astype(np.int64)
    key = (first_block * block_size)[:, None] + np.arange(blocks.shape[1] * block_size)  # position of each key
    query = first_query[:, None] + queries  # position of each query
    hidden = key[:, None, :] > query[:, :, None]
    if window is not None:
        hidden |= key[:, None, :] <= query[:, :, None] - window
    return _Pieces(
        tokens=torch.from_numpy((first_token[:, None] + queries).ravel()),
        blocks=torch.from_numpy(blocks.ravel()),
        hidden=torch.from_numpy(hidden[:, None]),
        unwritten=torch.from_numpy(np.flatnonzero(key > query[:, -1:])),
        num_pieces=len(row),
        num_queries=len(queries),
    )
