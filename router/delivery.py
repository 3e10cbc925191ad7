"""What one sampled token does to an answer: its text, and whether it is the last. No IO, no bookkeeping of rows."""

from collections.abc import Sequence
from dataclasses import dataclass

from octavo.errors import FieldViolation, invalid_argument
from router.beam import Hypothesis
from router.live import Choice, LiveRequest
from router.request import FinishReason
from router.stream import BeamScore


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


def show_hypothesis(
    live: LiveRequest, index: int, found: Hypothesis, eos_token_ids: frozenset[int], cut: FinishReason | None
) -> FinishReason:
    """Write an answer of a search, whole.

    Args:
        index: its place among the answers, which is also whose text it takes.
        cut: why the search ended before its beams did.
    """
    choice, candidates = live.choices[index], found.beam.candidates()
    token_ids = [candidate.token_id for candidate in candidates]
    ending = _hypothesis_ending(live, token_ids, eos_token_ids)
    if found.is_cut and cut is not None:
        ending = Ending(cut)
    is_hidden = ending.reason in (FinishReason.EOS, FinishReason.STOP_TOKEN) and not live.checked.stopping.include_stop
    shown = token_ids[:-1] if is_hidden else token_ids
    text = "".join(map(choice.answer.push, shown)) + choice.answer.finish() if shown else ""
    logprobs = [candidate.logprob for candidate in candidates if candidate.logprob is not None]
    live.stream.add(index, text, token_ids, logprobs)
    beam = BeamScore(found.score, found.beam.cumulative_logprob)
    live.stream.finish(index, ending.reason, ending.matched_stop, beam)
    return ending.reason


def _hypothesis_ending(live: LiveRequest, token_ids: Sequence[int], eos_token_ids: frozenset[int]) -> Ending:
    stopping, last = live.checked.stopping, token_ids[-1] if token_ids else -1
    if last in stopping.stop_token_ids:
        return Ending(FinishReason.STOP_TOKEN, str(last))
    if last in eos_token_ids and not stopping.ignore_eos:
        return Ending(FinishReason.EOS)
    return Ending(live.spec.limit_reason)


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
