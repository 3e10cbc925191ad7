"""The KV arena as this process sees it: the mapping, and views of each layer's K and V.

The cache service owns the memory and says where each tensor lies; this module only maps it and makes the views. A
shared lock is held while the mapping lives, so that a starting cache service can tell a used arena from a leftover.
Not here: which block belongs to whom, writing and copying KV.
"""

import fcntl
import os
from dataclasses import dataclass

import torch
from torch import Tensor

from executor.attention import KvViews
from octavo.errors import Code, OctavoError

KV_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class LayerGeometry:
    """Size of one layer's K and V per token."""

    num_kv_heads: int
    k_head_dim: int
    v_head_dim: int


@dataclass(frozen=True, slots=True)
class KvGeometry:
    """Size of a block."""

    block_size: int  # tokens
    dtype: str  # a key of KV_DTYPES
    layers: tuple[LayerGeometry, ...]  # attention layers in model order


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """Where one tensor lies in a block, in bytes."""

    offset: int
    head_stride: int
    token_stride: int
    element_stride: int


@dataclass(frozen=True, slots=True)
class LayerLayout:
    """Where one layer lies in a block."""

    k: TensorLayout
    v: TensorLayout


@dataclass(frozen=True, slots=True)
class ArenaLayout:
    """Block b starts at data_offset + b * block_bytes."""

    data_offset: int
    block_bytes: int
    num_blocks: int  # block 0, reserved, included
    layers: tuple[LayerLayout, ...]


@dataclass(frozen=True, slots=True)
class CudaMemory:
    """Where the memory of a GPU is to be had."""

    socket: str  # name in the abstract namespace
    memory_id: str
    size_bytes: int
    device_uuid: str


class Arena:
    """A mapped arena.

    Attributes:
        blocks: [num_blocks, block_bytes] uint8, whole blocks
        views: K and V of each layer
    """

    def __init__(self, memory: Tensor, layout: ArenaLayout, geometry: KvGeometry, lock: int | None = None) -> None:
        """Make the views.

        Args:
            memory: [size_bytes] uint8.
            layout, geometry: as the cache service reported them.
            lock: descriptor that holds the shared lock; closed with the arena.

        Raises:
            OctavoError: FAILED_PRECONDITION, the layout does not fit the memory or the dtype.
        """
        _check_layout(memory.numel(), layout, geometry)
        self.num_blocks = layout.num_blocks
        self.geometry = geometry
        shape, strides = (layout.num_blocks, layout.block_bytes), (layout.block_bytes, 1)
        self.blocks = memory.as_strided(shape, strides, layout.data_offset)
        dtype = KV_DTYPES[geometry.dtype]
        elements = memory[: memory.numel() // dtype.itemsize * dtype.itemsize].view(dtype)
        self.views = tuple(
            KvViews(
                _view(elements, layout, where.k, layer.num_kv_heads, geometry.block_size, layer.k_head_dim),
                _view(elements, layout, where.v, layer.num_kv_heads, geometry.block_size, layer.v_head_dim),
            )
            for layer, where in zip(geometry.layers, layout.layers, strict=True)
        )
        self._lock = lock

    def lost_reason(self) -> str | None:
        """Why the memory must not be used any more; None: it is sound."""
        return None

    def close(self) -> None:
        """Let go of the lock. The memory stays mapped as long as a view of it lives."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def map_arena(path: str, size_bytes: int, layout: ArenaLayout, geometry: KvGeometry) -> Arena:
    """Map the arena's shared memory, with a shared lock on it.

    Raises:
        OctavoError: FAILED_PRECONDITION: no such file, another size, or the owner holds it exclusively.
    """
    try:
        # Never O_CREAT: a missing file must not become an empty arena.
        lock = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise _unusable(f"cannot open {path}: {error.strerror}; do both processes see the same /dev/shm?") from error
    try:
        found = os.fstat(lock).st_size
        if found != size_bytes:
            raise _unusable(f"{path} has {found} bytes, not the {size_bytes} that the cache service reported")
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        # Through the descriptor, so that the memory is that of the locked file whatever happens to the name.
        memory = torch.from_file(f"/proc/self/fd/{lock}", shared=True, size=size_bytes, dtype=torch.uint8)
        return Arena(memory, layout, geometry, lock)
    except BaseException as error:
        os.close(lock)
        if isinstance(error, BlockingIOError):
            raise _unusable(f"{path} is locked by a process that creates or reclaims it; start again") from error
        raise


def private_arena(geometry: KvGeometry, num_blocks: int, device: torch.device | str = "cpu") -> Arena:
    """An arena in this process's own memory, filled with NaN: for checks of a model, where no cache service is."""
    item = KV_DTYPES[geometry.dtype].itemsize
    layers, offset = [], 0
    for layer in geometry.layers:
        tensors = []
        for head_dim in (layer.k_head_dim, layer.v_head_dim):
            token_stride = head_dim * item
            head_stride = geometry.block_size * token_stride
            tensors.append(TensorLayout(offset, head_stride, token_stride, item))
            offset += layer.num_kv_heads * head_stride
        layers.append(LayerLayout(*tensors))
    memory = torch.full((num_blocks * offset // item,), torch.nan, dtype=KV_DTYPES[geometry.dtype], device=device)
    return Arena(memory.view(torch.uint8), ArenaLayout(0, offset, num_blocks, tuple(layers)), geometry)


def _view(
    elements: Tensor, layout: ArenaLayout, where: TensorLayout, num_heads: int, block_size: int, head_dim: int
) -> Tensor:
    """[num_blocks, num_heads, block_size, head_dim] of `elements`, the memory in the KV dtype."""
    size = elements.element_size()
    strides = (layout.block_bytes, where.head_stride, where.token_stride, where.element_stride)
    shape = (layout.num_blocks, num_heads, block_size, head_dim)
    return elements.as_strided(
        shape, [stride // size for stride in strides], (layout.data_offset + where.offset) // size
    )


def _check_layout(size_bytes: int, layout: ArenaLayout, geometry: KvGeometry) -> None:
    if geometry.dtype not in KV_DTYPES:
        raise _unusable(f"KV dtype {geometry.dtype}; this executor takes {', '.join(KV_DTYPES)}")
    if len(layout.layers) != len(geometry.layers):
        raise _unusable(f"{len(layout.layers)} layers in the layout, {len(geometry.layers)} in the geometry")
    if layout.num_blocks < 2 or layout.data_offset + layout.num_blocks * layout.block_bytes > size_bytes:
        raise _unusable(f"{layout.num_blocks} blocks of {layout.block_bytes} bytes in {size_bytes} bytes")
    item = KV_DTYPES[geometry.dtype].itemsize
    for layer, where in zip(geometry.layers, layout.layers, strict=True):
        for tensor, head_dim in ((where.k, layer.k_head_dim), (where.v, layer.v_head_dim)):
            numbers = (layout.data_offset + tensor.offset, tensor.head_stride, tensor.token_stride)
            if any(number % item for number in (*numbers, tensor.element_stride, layout.block_bytes)):
                raise _unusable(f"offsets and strides must be multiples of {item} bytes, the size of {geometry.dtype}")
            last = (
                tensor.offset
                + (layer.num_kv_heads - 1) * tensor.head_stride
                + (geometry.block_size - 1) * tensor.token_stride
                + (head_dim - 1) * tensor.element_stride
            )
            if last + item > layout.block_bytes:
                raise _unusable(f"a tensor ends {last + item - layout.block_bytes} bytes past its block")


def _unusable(what: str) -> OctavoError:
    return OctavoError(Code.FAILED_PRECONDITION, "ARENA_UNUSABLE", f"the arena cannot be used: {what}")
