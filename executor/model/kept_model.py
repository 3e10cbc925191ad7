"""A rewritten model, packed and proved, kept in the user's cache directory: what a restart maps instead of loading.

It is found by all that decides it: the content of the model's files, the format, the code that packs it, the
processor's layout, the version of `transformers`. It appears by one rename, whole. Of one model and format the two that
were used last stay, and those that a process maps: two versions of the code on one machine leave each other's alone,
and a third takes the place of the one that was used longest ago.
"""

import contextlib
import ctypes
import functools
import hashlib
import importlib.metadata
import json
import logging
import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from executor.arena import LayerGeometry
from executor.attention import LayerAttention
from executor.batch import Batch
from executor.config import ExecutorConfig
from executor.model.kept_pack import is_mapped, map_pack, save_pack
from executor.model.rewritten import RewrittenDecoder
from executor.model.served import ModelFacts
from octavo.conversion_cache import Conversion, cache_directory
from octavo.model_source import ModelSource

log = logging.getLogger(__name__)

_MODEL_SUFFIXES = (".json", ".safetensors", ".bin", ".gguf")
_WHOLE_BELOW_BYTES = 1 << 30  # a second of hashing; of larger files the time of change counts, and samples
_SAMPLE_BYTES, _NUM_SAMPLES = 1 << 20, 64
_FACTS = "model.json"
_NUM_KEPT = 2  # of one model and format, this one too
_STALE_S = 30 * 86400.0  # without use, after which another one goes too


@dataclass(frozen=True, slots=True)
class PackedModel:
    """A `ServedModel` without modules: nothing but what C++ reads."""

    decoder: RewrittenDecoder
    layers: tuple[LayerGeometry, ...]

    @property
    def linear_format(self) -> str:
        """See `ServedModel`."""
        return self.decoder.weights_format

    @property
    def vocabulary_size(self) -> int:
        """See `ServedModel`."""
        return self.decoder.packed.vocabulary_size

    def forward(self, batch: Batch, attention: Any) -> Tensor:
        """See `ServedModel`."""
        return self.decoder.forward(batch, attention, batch.all_logits_tokens)


class KeptModel:
    """The place of one model."""

    def __init__(self, source: ModelSource, config: ExecutorConfig, library: ctypes.CDLL) -> None:
        """library: of `kernels.cpu`. Reads the model's files. Raises OSError."""
        assert source.path is not None, "a hub's model is not kept"
        self._library = library
        name, code = _content_of(source.path), _code_digest()
        digest = hashlib.sha256(f"{name} {code} {library.octavo_linear_layout()}".encode())
        folder = cache_directory() / f"{source.path.stem}-{name[:24]}"
        self._prefix = f"packed-{config.weights}-"
        self._conversion = Conversion(folder / f"{self._prefix}{digest.hexdigest()[:24]}")

    def load(self) -> tuple[PackedModel, ModelFacts] | None:
        """Map it; None where it is not there, or cannot be read."""
        if not self._conversion.is_there:
            return None
        self._note_use()
        try:
            said = json.loads((self._conversion.folder / _FACTS).read_text())
            packed = map_pack(self._conversion.folder)
            facts = ModelFacts(**{**said["facts"], "eos_token_ids": tuple(said["facts"]["eos_token_ids"])})
            layers = tuple(LayerGeometry(**each) for each in said["layers"])
            attention = [LayerAttention(**each) for each in said["attention"]]
        except (OSError, ValueError, KeyError, TypeError) as error:
            log.warning("%s is not whole and is made again: %s", self._conversion.folder, error)
            shutil.rmtree(self._conversion.folder, ignore_errors=True)
            return None
        return PackedModel(RewrittenDecoder(self._library, packed, attention), layers), facts

    def keep(
        self,
        decoder: RewrittenDecoder,
        layers: Sequence[LayerGeometry],
        attention: Sequence[LayerAttention],
        facts: ModelFacts,
    ) -> bool:
        """Whether it is there now. Where the cache directory cannot be written, the log says so."""
        said = {
            "facts": asdict(facts),
            "layers": [asdict(each) for each in layers],
            "attention": [asdict(each) for each in attention],
        }

        def save(folder: Path) -> None:
            save_pack(decoder.packed, facts.longest_context, folder)
            (folder / _FACTS).write_text(json.dumps(said))

        if not self._conversion.keep(save):
            return False
        self._note_use()
        return True

    def _note_use(self) -> None:
        """By the folder's time of change, before anybody else may count it among the rest; then take those away."""
        with contextlib.suppress(OSError):  # a cache that only others write
            os.utime(self._conversion.folder)
            self._remove_others()

    def _remove_others(self) -> None:
        others = {
            other: other.stat().st_mtime
            for other in self._conversion.folder.parent.glob(f"{self._prefix}*")
            if other != self._conversion.folder
        }
        for age, other in enumerate(sorted(others, key=others.__getitem__, reverse=True)):
            is_stale = time.time() - others[other] > _STALE_S
            if (is_stale or age >= _NUM_KEPT - 1) and not is_mapped(other):
                log.info("removed %s, which an older version of the code kept", other)
                shutil.rmtree(other, ignore_errors=True)


def _content_of(path: Path) -> str:
    """Of a file, or of the files at the top of a folder that a model is made of."""
    digest = hashlib.sha256()
    files = [path] if path.is_file() else [each for each in path.iterdir() if each.suffix in _MODEL_SUFFIXES]
    for file in sorted(files):
        digest.update(f"{file.name} {file.stat().st_size} ".encode())
        digest.update(_file_digest(file))
    return digest.hexdigest()


def _file_digest(file: Path) -> bytes:
    status = file.stat()
    with file.open("rb") as stream:
        if status.st_size <= _WHOLE_BELOW_BYTES:
            return hashlib.file_digest(stream, "sha256").digest()
        digest = hashlib.sha256(str(status.st_mtime_ns).encode())
        for offset in range(0, status.st_size, status.st_size // _NUM_SAMPLES):
            stream.seek(offset)
            digest.update(stream.read(_SAMPLE_BYTES))
    return digest.digest()


@functools.cache
def _code_digest() -> str:
    """Of the code that decides what is packed: that of this folder, the kernels' packing, and `transformers`."""
    digest = hashlib.sha256(importlib.metadata.version("transformers").encode())
    here = Path(__file__).parent
    kernels = here.parents[1] / "kernels" / "cpu"
    packing = [kernels / name for name in ("linear.h", "linear.cpp", "blocks.h", "blocks.cpp")]
    for file in (*sorted(here.glob("*.py")), *packing):
        digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest()
