"""How an executor comes by its model: what an earlier start kept, mapped; else the long way, and kept for the next.

Here belongs the order of it. Not here: what each of the two does (`model/kept_model`, `model/checked`).
"""

import gc
import importlib
import logging
import os
import time
from dataclasses import dataclass
from typing import Any

import torch

from executor.arena import KvGeometry
from executor.attention import AttentionBackend
from executor.attention_choice import choose_attention
from executor.config import ExecutorConfig
from executor.cuda.place import check_device
from executor.kernels_conflict import check_kernels, installed_kernels_version
from executor.model.description import ModelDescription
from executor.model.served import ModelFacts, ServedModel, describe
from executor.model.weights_format import INT8, kv_dtype_of
from octavo.model_source import ModelSource, resolve_model

log = logging.getLogger(__name__)

_LONGEST_KEPT = 1 << 18  # positions


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that passed every check, and how it will run."""

    model: ServedModel
    description: ModelDescription
    geometry: KvGeometry
    attention: AttentionBackend

    @property
    def weights(self) -> str:
        """Number format of its linear layers."""
        return self.model.linear_format


def load(config: ExecutorConfig) -> LoadedModel:
    """Everything that needs no other process. Takes seconds to minutes. Raises OctavoError."""
    warning = check_kernels(config.attention, installed_kernels_version())
    if warning:
        log.warning(warning)
    check_device(config.device)
    attention = choose_attention(config.attention, config.device)
    torch.set_num_threads(config.threads or len(os.sched_getaffinity(0)))
    source = resolve_model(config.model)
    model, facts = _find(config, source, attention)
    geometry = KvGeometry(config.block_size, kv_dtype_of(config), model.layers)
    description = describe(facts, source, config.model_name, config.max_context_tokens)
    return LoadedModel(model, description, geometry, attention)


def _find(config: ExecutorConfig, source: ModelSource, attention: AttentionBackend) -> tuple[ServedModel, ModelFacts]:
    began_s = time.monotonic()
    kept = _place(config, source, attention)
    found = kept.load() if kept is not None else None
    if found is not None:
        log.info(
            "mapped %s in %.1f s, as an earlier start verified and kept it", source.name, time.monotonic() - began_s
        )
        return found
    model, facts = importlib.import_module("executor.model.checked").load_checked(config, source, attention)
    if kept is None or not _may_be_kept(config, model, facts):
        return model, facts
    if not kept.keep(model.rewritten, model.layers, model.probed.attention, facts):
        return model, facts
    own = model, facts
    found = kept.load()
    if found is None:
        return own
    del model, own  # what is mapped is not held twice
    gc.collect()
    return found


def _may_be_kept(config: ExecutorConfig, model: Any, facts: ModelFacts) -> bool:
    """Not what is another model than was asked for, nor one whose tables of positions would be huge."""
    is_as_asked = (model.linear_format == INT8) == (config.weights == INT8)
    return model.rewritten is not None and is_as_asked and 0 < facts.longest_context <= _LONGEST_KEPT


def _place(config: ExecutorConfig, source: ModelSource, attention: AttentionBackend) -> Any:
    """Where such a model is kept; None: it is not. Imported only where C++ attends: elsewhere nothing is packed."""
    if attention.name != "cpu" or not (config.rewrite_model and config.verify_model) or source.path is None:
        return None
    kept_model: Any = importlib.import_module("executor.model.kept_model")
    try:
        return kept_model.KeptModel(source, config, attention.library)  # type: ignore[attr-defined]
    except OSError as error:
        log.info("%s is not kept: %s", source.name, error)
        return None
