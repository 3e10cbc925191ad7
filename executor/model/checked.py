"""A model loaded from its own files by `transformers`, checked, and rewritten where it can be: the long way.

Imported only when a model is not kept: bringing in `transformers` takes longer than mapping what is kept.
"""

import logging
import time
from dataclasses import replace

from transformers.utils import logging as transformers_logging

from executor.arena import KvGeometry
from executor.attention import AttentionBackend
from executor.config import ExecutorConfig
from executor.cuda.place import place
from executor.model.forward import CausalModel
from executor.model.loader import facts_of, load_model
from executor.model.rewrite import rewrite_model
from executor.model.served import ModelFacts
from executor.model.verify import verify_model
from executor.model.weights_format import INT8, kv_dtype_of, loaded_as
from octavo.model_source import ModelSource

log = logging.getLogger(__name__)


def load_checked(
    config: ExecutorConfig, source: ModelSource, attention: AttentionBackend
) -> tuple[CausalModel, ModelFacts]:
    """Takes seconds to minutes. Raises OctavoError."""
    transformers_logging.disable_progress_bar()
    began_s = time.monotonic()
    dtype = loaded_as(config.weights)
    log.info("loading %s as %s", config.model, dtype)
    model = load_model(source, dtype)
    place(model.module, config.device)
    geometry = KvGeometry(config.block_size, kv_dtype_of(config), model.layers)
    log.info("loaded %s (%s) in %.1f s", source.name, type(model.module).__name__, time.monotonic() - began_s)
    if config.verify_model:
        _verify(model, attention, geometry, dtype)
    if config.rewrite_model:
        model = rewrite_model(model, attention, geometry, int8=config.weights == INT8)
    if config.weights == INT8 and model.linear_format != INT8:
        log.warning("weights int8 were asked for and cannot be had: linear layers run in %s", model.linear_format)
    return model, facts_of(model, source)


def _verify(model: CausalModel, attention: AttentionBackend, geometry: KvGeometry, loaded_as: str) -> None:
    """First with KV as exact as the weights: fewer bits would blur the proof. Then as it will serve."""
    for kv_dtype in dict.fromkeys((loaded_as, geometry.dtype)):
        difference = verify_model(model, attention, replace(geometry, dtype=kv_dtype))
        log.info("verified: paged logits, KV in %s, are within %.2g of the plain model's", kv_dtype, difference)
