"""Paged attention by Octavo's C++ kernels on a CPU: reads K and V where they lie in the arena, by block table.

A row's result has the same bits in every batch and chunk. Imported by `attention_choice` only when chosen. Not here:
the kernels (`kernels/cpu`), and how they come to be compiled.
"""

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from executor.attention import KvViews, LayerAttention
from executor.attention_torch import TorchAttention
from executor.batch import AttentionBatch
from executor.step import Ints
from kernels.cpu import library as c
from kernels.cpu.library import load_library

_FORMAT_OF = {getattr(torch, name): number for number, name in enumerate(c.FORMATS)}


class CpuAttention:
    """The back end `cpu`."""

    name = "cpu"

    def __init__(self) -> None:
        """Raises `kernels.cpu.compiler.CompilerError` where the kernels cannot be had."""
        self.library = load_library()

    def prepare(self, batch: AttentionBatch, views: tuple[KvViews, ...]) -> "CpuStep":
        """See `AttentionBackend`."""
        return CpuStep(self.library, batch, views)

    def copy_blocks(self, blocks: Tensor, sources: Ints, targets: Ints) -> None:
        """See `AttentionBackend`."""
        TorchAttention().copy_blocks(blocks, sources, targets)


@dataclass(frozen=True, slots=True)
class _Shape:
    """What the cut of a step into units of work depends on."""

    num_heads: int
    num_kv_heads: int
    k_head_dim: int
    v_head_dim: int
    window: int | None


class CpuStep:
    """One step: its rows as C++ reads them, and its work, cut once per shape that the model's layers have."""

    def __init__(self, library: ctypes.CDLL, batch: AttentionBatch, views: tuple[KvViews, ...]) -> None:
        self._library = library
        self.views = views
        self._batch = batch  # holds the memory that `rows` points into
        self._threads = torch.get_num_threads()
        self._work: dict[_Shape, int] = {}
        self.rows = c.Rows(
            num_rows=len(batch.context_lengths),
            num_tokens=len(batch.write_blocks),
            block_size=views[0].k.shape[2],
            table_width=batch.tables.shape[1],
            query_starts=batch.query_starts.data_ptr(),
            context_lengths=batch.context_lengths.data_ptr(),
            tables=batch.tables.data_ptr(),
            write_blocks=batch.write_blocks.data_ptr(),
            write_offsets=batch.write_offsets.data_ptr(),
        )

    def __del__(self) -> None:
        for work in self._work.values():
            self._library.octavo_attention_end(work)

    def attend(self, layer: LayerAttention, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """See `PreparedAttention`."""
        views = self.views[layer.layer]
        asked = attention_layer(layer, views, query.shape[1])
        output = query.new_empty((*query.shape[:2], views.v.shape[3]), dtype=torch.float32)
        parts = [_as_floats(part) for part in (query, key, value)]  # holds the copies while C++ reads them
        heads = [ctypes.byref(_heads(part)) for part in (*parts, output)]
        work = self._work_of(asked, _Shape(query.shape[1], key.shape[1], key.shape[2], value.shape[2], layer.window))
        self._library.octavo_attention(ctypes.byref(self.rows), ctypes.byref(asked), work, *heads, self._threads)
        return output.to(query.dtype)

    def _work_of(self, layer: c.AttentionLayer, shape: _Shape) -> int:
        if shape not in self._work:
            work = self._library.octavo_attention_begin(ctypes.byref(self.rows), ctypes.byref(layer), self._threads)
            if not work:
                raise MemoryError("no memory for attention's work space")
            self._work[shape] = work
        return self._work[shape]


def attention_layer(layer: LayerAttention, views: KvViews, num_heads: int) -> c.AttentionLayer:
    """A layer as C++ reads it."""
    return c.AttentionLayer(
        k=_plane(views.k, views.k_scale),
        v=_plane(views.v, views.v_scale),
        num_heads=num_heads,
        num_kv_heads=views.k.shape[1],
        window=layer.window or 0,
        scale=layer.scale,
        softcap=layer.softcap or 0.0,
    )


def _plane(view: Tensor, scale: Tensor | None) -> c.KvPlane:
    plane = c.KvPlane(view.data_ptr(), *_byte_strides(view), view.shape[3], format=_FORMAT_OF[view.dtype])
    if scale is not None:
        plane.scales = scale.data_ptr()
        plane.scale_block_stride, plane.scale_head_stride, plane.scale_token_stride = _byte_strides(scale)
    return plane


def _byte_strides(tensor: Tensor) -> list[int]:
    return [stride * tensor.element_size() for stride in tensor.stride()]


def _as_floats(tensor: Tensor) -> Tensor:
    floats = tensor.float()
    return floats if floats.stride(2) == 1 else floats.contiguous()


def _heads(tensor: Tensor) -> c.Heads:
    return c.Heads(tensor.data_ptr(), *tensor.stride()[:2])
