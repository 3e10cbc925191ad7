"""Loading: from what `octavo.model_source` found to a model whose attention is paged, or a clear refusal."""

import logging
from collections.abc import Collection
from contextlib import redirect_stderr
from io import StringIO
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, GgufConfig

from executor.model.description import ModelDescription
from executor.model.fingerprint import fingerprint_of, weights_files
from executor.model.forward import CausalModel
from executor.model.gguf_index import GgufIndex, read_gguf_index
from executor.model.hook import IMPLEMENTATION, AttentionHook
from executor.model.probe import probe_geometry
from executor.model.refusal import not_loadable, unsupported
from executor.model.rope_factors import FACTORS, apply_rope_factors
from executor.model.served import ModelFacts, describe
from executor.model.support import check_config
from octavo.conversion_cache import Conversion, conversion_of
from octavo.errors import OctavoError
from octavo.model_source import ModelSource

log = logging.getLogger(__name__)

WEIGHTS_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_SHOWN_NAMES = 5


def load_model(source: ModelSource, weights_dtype: str) -> CausalModel:
    """Load, replace attention, and find out what attention needs. Converts a GGUF file once, and keeps what came of it.

    Raises:
        OctavoError: FAILED_PRECONDITION: MODEL_NOT_LOADABLE (files), MODEL_NOT_SUPPORTED (what they describe).
    """
    location, options = source.pretrained_arguments()
    if "gguf_file" in options:
        module = _load_gguf(source, weights_dtype)
    else:
        module = _load_checked(source, location, options, weights_dtype)
    hook = AttentionHook(module)
    probed = probe_geometry(module, hook, module.config)
    return CausalModel(module, hook, module.config, probed, WEIGHTS_DTYPES[weights_dtype])


def describe_model(model: CausalModel, source: ModelSource, name: str, max_context_tokens: int) -> ModelDescription:
    """See `served.describe`."""
    return describe(facts_of(model, source), source, name, max_context_tokens)


def facts_of(model: CausalModel, source: ModelSource) -> ModelFacts:
    """Reads parts of the weights' files, for the fingerprint."""
    revision = getattr(model.config, "_commit_hash", None) or ""
    return ModelFacts(
        revision=revision,
        fingerprint=fingerprint_of(model.config.to_dict(), model.linear_format, revision, weights_files(source.path)),
        architecture=type(model.module).__name__,
        vocabulary_size=model.vocabulary_size,
        longest_context=int(getattr(model.config.get_text_config(), "max_position_embeddings", None) or 0),
        eos_token_ids=_eos_token_ids(model),
    )


def _load_gguf(source: ModelSource, weights_dtype: str) -> Any:
    """Through the kept conversion also the first time, so that every start runs the very same model."""
    conversion = conversion_of(source, weights_dtype)
    assert source.path is not None, "a GGUF model is a file"
    assert conversion is not None, "a GGUF file is converted"
    gguf = read_gguf_index(source.path)
    module = None if conversion.is_there else _convert(source, gguf, conversion, weights_dtype)
    if module is None:
        module = _load_checked(source, str(conversion.folder), {"local_files_only": True}, weights_dtype)
    apply_rope_factors(module, source.path, gguf.tensor_names)
    return module


def _convert(source: ModelSource, gguf: GgufIndex, conversion: Conversion, weights_dtype: str) -> Any:
    """Keep the conversion and return None; where it cannot be kept, return the model itself."""
    location, options = source.pretrained_arguments()
    module = _load_checked(source, location, options, weights_dtype)
    _check_gguf_tensors(source, gguf, module)
    return None if conversion.keep(module.save_pretrained) else module


def _load_checked(source: ModelSource, location: str, options: dict[str, Any], weights_dtype: str) -> Any:
    config = _load_config(source, location, options)
    check_config(config)
    return _load_module(source, location, options, config, weights_dtype)


def _load_config(source: ModelSource, location: str, options: dict[str, Any]) -> Any:
    try:
        return AutoConfig.from_pretrained(location, **options)
    except Exception as error:
        raise _not_loadable(source, error) from error


def _load_module(
    source: ModelSource, location: str, options: dict[str, Any], config: Any, weights_dtype: str
) -> nn.Module:
    extra = {"quantization_config": GgufConfig(dequantize=True)} if "gguf_file" in options else {}
    try:
        with redirect_stderr(StringIO()):  # progress bars, which some loaders draw whatever they are told
            module, info = AutoModelForCausalLM.from_pretrained(
                location,
                config=config,
                dtype=WEIGHTS_DTYPES[weights_dtype],
                attn_implementation=IMPLEMENTATION,
                output_loading_info=True,
                **options,
                **extra,
            )
    except Exception as error:
        if isinstance(error, KeyError) and IMPLEMENTATION in error.args:
            raise unsupported(f"{config.model_type} does not take its attention from AttentionInterface") from error
        raise _not_loadable(source, error) from error
    _check_complete(source, info)
    return module.eval()


def _check_complete(source: ModelSource, info: dict[str, Any]) -> None:
    """Missing tensors would be random numbers; unexpected ones are common (heads for training) and only said."""
    for what in ("missing_keys", "mismatched_keys", "error_msgs"):
        if info.get(what):
            raise not_loadable(f"{source.reference}: {what.replace('_', ' ')}: {_some(info[what])}")
    if info.get("unexpected_keys"):
        log.warning("%s: tensors that the model has no place for: %s", source.reference, _some(info["unexpected_keys"]))


def _check_gguf_tensors(source: ModelSource, gguf: GgufIndex, module: nn.Module) -> None:
    """Tensors that the loader's map does not know are passed over in silence: a bias left out is a wrong model."""
    parameters = [name for name, _ in module.named_parameters()]
    biases = [name for name in gguf.tensor_names if name.endswith(".bias")]
    if len(biases) > sum(name.endswith("bias") for name in parameters):
        raise not_loadable(f"{source.reference}: the model has no place for all of these: {_some(biases)}")
    num_used_beside = int(FACTORS in gguf.tensor_names)
    if len(gguf.tensor_names) - num_used_beside > len(parameters):
        log.warning(
            "%s: the file has %d tensors, the model %d parameters; some are not used",
            source.reference,
            len(gguf.tensor_names),
            len(parameters),
        )


def _some(names: Collection[Any]) -> str:
    shown = ", ".join(sorted(str(name) for name in names)[:_SHOWN_NAMES])
    more = len(names) - _SHOWN_NAMES
    return f"{shown} and {more} more" if more > 0 else shown


def _not_loadable(source: ModelSource, error: Exception) -> OctavoError:
    return not_loadable(
        f"{source.reference}: {type(error).__name__}: {error} (are the files whole, and is the architecture one that "
        f"transformers knows?)"
    )


def _eos_token_ids(model: CausalModel) -> tuple[int, ...]:
    """Of the generation configuration and of the model's, all of them, without doubles."""
    found: set[int] = set()
    for config in (getattr(model.module, "generation_config", None), model.config, model.config.get_text_config()):
        ids = getattr(config, "eos_token_id", None)
        found.update([] if ids is None else [ids] if isinstance(ids, int) else ids)
    return tuple(sorted(found))
