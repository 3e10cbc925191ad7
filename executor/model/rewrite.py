"""Whether a loaded model is rewritten: taken apart, packed, proved against the unrewritten one; or left as it is.

A model that is not of the form, or whose rewritten logits differ, runs as its modeling code has it, and the log says
why. Int8 comes second: what it replaces was proved in the format that the weights were loaded in.
Not here: the parts (`decoder_parts`), the call (`rewritten`), int8's factors (`smoothing`).
"""

import importlib
import logging
from dataclasses import replace
from typing import Any

from executor.arena import KvGeometry
from executor.attention import AttentionBackend
from executor.model.calibration import calibration_sequences
from executor.model.decoder_form import DecoderParts
from executor.model.decoder_parts import NotRecognizedError, take_apart
from executor.model.forward import CausalModel
from executor.model.smoothing import measure_peaks, smooth
from executor.model.verify import compare_with_plain
from executor.model.weights_format import INT8

log = logging.getLogger(__name__)


def rewrite_model(
    model: CausalModel, attention: AttentionBackend, geometry: KvGeometry, *, int8: bool = False
) -> CausalModel:
    """The model with its layers as one call, or the model as it is. Packing takes as much memory as the weights.

    Args:
        int8: quantize the linear layers; where that cannot be, they keep the format that they were loaded in.
    """
    if attention.name != "cpu":
        log.info("layers run as the modeling code has them: they are rewritten only where attention is 'cpu'")
        return model
    loaded_as = str(model.weights_dtype).removeprefix("torch.")
    geometry = replace(geometry, dtype=loaded_as)  # the proof is not to be blurred by KV of fewer bits
    try:
        parts = take_apart(model.module, model.hook)
        rewritten = _proved(_pack(model, attention, parts, model.linear_format), attention, geometry)
    except NotRecognizedError as error:
        log.warning("layers run as the modeling code has them, slower: %s", error)
        return model
    return _quantized(rewritten, attention, geometry, parts) if int8 else rewritten


def _quantized(
    model: CausalModel, attention: AttentionBackend, geometry: KvGeometry, parts: DecoderParts
) -> CausalModel:
    """Weights that are codes already stay what they are; factors would make others of them."""
    assert model.rewritten is not None
    if not model.rewritten.all_blocks:
        peaks = measure_peaks(model.module, calibration_sequences(model.vocabulary_size))
        parts = smooth(parts, peaks)
    try:
        return _proved(_pack(model, attention, parts, INT8), attention, geometry)
    except NotRecognizedError as error:
        log.warning("linear layers stay %s: %s", model.linear_format, error)
        return model


def _proved(model: CausalModel, attention: AttentionBackend, geometry: KvGeometry) -> CausalModel:
    """Raises NotRecognizedError."""
    difference, allowed = compare_with_plain(model, attention, geometry)
    if not difference <= allowed:  # NaN too
        raise NotRecognizedError(f"the rewritten model's logits differ by {difference:.3g} (allowed {allowed:.3g})")
    log.info(
        "rewritten, linear layers in %s: logits are within %.2g of the plain model's", model.linear_format, difference
    )
    return model


def _pack(model: CausalModel, attention: Any, parts: DecoderParts, weights_format: str) -> CausalModel:
    """Imported only here: where attention is another's, nothing is compiled."""
    library = attention.library
    packed = importlib.import_module("executor.model.packing").pack(library, parts, model.layers, weights_format)
    rewritten = importlib.import_module("executor.model.rewritten")
    return replace(model, rewritten=rewritten.RewrittenDecoder(library, packed, model.probed.attention))
