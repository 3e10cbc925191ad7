"""The bytes of every token of a model, as constraints need them: read from the tokenizer that belongs to it."""

from llguidance import LLTokenizer
from transformers import AutoTokenizer

from executor.model.description import ModelDescription
from octavo.conversion_cache import conversion_of
from octavo.grammar import vocabulary_of
from octavo.model_source import resolve_model


def load_vocabulary(model: ModelDescription) -> LLTokenizer:
    """Takes seconds.

    Raises:
        OctavoError: the source names nothing that is here.
        OSError, ValueError: broken files, or a tokenizer of a kind whose bytes are not known.
    """
    found = resolve_model(model.source)
    name, options = found.pretrained_arguments()
    conversion = conversion_of(found, "tokenizer")
    if conversion is not None and conversion.is_there:
        name, options = str(conversion.folder), {"local_files_only": True}
    tokenizer = getattr(AutoTokenizer.from_pretrained(name, **options), "backend_tokenizer", None)
    if tokenizer is None:
        raise ValueError("its tokenizer is not one of the tokenizers library")
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return vocabulary_of(tokenizer.to_str(), model.vocabulary_size, model.eos_token_ids)
