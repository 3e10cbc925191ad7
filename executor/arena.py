"""The KV arena as this process sees it: the mapping, and views of each layer's K and V, and of their scales.

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
from executor.huge_pages import Collapsing, map_aligned
from executor.kv_codes import LARGEST_CODE
from octavo.errors import Code, OctavoError

KV_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int8": torch.int8,
    "float8_e4m3fn": torch.float8_e4m3fn,
}
_SCALE = torch.float32


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
    k_scale: TensorLayout | None = None  # for codes: [kv_head, token] float32
    v_scale: TensorLayout | None = None


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
        collapsing: gathers the memory into huge pages; None: nothing does
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
        self.views = tuple(
            KvViews(
                *(_view(memory, layout, geometry.block_size, tensor) for tensor in _tensors(geometry, layer, where))
            )
            for layer, where in zip(geometry.layers, layout.layers, strict=True)
        )
        self.collapsing: Collapsing | None = None
        self._lock = lock

    def lost_reason(self) -> str | None:
        """Why the memory must not be used any more; None: it is sound."""
        return None

    def close(self) -> None:
        """Let go of the lock. The memory stays mapped as long as a view of it lives."""
        if self.collapsing is not None:
            self.collapsing.stop()
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
        memory = map_aligned(lock, size_bytes)
        arena = Arena(memory, layout, geometry, lock)
        arena.collapsing = Collapsing(memory)
        return arena
    except BaseException as error:
        os.close(lock)
        if isinstance(error, BlockingIOError):
            raise _unusable(f"{path} is locked by a process that creates or reclaims it; start again") from error
        raise


def private_arena(geometry: KvGeometry, num_blocks: int, device: torch.device | str = "cpu") -> Arena:
    """An arena in this process's own memory, filled with NaN: for checks of a model, where no cache service is.

    Codes are any there, and their scales NaN.
    """
    dtype = KV_DTYPES[geometry.dtype]
    filler = _SCALE if dtype in LARGEST_CODE else dtype
    layers, end = [], 0

    def place(num_heads: int, head_dim: int, item: int) -> TensorLayout:
        nonlocal end
        token_stride = head_dim * item
        head_stride = geometry.block_size * token_stride
        tensor = TensorLayout(end, head_stride, token_stride, item)
        end = -(-(end + num_heads * head_stride) // filler.itemsize) * filler.itemsize
        return tensor

    for layer in geometry.layers:
        head_dims = (layer.k_head_dim, layer.v_head_dim)
        tensors = [place(layer.num_kv_heads, head_dim, dtype.itemsize) for head_dim in head_dims]
        if dtype in LARGEST_CODE:
            tensors += [place(layer.num_kv_heads, 1, _SCALE.itemsize) for _ in head_dims]
        layers.append(LayerLayout(*tensors))
    memory = torch.full((num_blocks * end // filler.itemsize,), torch.nan, dtype=filler, device=device)
    return Arena(memory.view(torch.uint8), ArenaLayout(0, end, num_blocks, tuple(layers)), geometry)


@dataclass(frozen=True, slots=True)
class _Tensor:
    """One tensor of a layer: [num_heads, block_size, head_dim] of each block; no head_dim: its scales."""

    where: TensorLayout
    dtype: torch.dtype
    num_heads: int
    head_dim: int | None


def _tensors(geometry: KvGeometry, layer: LayerGeometry, where: LayerLayout) -> list[_Tensor]:
    """K, V, and where they are codes their scales. Raises OctavoError."""
    dtype, heads = KV_DTYPES[geometry.dtype], layer.num_kv_heads
    tensors = [_Tensor(where.k, dtype, heads, layer.k_head_dim), _Tensor(where.v, dtype, heads, layer.v_head_dim)]
    scales = [scale for scale in (where.k_scale, where.v_scale) if scale is not None]
    if len(scales) != (2 if dtype in LARGEST_CODE else 0):
        raise _unusable(f"{len(scales)} tensors of scales in a layer of KV dtype {geometry.dtype}")
    return tensors + [_Tensor(scale, _SCALE, heads, None) for scale in scales]


def _view(memory: Tensor, layout: ArenaLayout, block_size: int, tensor: _Tensor) -> Tensor:
    """[num_blocks, num_heads, block_size, head_dim], without head_dim for scales."""
    size, where = tensor.dtype.itemsize, tensor.where
    elements = memory[: memory.numel() // size * size].view(tensor.dtype)
    shape = [layout.num_blocks, tensor.num_heads, block_size]
    strides = [layout.block_bytes, where.head_stride, where.token_stride]
    if tensor.head_dim is not None:
        shape, strides = [*shape, tensor.head_dim], [*strides, where.element_stride]
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
    for layer, where in zip(geometry.layers, layout.layers, strict=True):
        for tensor in _tensors(geometry, layer, where):
            _check_tensor(layout, geometry.block_size, tensor)


def _check_tensor(layout: ArenaLayout, block_size: int, tensor: _Tensor) -> None:
    item, where = tensor.dtype.itemsize, tensor.where
    numbers = (layout.data_offset + where.offset, where.head_stride, where.token_stride, where.element_stride)
    if any(number % item for number in (*numbers, layout.block_bytes)):
        name = str(tensor.dtype).removeprefix("torch.")
        raise _unusable(f"offsets and strides must be multiples of {item} bytes, the size of {name}")
    last = where.offset + (tensor.num_heads - 1) * where.head_stride + (block_size - 1) * where.token_stride
    last += ((tensor.head_dim or 1) - 1) * where.element_stride
    if last + item > layout.block_bytes:
        raise _unusable(f"a tensor ends {last + item - layout.block_bytes} bytes past its block")


def _unusable(what: str) -> OctavoError:
    return OctavoError(Code.FAILED_PRECONDITION, "ARENA_UNUSABLE", f"the arena cannot be used: {what}")
