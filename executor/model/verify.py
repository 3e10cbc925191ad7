"""Proof, before serving, that the paged model is the model: logits against its own plain form on a few tokens.

The configuration may hide state outside KV (convolutions, token shifts, masks in chunks): such a model passes every
rule and answers wrongly. Two short sequences in uneven chunks, packed together over a poisoned arena, show it.
"""

import numpy as np
import torch
from torch import Tensor

from executor.arena import Arena, KvGeometry, private_arena
from executor.attention import AttentionBackend
from executor.batch import pack_batch
from executor.ids import StepId
from executor.model.forward import CausalModel
from executor.model.hook import IMPLEMENTATION
from executor.model.refusal import unsupported
from executor.slots import SlotTable
from executor.step import BlockTable, RowSampling, RowStart, Step

_LENGTHS = (11, 5)
_CHUNKS = ((7, 4), (4, 1))  # step -> tokens of each sequence
# Of the largest logit. Rounding differs between the two forms; a wrong one is off by far more.
_TOLERANCE = {"float32": 2e-3, "bfloat16": 1e-1, "float16": 2e-2, "int8": 2e-1, "float8_e4m3fn": 2e-1}


def verify_model(model: CausalModel, attention: AttentionBackend, geometry: KvGeometry) -> float:
    """Compare. Returns the largest difference of logits.

    Raises:
        OctavoError: FAILED_PRECONDITION, MODEL_NOT_SUPPORTED: they differ.
    """
    difference, allowed = compare_with_plain(model, attention, geometry)
    if not difference <= allowed:  # NaN too
        raise unsupported(
            f"computed in chunks its logits differ by {difference:.3g} from those of one pass (allowed {allowed:.3g}): "
            f"it keeps state outside of KV, or its attention is not what it told"
        )
    return difference


def compare_with_plain(model: CausalModel, attention: AttentionBackend, geometry: KvGeometry) -> tuple[float, float]:
    """The largest difference of logits between the model as it would serve and its plain form, and what is allowed."""
    generator = torch.Generator().manual_seed(0)
    sequences = [torch.randint(0, model.vocabulary_size, (length,), generator=generator) for length in _LENGTHS]
    plain = _plain_logits(model, sequences)
    paged = _paged_logits(model, attention, geometry, sequences)
    difference = float((plain - paged).abs().max())
    tolerance = max(_TOLERANCE[model.linear_format], _TOLERANCE[geometry.dtype])
    allowed = tolerance * max(1.0, float(plain.abs().max()))
    return difference, allowed


def _plain_logits(model: CausalModel, sequences: list[Tensor]) -> Tensor:
    """[num_sequences, vocabulary_size] float32, by the modeling code's own attention."""
    model.module.set_attn_implementation("eager")
    try:
        with torch.inference_mode():
            on_device = [ids[None].to(model.module.device) for ids in sequences]
            outputs = [model.module(input_ids=ids, use_cache=False).logits[0, -1].cpu() for ids in on_device]
    finally:
        model.module.set_attn_implementation(IMPLEMENTATION)
    return torch.stack(outputs).float()


def _paged_logits(
    model: CausalModel, attention: AttentionBackend, geometry: KvGeometry, sequences: list[Tensor]
) -> Tensor:
    size = geometry.block_size
    num_blocks = [-(-length // size) for length in _LENGTHS]
    arena = private_arena(geometry, 1 + sum(num_blocks), model.module.device)
    table, first_block = SlotTable(len(sequences)), 1
    for slot, (ids, num) in enumerate(zip(sequences, num_blocks, strict=True)):
        blocks = BlockTable(0, np.arange(first_block, first_block + num, dtype=np.int64))
        table.apply(Step(StepId(1), started_rows=(RowStart(slot, 0, ids.numpy(), 0, (blocks,), RowSampling()),)))
        first_block += num
    for counts in _CHUNKS:
        logits = _run_chunk(model, attention, arena, table, np.array(counts))
    return logits


def _run_chunk(
    model: CausalModel, attention: AttentionBackend, arena: Arena, table: SlotTable, counts: np.ndarray
) -> Tensor:
    slots = np.arange(len(counts))
    batch = pack_batch(table, slots, table.rows["computed"][slots], counts, arena.geometry.block_size)
    with torch.inference_mode():
        logits = model.forward(batch, attention.prepare(batch.attention, arena.views))
    table.advance(slots, counts)
    return logits.cpu()
