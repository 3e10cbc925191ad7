"""Rotary factors of a GGUF file: Llama 3.1 and its kin store their stretched frequencies as a tensor, not as an option.

`transformers` passes over that tensor, and every position would then be turned by the wrong angle. The factors divide
the plain frequencies: https://github.com/ggml-org/llama.cpp, `rope_freqs` in convert_hf_to_gguf.py.
"""

from pathlib import Path

import torch
from torch import Tensor, nn

from executor.model.refusal import not_loadable, unsupported

FACTORS = "rope_freqs.weight"
# Two sets, chosen by the length of the sequence: cached keys would be turned by another set than the new ones.
FACTORS_BY_LENGTH = ("rope_factors_long.weight", "rope_factors_short.weight")


def apply_rope_factors(module: nn.Module, file: Path, tensor_names: tuple[str, ...]) -> None:
    """Give the model the frequencies that its file means.

    Args:
        module: loaded from the file; changed in place.
        tensor_names: those of the file.

    Raises:
        OctavoError: FAILED_PRECONDITION, where the model has no place for them.
    """
    for name in FACTORS_BY_LENGTH:
        if name in tensor_names:
            raise unsupported(f"{name}: its rotary frequencies depend on the length of the sequence")
    if FACTORS not in tensor_names:
        return
    factors = _read(file)
    rotaries = [part for part in module.modules() if hasattr(part, "inv_freq")]
    if not rotaries or any(not _fits(part, factors) for part in rotaries):
        raise not_loadable(f"{file}: the model has no plain rotary frequencies that {FACTORS} could change")
    for part in rotaries:
        part.get_buffer("inv_freq").div_(factors)
        part.get_buffer("original_inv_freq").copy_(part.get_buffer("inv_freq"))


def _read(file: Path) -> Tensor:
    from gguf import GGUFReader  # an optional package, there when a GGUF file was loaded

    [found] = [tensor for tensor in GGUFReader(file).tensors if tensor.name == FACTORS]
    factors = torch.tensor(found.data, dtype=torch.float32)  # a copy: the file is mapped
    if not (factors > 0).all():
        raise not_loadable(f"{file}: {FACTORS} has factors that are not above 0; is the file whole?")
    return factors


def _fits(rotary: nn.Module, factors: Tensor) -> bool:
    """Whether the frequencies are plain (nothing stretched them yet) and as many as the factors."""
    is_plain = getattr(rotary, "rope_type", "default") == "default"
    return is_plain and rotary.get_buffer("inv_freq").shape == factors.shape
