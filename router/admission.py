"""Who may come in, with how many blocks, and who must leave: pure decisions, no state of their own.

Not here: the queue itself, and messages to the cache service.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from octavo.errors import Code, OctavoError
from router.model import Model, blocks_for
from router.request import CheckedRequest, FinishReason, RequestSpec
from router.scheduler import Row

# Above this share of the pool nobody gets blocks beyond the tokens there are.
PRESSURE_RATIO = 0.85


def fit(checked: CheckedRequest, prompt_ids: tuple[int, ...], model: Model) -> RequestSpec:
    """Bound the answer by context and pool, and refuse at once what can never fit.

    Raises:
        OctavoError: FAILED_PRECONDITION with the numbers.
    """
    num_prompt, wanted = len(prompt_ids), checked.stopping.max_tokens
    num_blocks = quota_blocks(checked.max_kv_share, model)
    pool_tokens = _pool_tokens(num_prompt, checked.sampling.num_choices, model, num_blocks)
    room = min(model.max_context_tokens, pool_tokens) - num_prompt
    if room < max(1, wanted or 1):
        raise _never_fits(num_prompt, wanted, model, pool_tokens, checked.sampling.num_choices, num_blocks)
    if wanted is None:
        _check_min_tokens(checked.stopping.min_tokens, room)
        return RequestSpec(checked, prompt_ids, room, FinishReason.CONTEXT_LENGTH)
    return RequestSpec(checked, prompt_ids, wanted, FinishReason.MAX_TOKENS)


def quota_blocks(max_share: float, model: Model) -> int:
    """How many blocks a share of them is; at least one."""
    return max(1, math.floor(max_share * model.num_usable_blocks))


def _pool_tokens(num_prompt: int, num_choices: int, model: Model, num_blocks: int) -> int:
    """How long each of the choices of a prompt can get when all are as long, and share the prompt's full blocks."""
    num_shared = min(num_prompt // model.block_size, num_blocks)
    num_own = (num_blocks - num_shared) // num_choices
    # The last generated token needs no KV, so the pool holds one token more than its blocks do.
    return (num_shared + num_own) * model.block_size + 1


def check_prompt_length(num_prompt: int, model: Model) -> None:
    """`fit` for a prompt alone, cheap enough to come before anything that walks over it.

    Raises:
        OctavoError: FAILED_PRECONDITION with the numbers.
    """
    num_blocks = model.num_usable_blocks
    pool_tokens = _pool_tokens(num_prompt, 1, model, num_blocks)
    if num_prompt >= min(model.max_context_tokens, pool_tokens):
        raise _never_fits(num_prompt, None, model, pool_tokens, 1, num_blocks)


def _check_min_tokens(min_tokens: int, room: int) -> None:
    if min_tokens > room:
        raise OctavoError(
            Code.FAILED_PRECONDITION,
            "NEVER_FITS",
            f"min_tokens is {min_tokens}, but only {room} tokens fit behind this prompt; lower min_tokens",
            metadata={"min_tokens": str(min_tokens), "room": str(room)},
        )


def _never_fits(
    num_prompt: int, wanted: int | None, model: Model, pool_tokens: int, num_choices: int, num_blocks: int
) -> OctavoError:
    asked = f"prompt of {num_prompt} tokens" + (f" and max_tokens of {wanted}" if wanted is not None else "")
    asked += f" for {num_choices} answers" if num_choices > 1 else ""
    each = " of each answer" if num_choices > 1 else ""
    is_all = num_blocks == model.num_usable_blocks
    where = "the pool" if is_all else f"this caller's share of the pool, {num_blocks} blocks,"
    return OctavoError(
        Code.FAILED_PRECONDITION,
        "NEVER_FITS",
        f"the {asked} can never fit: the context is {model.max_context_tokens} tokens and {where} holds "
        f"{pool_tokens}{each} ({model.num_usable_blocks} usable blocks of {model.block_size}); shorten the prompt, "
        "or lower max_tokens, n or the width of the beam",
        metadata={
            "prompt_tokens": str(num_prompt),
            "max_tokens": "" if wanted is None else str(wanted),
            "num_choices": str(num_choices),
            "max_context_tokens": str(model.max_context_tokens),
            "pool_tokens": str(pool_tokens),
            "usable_blocks": str(model.num_usable_blocks),
            "quota_blocks": str(num_blocks),
            "block_size": str(model.block_size),
        },
    )


def slack_blocks(wanted: int, used_blocks: int, model: Model, num_waiting: int) -> int:
    """Blocks to ask for beyond need: none while others wait for blocks or the pool is nearly full."""
    if num_waiting or used_blocks > PRESSURE_RATIO * model.num_usable_blocks:
        return 0
    return wanted


@dataclass(frozen=True, slots=True)
class Growth:
    """What to ask for a row, in blocks, absolute."""

    need_blocks: int
    want_blocks: int


# A beam asks so many tokens ahead: it may not live long, and all beams of a search ask at the same time.
BEAM_LOOKAHEAD_TOKENS = 2


def growth(row: Row, num_blocks: int, slack: int, block_size: int, *, was_refused: bool) -> Growth | None:
    """Whether a row should ask for blocks: a block's worth of steps before it runs dry, so that none waits.

    Args:
        was_refused: the last look ahead found nothing; ask again only when it is needed now.
    """
    ahead = min(row.num_tokens + (BEAM_LOOKAHEAD_TOKENS if row.is_beam else block_size), row.max_kv_tokens)
    if row.capacity_tokens >= ahead:
        return None
    need = max(blocks_for(row.num_target, block_size), num_blocks)
    if was_refused and need == num_blocks:
        return None
    most = blocks_for(row.max_kv_tokens, block_size)
    return Growth(need, max(need, min(most, num_blocks + max(1, 0 if row.is_beam else slack))))


def choose_victim(rows: Iterable[Row]) -> Row | None:
    """The newest of the lowest priority; nobody when it would be the only one: the oldest always goes on.

    The beams of a search are one: who chooses any of them chooses all.
    """
    ordered = sorted(rows, key=lambda row: row.order)
    if len(ordered) < 2 or (ordered[0].is_beam and ordered[0].order[:2] == ordered[-1].order[:2]):
        return None
    return ordered[-1]
