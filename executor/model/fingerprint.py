"""One hash for "the same model": its configuration, its weights' files and the dtype that they run in.

Small files count by their content. Of a big one, the size, the first and the last MiB and one MiB in every 64 count,
so that the start of a large model does not read all of it; its time of change and its path do not count, so that
copies on several machines agree. Two big files that differ only between the samples would pass for one another.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

_MIB = 1 << 20
_WHOLE_BELOW_BYTES = 64 * _MIB
_NOT_THE_MODEL = ("_name_or_path", "transformers_version")
_SAMPLE_BYTES, _SAMPLE_EVERY_BYTES = _MIB, 64 * _MIB
_WEIGHTS_SUFFIXES = (".safetensors", ".bin", ".gguf")


def fingerprint_of(config: Mapping[str, Any], weights_dtype: str, revision: str, paths: Iterable[Path]) -> str:
    """SHA-256 in hexadecimal.

    Args:
        config: the model's configuration as plain values.
        weights_dtype: its name.
        revision: commit of a hub's model; empty for files.
        paths: weights' files; none for a hub's model, whose commit says it all.
    """
    digest = hashlib.sha256()
    said = {key: value for key, value in config.items() if key not in _NOT_THE_MODEL}
    _add(digest, json.dumps(said, sort_keys=True, default=str).encode())
    _add(digest, weights_dtype.encode())
    _add(digest, revision.encode())
    for path in sorted(paths, key=lambda path: path.name):
        _add(digest, path.name.encode())
        _add(digest, str(path.stat().st_size).encode())
        _add(digest, _content_digest(path))
    return digest.hexdigest()


def weights_files(location: Path | None) -> list[Path]:
    """A `.gguf` file itself, or the weights at the top level of a folder; none for a hub's model."""
    if location is None:
        return []
    if location.is_file():
        return [location]
    return [path for path in location.iterdir() if path.is_file() and path.suffix in _WEIGHTS_SUFFIXES]


def _content_digest(path: Path) -> bytes:
    size, digest = path.stat().st_size, hashlib.sha256()
    with path.open("rb") as stream:
        if size <= _WHOLE_BELOW_BYTES:
            return hashlib.file_digest(stream, "sha256").digest()
        for offset in (*range(0, size - _SAMPLE_BYTES, _SAMPLE_EVERY_BYTES), size - _SAMPLE_BYTES):
            stream.seek(offset)
            digest.update(stream.read(_SAMPLE_BYTES))
    return digest.digest()


def _add(digest: "hashlib._Hash", part: bytes) -> None:
    digest.update(len(part).to_bytes(8, "little"))
    digest.update(part)
