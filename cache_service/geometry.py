"""The shape of KV memory: what a block holds and where in its extent each number lies.

    arena    | header ... | block 0 | block 1 | block 2 | ...
    block    | layer 0: K, V, K scales, V scales | layer 1 ... |      each tensor aligned
    tensor   [kv_head, token, head_dim]; scales [kv_head, token] float32, only for int8 and fp8

Here belongs arithmetic. Not here: files and mappings (arena).
"""

from dataclasses import dataclass

from octavo.errors import FieldViolation, invalid_argument

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "float8_e4m3fn": 1}
SCALED_DTYPES = frozenset({"int8", "float8_e4m3fn"})
SCALE_BYTES = 4

# Every tensor and every block starts on this boundary: no two blocks share a cache line or the pair of lines that a
# CPU prefetches together, every vector load can be an aligned one, and a GPU's 128-byte transactions are whole.
ALIGNMENT_BYTES = 256
# The first block starts on a huge page, so that the kernel may back the arena with such pages throughout.
DATA_OFFSET_BYTES = 2 * 1024 * 1024

MAX_LAYERS = 4096
MAX_DIM = 65536


@dataclass(frozen=True, slots=True)
class LayerGeometry:
    num_kv_heads: int
    k_head_dim: int
    v_head_dim: int


@dataclass(frozen=True, slots=True)
class KvGeometry:
    block_size: int  # tokens
    dtype: str  # a key of DTYPE_BYTES
    layers: tuple[LayerGeometry, ...]  # one per attention layer, in model order


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """Where `[kv_head, token, element]` lies in a block: all in bytes."""

    offset: int
    head_stride: int
    token_stride: int
    element_stride: int


@dataclass(frozen=True, slots=True)
class LayerLayout:
    k: TensorLayout
    v: TensorLayout
    k_scale: TensorLayout | None
    v_scale: TensorLayout | None


@dataclass(frozen=True, slots=True)
class ArenaLayout:
    """Block b starts at `data_offset + b * block_bytes`."""

    data_offset: int
    block_bytes: int
    layers: tuple[LayerLayout, ...]


@dataclass(frozen=True, slots=True)
class CudaHandle:
    """Where an arena in a GPU's memory is handed out."""

    socket: str  # name in the abstract namespace
    memory_id: str
    device_uuid: str


@dataclass(frozen=True, slots=True)
class ArenaDescription:
    """All that a process needs to know to use an arena."""

    arena_id: str
    model_fingerprint: str
    geometry: KvGeometry
    num_blocks: int  # block 0, reserved, included
    layout: ArenaLayout
    path: str  # empty for memory of a device
    size_bytes: int
    cuda: CudaHandle | None = None  # None: a segment of shared memory


def check_geometry(geometry: KvGeometry) -> None:
    """Raise INVALID_ARGUMENT that names every bad field."""
    bad: list[FieldViolation] = []
    if not 1 <= geometry.block_size <= MAX_DIM:
        bad.append(FieldViolation("geometry.block_size", f"is {geometry.block_size}; 1 to {MAX_DIM} tokens"))
    if geometry.dtype not in DTYPE_BYTES:
        bad.append(FieldViolation("geometry.dtype", f"is {geometry.dtype!r}; one of {', '.join(DTYPE_BYTES)}"))
    if not 1 <= len(geometry.layers) <= MAX_LAYERS:
        bad.append(FieldViolation("geometry.layers", f"has {len(geometry.layers)} layers; 1 to {MAX_LAYERS}"))
    for index, layer in enumerate(geometry.layers):
        for name in LayerGeometry.__slots__:
            if not 1 <= getattr(layer, name) <= MAX_DIM:
                path = f"geometry.layers[{index}].{name}"
                bad.append(FieldViolation(path, f"is {getattr(layer, name)}; 1 to {MAX_DIM}"))
    if bad:
        raise invalid_argument(*bad)


def lay_out(geometry: KvGeometry) -> ArenaLayout:
    """The layout of a checked geometry: tensors one after the other, each aligned."""
    cursor = _Cursor(geometry)
    layers = tuple(cursor.place_layer(layer) for layer in geometry.layers)
    return ArenaLayout(DATA_OFFSET_BYTES, cursor.offset, layers)


class _Cursor:
    """Walks through one block's extent."""

    def __init__(self, geometry: KvGeometry) -> None:
        self.offset = 0
        self._block_size = geometry.block_size
        self._element_bytes = DTYPE_BYTES[geometry.dtype]
        self._is_scaled = geometry.dtype in SCALED_DTYPES

    def place_layer(self, layer: LayerGeometry) -> LayerLayout:
        k = self._place(layer.num_kv_heads, layer.k_head_dim, self._element_bytes)
        v = self._place(layer.num_kv_heads, layer.v_head_dim, self._element_bytes)
        scales = [self._place(layer.num_kv_heads, 1, SCALE_BYTES) if self._is_scaled else None for _ in "kv"]
        return LayerLayout(k, v, *scales)

    def _place(self, num_heads: int, head_dim: int, element_bytes: int) -> TensorLayout:
        token_stride = head_dim * element_bytes
        head_stride = self._block_size * token_stride
        tensor = TensorLayout(self.offset, head_stride, token_stride, element_bytes)
        self.offset = align_up(self.offset + num_heads * head_stride, ALIGNMENT_BYTES)
        return tensor


def align_up(value: int, alignment: int) -> int:
    """The least multiple of `alignment` that is not below `value`."""
    return -(-value // alignment) * alignment


def count_blocks(layout: ArenaLayout, kv_bytes: int) -> int:
    """How many whole blocks fit into `kv_bytes`. Raises INVALID_ARGUMENT if not even two do."""
    num_blocks = kv_bytes // layout.block_bytes
    if num_blocks < 2:
        raise invalid_argument(
            FieldViolation(
                "kv_bytes",
                f"is {kv_bytes}; at least {2 * layout.block_bytes} for two blocks of {layout.block_bytes} bytes, "
                "of which one is reserved",
            )
        )
    if num_blocks > 2**31 - 1:
        raise invalid_argument(FieldViolation("kv_bytes", f"gives {num_blocks} blocks; at most 2**31 - 1"))
    return num_blocks
