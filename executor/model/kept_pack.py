"""A packed decoder in a folder: one file of memory, mapped as it is, and one that says what lies where.

What is mapped is in the page cache once for all processes that map it: an executor, its spare, its successor. Not here:
where the folder is and when it is right (`kept_model`), packing (`packing`).
"""

import contextlib
import ctypes
import fcntl
import json
import mmap
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from executor.model.decoder_form import Rotary
from executor.model.packing import PackedDecoder
from kernels.cpu import library as c

_MEMORY, _INDEX = "memory.bin", "decoder.json"
_ALIGNMENT = 64
_LINEARS = {"qkv", "o", "gate_up", "down", "head"}  # fields that point to a `c.Linear`
_NOT_KEPT = {"layers", "unused"}


def save_pack(packed: PackedDecoder, num_positions: int, folder: Path) -> None:
    """Write it.

    Args:
        num_positions: rows of the rotary tables: the longest sequence.

    Raises:
        OSError: no room, or no right to.
    """
    places: dict[int, int] = {}  # address -> offset in the file
    with (folder / _MEMORY).open("wb") as stream:

        def append(address: int, size: int) -> int:
            stream.write(bytes(-stream.tell() % _ALIGNMENT))
            offset = stream.tell()
            stream.write((ctypes.c_char * size).from_address(address))
            return offset

        for address, size in packed.memory.items():
            places[address] = append(address, size)
        tables = []
        for rotary in packed.rotaries:
            cos, sin = (each.contiguous() for each in rotary(torch.arange(num_positions)))
            places_of_both = [append(each.data_ptr(), each.nbytes) for each in (cos, sin)]
            tables.append({"shape": list(cos.shape), "at": places_of_both})
        size = stream.tell()
    index = {
        "bytes": size,
        "weights_format": packed.weights_format,
        "vocabulary_size": packed.vocabulary_size,
        "all_blocks": packed.all_blocks,
        "decoder": _plain(packed.decoder, places),
        "layers": [_plain(layer, places) for layer in packed.layers],
        "rotaries": tables,
    }
    (folder / _INDEX).write_text(json.dumps(index))


def map_pack(folder: Path) -> PackedDecoder:
    """Map what `save_pack` wrote; `is_mapped` says so as long as this or any other process does.

    Raises:
        OSError, ValueError, KeyError: it is not there, or not whole.
    """
    index = json.loads((folder / _INDEX).read_text())
    with (folder / _MEMORY).open("rb") as stream:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(stream, fcntl.LOCK_SH)  # until the mapping is gone, which has a copy of the descriptor
        flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)  # read ahead now, not by the first request
        mapped = mmap.mmap(stream.fileno(), 0, flags=flags, prot=mmap.PROT_READ)
    if len(mapped) != index["bytes"]:
        raise ValueError(f"{folder / _MEMORY} has {len(mapped)} bytes, not {index['bytes']}")
    memory = _Mapped(mapped)
    made = [memory.structure(c.DecoderLayer, each) for each in index["layers"]]
    layers = (c.DecoderLayer * len(made))(*made)
    decoder = memory.structure(c.Decoder, index["decoder"])
    decoder.layers = layers
    rotaries = tuple(memory.rotary(each) for each in index["rotaries"])
    return PackedDecoder(
        index["weights_format"], index["vocabulary_size"], decoder, layers, rotaries, memory, index["all_blocks"]
    )


def is_mapped(folder: Path) -> bool:
    """Whether a process maps it now; False where that cannot be known."""
    try:
        with (folder / _MEMORY).open("rb") as stream:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _plain(structure: ctypes.Structure, places: dict[int, int]) -> dict[str, Any]:
    """Its fields, with offsets instead of addresses."""
    plain: dict[str, Any] = {}
    for name, kind in structure._fields_:  # type: ignore[misc]
        value = getattr(structure, name)
        if name in _NOT_KEPT:
            continue
        if name in _LINEARS:
            plain[name] = _plain(c.Linear.from_address(value), places)
        elif isinstance(value, ctypes.Structure):
            plain[name] = _plain(value, places)
        elif kind is ctypes.c_void_p:
            plain[name] = None if value is None else places[value]
        else:
            plain[name] = value
    return plain


class _Mapped:
    """Makes structures that point into the mapping, and owns both."""

    def __init__(self, mapped: mmap.mmap) -> None:
        self._bytes = np.frombuffer(mapped, np.uint8)  # holds the mapping
        self._linears: list[c.Linear] = []

    def structure(self, kind: type[Any], plain: dict[str, Any]) -> Any:
        made = kind()
        for name, field_kind in kind._fields_:
            if name in _NOT_KEPT:
                continue
            value = plain[name]
            if name in _LINEARS:
                self._linears.append(self.structure(c.Linear, value))
                value = ctypes.addressof(self._linears[-1])
            elif isinstance(value, dict):
                value = self.structure(field_kind, value)
            elif field_kind is ctypes.c_void_p and value is not None:
                value = self._bytes.ctypes.data + value
            setattr(made, name, value)
        return made

    def rotary(self, table: dict[str, Any]) -> Rotary:
        """Of the positions that are kept; none beyond them is ever asked for."""
        cos, sin = (self._floats(offset, table["shape"]) for offset in table["at"])
        return lambda positions: (cos[: len(positions)], sin[: len(positions)])

    def _floats(self, offset: int, shape: list[int]) -> Tensor:
        """Not to be written to: the pages are read-only."""
        memory = (ctypes.c_float * (shape[0] * shape[1])).from_address(self._bytes.ctypes.data + offset)
        return torch.frombuffer(memory, dtype=torch.float32).view(shape)
