"""Conversions of model files, kept in the user's cache directory so that only the first start pays for them.

`transformers` takes half a minute to read even a small GGUF file; what it makes of it, saved in its own format, is
mapped in a fraction of a second. A conversion is found by the content of the file, so a changed file is another one,
and it appears by one rename: what is there is whole. Light on purpose: what is saved and loaded is the caller's.
"""

import hashlib
import importlib.metadata
import logging
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from octavo.model_source import ModelSource

log = logging.getLogger(__name__)

# Changes when what callers keep here changes its form.
_FORMAT = b"octavo-conversion-1"


@dataclass(frozen=True, slots=True)
class Conversion:
    """Where one part of a converted file is, or would be."""

    folder: Path

    @property
    def is_there(self) -> bool:
        return self.folder.is_dir()

    def keep(self, save: Callable[[Path], object]) -> bool:
        """Let `save` fill a folder, and make it the conversion; one that came first is left as it is.

        False, and a line in the log, where the cache directory cannot be written. Nothing unfinished is left behind.
        """
        try:
            self._keep(save)
        except OSError as error:
            log.info("the conversion is not kept, so the next start converts again: %s", error)
            return False
        log.info("kept the conversion in %s", self.folder)
        return True

    def _keep(self, save: Callable[[Path], object]) -> None:
        self.folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        unfinished = Path(tempfile.mkdtemp(prefix=".unfinished-", dir=self.folder.parent))
        try:
            save(unfinished)
            for path in (*unfinished.iterdir(), unfinished):
                _flush(path)
            self._publish(unfinished)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)

    def _publish(self, finished: Path) -> None:
        try:
            finished.rename(self.folder)
        except OSError:
            if not self.is_there:  # another process was not first: the rename itself failed
                raise


def conversion_of(source: ModelSource, part: str) -> Conversion | None:
    """The conversion of a GGUF file; None for models that load quickly as they are.

    Args:
        part: what of it: a weights' dtype, or "tokenizer".

    Raises:
        OSError: the file cannot be read.
    """
    if source.path is None or "gguf_file" not in source.options:
        return None
    digest = hashlib.sha256(_FORMAT + importlib.metadata.version("transformers").encode())
    with source.path.open("rb") as stream:
        digest.update(hashlib.file_digest(stream, "sha256").digest())
    return Conversion(cache_directory() / f"{source.path.stem}-{digest.hexdigest()[:24]}" / part)


def cache_directory() -> Path:
    """By the XDG base directory specification: $XDG_CACHE_HOME, else ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "octavo" / "models"


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
