"""Sampling in plain torch, the definition in the order in which it is written."""

import torch

MASK32 = 0xFFFFFFFF


def philox_4x32_10(counter: list[torch.Tensor], key: tuple[int, int]) -> list[torch.Tensor]:
    """Philox-4x32-10 (Salmon et al. 2011): counter words as int64 tensors below 2^32 -> four output words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        # 32 x 32 -> 64 bit products overflow int64's sign but not its bits: take the halves by 16-bit limbs
        high0, low0 = _multiply(c0, 0xD2511F53)
        high1, low1 = _multiply(c2, 0xCD9E8D57)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) & MASK32, (k1 + 0xBB67AE85) & MASK32
    return [c0, c1, c2, c3]


def _multiply(word: torch.Tensor, factor: int) -> tuple[torch.Tensor, torch.Tensor]:
    """-> (high, low) 32 bits of word * factor"""
    low_part = (word & 0xFFFF) * factor
    high_part = (word >> 16) * factor + (low_part >> 16)
    return high_part >> 16, ((high_part & 0xFFFF) << 16) | (low_part & 0xFFFF)


def gumbel_noise(seed: int, token_ids: torch.Tensor, position: int, choice_index: int) -> torch.Tensor:
    """token_ids [N] int64 -> [N] fp32"""
    counter = [token_ids, *(torch.full_like(token_ids, word & MASK32) for word in (position, choice_index, 0))]
    word = philox_4x32_10(counter, (seed & MASK32, (seed >> 32) & MASK32))[0]
    uniform = ((word >> 8).float() + 0.5) * 2.0**-24
    uniform = uniform.clamp(max=1.0 - 2.0**-24)
    return -torch.log(-torch.log(uniform))


def kept_tokens(scaled: torch.Tensor, top_k: int, top_p: float, min_p: float) -> torch.Tensor:
    """scaled logits [vocab_size] fp32 -> kept [vocab_size] bool"""
    order = torch.sort(scaled, descending=True, stable=True).indices  # ties to the lower id
    if 0 < top_k < len(order):
        order = order[:top_k]
    relative = torch.exp(scaled[order].double() - scaled[order[0]].double())
    if top_p < 1.0:
        mass = relative.cumsum(0)
        order = order[(mass - relative) < max(top_p * mass[-1].item(), 1e-30)]  # the token that crosses belongs
    kept = torch.zeros_like(scaled, dtype=torch.bool)
    kept[order] = True
    return kept & (torch.exp(scaled - scaled.max()) >= min_p)


def sample_row(
    logits: torch.Tensor,  # [vocab_size]
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    seed: int,
    position: int,
    choice_index: int,
) -> int:
    logits = logits.float()
    if temperature == 0.0:
        return int((logits == logits.max()).nonzero()[0, 0])
    scaled = logits / torch.tensor(temperature, dtype=torch.float32)
    kept = kept_tokens(scaled, top_k, top_p, min_p)
    noise = gumbel_noise(seed, torch.arange(len(logits)), position, choice_index)
    score = torch.where(kept, scaled + noise, float("-inf"))
    return int((score == score.max()).nonzero()[0, 0])
