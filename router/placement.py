"""Which engine of a model takes a request: a pure function of what is known of each. Why so: docs/decisions/0034.

Not here: what is known (dispatch, prefixes).
"""

from collections.abc import Sequence
from dataclasses import dataclass

# An engine may have this many live requests more than twice those of the idlest before its prefix counts no more.
FREE_LEAD = 4


@dataclass(frozen=True, slots=True)
class Candidate:
    """An engine that could take the request.

    Attributes:
        num_cached_tokens: of the prompt, as far as is known.
        num_live: requests that it has, waiting ones among them.
        can_begin: whether the request would run at once.
        last_turn: when it was last chosen, in a count of choices.
    """

    num_cached_tokens: int
    num_live: int
    can_begin: bool
    last_turn: int


def ranked(candidates: Sequence[Candidate]) -> list[int]:
    """Indices of the candidates, the best first.

    Where it can begin at once goes before where it would wait; then whoever is not far ahead of the idlest in requests;
    then the longest cached prefix; then the fewest live requests; then whose turn is longest ago.
    """
    fewest = min((candidate.num_live for candidate in candidates), default=0)

    def order(index: int) -> tuple[bool, bool, int, int, int]:
        candidate = candidates[index]
        is_far_ahead = candidate.num_live > 2 * fewest + FREE_LEAD
        load = (candidate.num_live, candidate.last_turn)
        return (not candidate.can_begin, is_far_ahead, -candidate.num_cached_tokens, *load)

    return sorted(range(len(candidates)), key=order)
