"""What a GGUF file says it holds: the names of its tensors, and where their data ends. Reads the header only.

The loader of `transformers` passes over tensors that its map does not know and reads what is there of a cut file;
both would serve a wrong model without a word. Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md,
version 2 and 3, little-endian.
"""

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from executor.model.refusal import not_loadable

_SCALAR_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # type of value -> size
_STRING, _ARRAY = 8, 9
_VERSIONS = (2, 3)


@dataclass(frozen=True, slots=True)
class GgufIndex:
    """The header of a file."""

    tensor_names: tuple[str, ...]
    last_data_offset: int  # where the last tensor begins, counted from the end of the header


def read_gguf_index(path: Path) -> GgufIndex:
    """Read the header.

    Raises:
        OctavoError: FAILED_PRECONDITION, MODEL_NOT_LOADABLE: cut off, or not of a known version.
    """
    try:
        with path.open("rb") as stream:
            index, header_bytes = _read(stream)
    except (EOFError, UnicodeDecodeError, KeyError) as error:
        raise not_loadable(f"{path}: its header is cut off or damaged; is the file whole?") from error
    size = path.stat().st_size
    if header_bytes + index.last_data_offset >= size:
        begin = header_bytes + index.last_data_offset
        raise not_loadable(f"{path}: its last tensor begins at byte {begin} of {size}; is the file whole?")
    return index


def _read(stream: BinaryIO) -> tuple[GgufIndex, int]:
    magic, version, num_tensors, num_values = struct.unpack("<4sIQQ", _take(stream, 24))
    if magic != b"GGUF" or version not in _VERSIONS:
        raise not_loadable(f"GGUF version {version} (magic {magic!r}); known are {_VERSIONS}")
    for _ in range(num_values):
        _string(stream)
        _skip_value(stream, _uint32(stream))
    names, last_offset = [], 0
    for _ in range(num_tensors):
        names.append(_string(stream).decode())
        num_dimensions = _uint32(stream)
        _take(stream, 8 * num_dimensions + 4)  # shape, type
        last_offset = max(last_offset, _uint64(stream))
    return GgufIndex(tuple(names), last_offset), stream.tell()


def _skip_value(stream: BinaryIO, kind: int) -> None:
    if kind == _STRING:
        _string(stream)
    elif kind == _ARRAY:
        of, number = _uint32(stream), _uint64(stream)
        if of in _SCALAR_BYTES:
            _take(stream, _SCALAR_BYTES[of] * number)
        else:
            for _ in range(number):
                _skip_value(stream, of)
    else:
        _take(stream, _SCALAR_BYTES[kind])


def _string(stream: BinaryIO) -> bytes:
    return _take(stream, _uint64(stream))


def _uint32(stream: BinaryIO) -> int:
    return int(struct.unpack("<I", _take(stream, 4))[0])


def _uint64(stream: BinaryIO) -> int:
    return int(struct.unpack("<Q", _take(stream, 8))[0])


def _take(stream: BinaryIO, number: int) -> bytes:
    taken = stream.read(number)
    if len(taken) != number:
        raise EOFError
    return taken
