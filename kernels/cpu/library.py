"""The C interface of the compiled library: structures and signatures as the headers have them.

Not here: tensors. Compiling is `compiler`'s.
"""

import ctypes
import functools
from ctypes import POINTER, Structure, c_float, c_int, c_int32, c_int64, c_void_p
from pathlib import Path

from kernels.cpu.compiler import CompilerError, compiled_library

FORMATS = ("float32", "bfloat16", "float16", "int8")  # index: the number by which C++ knows the format


class KvPlane(Structure):
    """K or V of one layer; int8: codes and their scales, else no scales; strides in bytes."""

    _fields_ = (
        ("data", c_void_p),
        *((name, c_int64) for name in ("block_stride", "head_stride", "token_stride", "element_stride", "head_dim")),
        ("scales", c_void_p),
        *((name, c_int64) for name in ("scale_block_stride", "scale_head_stride", "scale_token_stride")),
        ("format", c_int32),
        ("unused", c_int32),
    )


class Rows(Structure):
    """The rows of one step."""

    _fields_ = (
        *((name, c_int64) for name in ("num_rows", "num_tokens", "block_size", "table_width")),
        *((name, c_void_p) for name in ("query_starts", "context_lengths", "tables", "write_blocks", "write_offsets")),
    )


class AttentionLayer(Structure):
    """What a layer's attention is."""

    _fields_ = (
        ("k", KvPlane),
        ("v", KvPlane),
        *((name, c_int64) for name in ("num_heads", "num_kv_heads", "window")),
        ("scale", c_float),
        ("softcap", c_float),
    )


class Heads(Structure):
    """[num_tokens, num_heads, head_dim] float32; strides in elements, dimensions next to each other."""

    _fields_ = (("data", c_void_p), ("token_stride", c_int64), ("head_stride", c_int64))


class Norm(Structure):
    """RMSNorm; no weight: there is no norm here."""

    _fields_ = (("weight", c_void_p), ("epsilon", c_float), ("unused", c_int32))


class Linear(Structure):
    """Packed weights of one linear layer; no bias: null."""

    _fields_ = (
        *((name, c_int64) for name in ("num_outputs", "num_inputs")),
        *((name, c_int32) for name in ("format", "gated", "block_bits", "unused")),
        *((name, c_void_p) for name in ("weights", "scales", "bias")),
    )


class DecoderLayer(Structure):
    """One layer of a rewritten model."""

    _fields_ = (
        *((name, c_void_p) for name in ("qkv", "o", "gate_up", "down")),
        *((name, Norm) for name in ("before_attention", "after_attention", "before_mlp", "after_mlp", "query", "key")),
        *((name, c_int64) for name in ("num_heads", "num_kv_heads", "k_head_dim", "v_head_dim", "rotary")),
    )


class Decoder(Structure):
    """A rewritten model."""

    _fields_ = (
        ("layers", POINTER(DecoderLayer)),
        *((name, c_int64) for name in ("num_layers", "hidden_size", "intermediate_size")),
        ("embedding", c_void_p),
        ("embedding_format", c_int32),
        ("activation", c_int32),
        ("embedding_scale", c_float),
        ("logits_softcap", c_float),
        ("last", Norm),
        ("head", c_void_p),
    )


class RotaryTable(Structure):
    """Cosines and sines by position."""

    _fields_ = (("cos", c_void_p), ("sin", c_void_p), ("rotary_dim", c_int64))


class Step(Structure):
    """What a step brings to a rewritten model."""

    _fields_ = (
        ("rows", Rows),
        ("attention", POINTER(AttentionLayer)),
        ("rotary", POINTER(RotaryTable)),
        *((name, c_void_p) for name in ("input_ids", "positions", "logits_tokens")),
        ("num_logits", c_int64),
        ("logits", c_void_p),
        ("logits_stride", c_int64),
    )


ACTIVATIONS = ("silu", "gelu_tanh")  # index: the number by which C++ knows it

_SIGNATURES = {
    "octavo_lanes": (c_int, ()),
    "octavo_attention_begin": (c_void_p, (POINTER(Rows), POINTER(AttentionLayer), c_int)),
    "octavo_attention_end": (None, (c_void_p,)),
    "octavo_attention": (
        None,
        (POINTER(Rows), POINTER(AttentionLayer), c_void_p, *[POINTER(Heads)] * 4, c_int),
    ),
    "octavo_panel": (c_int64, ()),
    "octavo_linear_pack": (c_void_p, (c_void_p, c_void_p, c_int64, c_int64, c_int, c_int)),
    "octavo_linear_bytes": (c_int64, (c_void_p,)),
    "octavo_linear_layout": (c_int64, ()),
    "octavo_linear_free": (None, (c_void_p,)),
    "octavo_linear": (c_int, (c_void_p, c_void_p, c_int64, c_void_p, c_int)),
    "octavo_decode": (c_int, (POINTER(Decoder), POINTER(Step), c_int)),
}


@functools.cache
def load_library() -> ctypes.CDLL:
    """Compile where needed, and load. PyTorch must have been imported: the library uses its OpenMP runtime.

    Raises:
        CompilerError: there is none, or it would bring a second OpenMP runtime into the process.
    """
    path = compiled_library()
    before = _openmp_runtimes()
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise CompilerError(f"{path} cannot be loaded: {error}; remove it to have it compiled again") from error
    added = _openmp_runtimes() - before
    if before and added:
        raise CompilerError(
            f"it would run threads of {added.pop()} beside PyTorch's of {before.pop()}, on the same processors"
        )
    return declare(library)


def declare(library: ctypes.CDLL) -> ctypes.CDLL:
    """Tell ctypes the types of the functions."""
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, list(arguments)
    return library


def _openmp_runtimes() -> set[str]:
    """Files of OpenMP runtimes that are mapped into this process."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return set()
    paths = {line.split(maxsplit=5)[-1] for line in lines if ".so" in line}
    return {path for path in paths if Path(path).name.startswith(("libgomp", "libiomp", "libomp"))}
