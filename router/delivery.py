"""What one sampled token does to an answer: its text, and whether it is the last. No IO, no bookkeeping of rows."""

from collections.abc import Sequence
from dataclasses import dataclass

from octavo.errors import FieldViolation, invalid_argument
from router.live import Choice
from router.request import FinishReason


@dataclass(frozen=True, slots=True)
class Ending:
    """Why an answer ends; `matched_stop` is the stop string, or the stop token's id in decimal."""

    reason: FinishReason
    matched_stop: str = ""


def accept_token(live: Choice, token_id: int, eos_token_ids: frozenset[int]) -> tuple[str, Ending | None]:
    """Append a token to the answer.

    Returns:
        The text that may be sent now, and the ending if this was the last token. Where several endings meet: a stop
        token or end of sequence, then a stop string, then the length.
    """
    live.tokens.append(token_id)
    stopping = live.checked.stopping
    ending = _token_ending(live, token_id, eos_token_ids)
    text = live.answer.push(token_id) if ending is None or stopping.include_stop else ""
    if ending is None:
        ending = _text_ending(live) or _length_ending(live)
    if ending is None:
        return text, None
    text += live.answer.finish()
    if ending.reason is live.spec.limit_reason:
        ending = _text_ending(live) or ending
    return text, ending


def replay_tokens(choice: Choice, token_ids: Sequence[int], eos_token_ids: frozenset[int], field: str) -> Ending | None:
    """Append tokens that the client already has, and their text with them.

    Returns:
        The ending, if the last of them was the last of the answer.

    Raises:
        OctavoError: INVALID_ARGUMENT for `field` where they go on behind the end of the answer.
    """
    ending = None
    for place, token_id in enumerate(token_ids):
        if ending is not None:
            message = f"has {len(token_ids)} ids, but the answer ended with {place} ({ending.reason.name})"
            raise invalid_argument(FieldViolation(field, message))
        _, ending = accept_token(choice, token_id, eos_token_ids)
    return ending


def _token_ending(live: Choice, token_id: int, eos_token_ids: frozenset[int]) -> Ending | None:
    stopping = live.checked.stopping
    if live.num_generated <= stopping.min_tokens:
        return None
    if token_id in stopping.stop_token_ids:
        return Ending(FinishReason.STOP_TOKEN, str(token_id))
    if token_id in eos_token_ids and not stopping.ignore_eos:
        return Ending(FinishReason.EOS)
    return None


def _text_ending(live: Choice) -> Ending | None:
    matched = live.answer.matched_stop
    return None if matched is None else Ending(FinishReason.STOP_STRING, matched)


def _length_ending(live: Choice) -> Ending | None:
    return Ending(live.spec.limit_reason) if live.num_generated >= live.spec.max_tokens else None
