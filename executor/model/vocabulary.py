"""The bytes of every token of a model, as constraints need them: read from the tokenizer that belongs to it."""

import importlib
from pathlib import Path

from llguidance import LLTokenizer
from tokenizers import Tokenizer

from executor.model.description import ModelDescription
from octavo.conversion_cache import conversion_of
from octavo.grammar import vocabulary_of
from octavo.model_source import ModelSource, resolve_model


def load_vocabulary(model: ModelDescription) -> LLTokenizer:
    """Takes seconds.

    Raises:
        OctavoError: the source names nothing that is here.
        OSError, ValueError: broken files, or a tokenizer of a kind whose bytes are not known.
    """
    tokenizer = _tokenizer(resolve_model(model.source))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return vocabulary_of(tokenizer.to_str(), model.vocabulary_size, model.eos_token_ids)


def _tokenizer(found: ModelSource) -> Tokenizer:
    """Of a conversion the file itself, which is whole: importing `transformers` would take longer than the rest."""
    conversion = conversion_of(found, "tokenizer")
    kept = Path() if conversion is None else conversion.folder / "tokenizer.json"
    if kept.is_file():
        return Tokenizer.from_file(str(kept))
    name, options = found.pretrained_arguments()
    loaded = importlib.import_module("transformers").AutoTokenizer.from_pretrained(name, **options)
    tokenizer = getattr(loaded, "backend_tokenizer", None)
    if tokenizer is None:
        raise ValueError("its tokenizer is not one of the tokenizers library")
    return tokenizer
