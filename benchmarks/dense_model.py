"""A model as a folder that other servers read: of a GGUF file the very weights that Octavo makes of it, unpacked.

    python -m benchmarks.dense_model demo FOLDER

It has links to the conversions in the user's cache directory, which are made where they are missing.
"""

import argparse
from pathlib import Path

from executor.model.loader import load_model
from octavo.conversion_cache import Conversion, conversion_of
from octavo.model_source import ModelSource, resolve_model
from router.text.tokenizer import load_tokenizer

WEIGHTS = "float32"


def conversions(source: ModelSource) -> list[Conversion]:
    """Weights and tokenizer of a GGUF file; none for a model that is a folder.

    Raises:
        OctavoError: it cannot be loaded.
        RuntimeError: the cache directory cannot be written.
    """
    found = [conversion_of(source, part) for part in (WEIGHTS, "tokenizer")]
    made = [each for each in found if each is not None]
    if not all(each.is_there for each in made):
        model = load_model(source, WEIGHTS)
        load_tokenizer(source.reference, model.vocabulary_size)
    if not all(each.is_there for each in made):
        raise RuntimeError("the conversion could not be kept")
    return made


def link(source: ModelSource, folder: Path) -> None:
    """Fill a folder."""
    kept = [each.folder for each in conversions(source)] or [source.path]
    for each in kept:
        assert each is not None, "a hub's model has no files here"
        for path in each.iterdir():
            (folder / path.name).symlink_to(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("folder", type=Path, help="is made, or is empty")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    link(resolve_model(arguments.model), arguments.folder)


if __name__ == "__main__":
    main()
