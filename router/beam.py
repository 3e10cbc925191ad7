"""Beam search itself: which beams go on, which answers are finished, and when to stop. Pure; tokens and scores only.

    candidates    of each beam its best next tokens; all of them ranked together by the sum of their log-probabilities
    finished      those of the first `width` that end (an ending id, or the last token that may come)
    beams         the first `width` that do not end

Token for token what `transformers` 5 does in `generate(num_beams=width, do_sample=False)`, scores included; the ending
of the search too (`GenerationMixin._beam_search`). Two things it leaves open are settled here: of equal sums the lower
beam comes first, then the lower id; and where there are fewer continuations than `width`, there are fewer beams, not
copies that share a history. Not here: which sequence computes a beam (beams), texts, blocks.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from router.logprob import TokenLogprob


class Candidate(NamedTuple):
    """A next token. `score`: its log-probability after the rules; `logprob`: what a client that asked is told of it."""

    token_id: int
    score: float
    logprob: TokenLogprob | None = None


class Continuation(NamedTuple):
    """A beam goes on with a token."""

    beam: int
    token_id: int


@dataclass(frozen=True, slots=True)
class Path:
    """The tokens of a beam, from the last to the first: beams share what they have in common."""

    parent: "Path | None"
    candidate: Candidate
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Beam:
    """An answer that may go on."""

    path: Path | None = None
    cumulative_logprob: float = 0.0

    @property
    def num_tokens(self) -> int:
        return self.path.num_tokens if self.path is not None else 0

    def candidates(self) -> list[Candidate]:
        """What was chosen, in order."""
        found, path = [], self.path
        while path is not None:
            found.append(path.candidate)
            path = path.parent
        return found[::-1]

    def token_ids(self) -> list[int]:
        return [candidate.token_id for candidate in self.candidates()]

    def extended(self, candidate: Candidate) -> "Beam":
        path = Path(self.path, candidate, self.num_tokens + 1)
        return Beam(path, self.cumulative_logprob + candidate.score)


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """An answer with its score; `is_cut`: its search ended before it did."""

    beam: Beam
    score: float
    is_cut: bool = False


@dataclass(frozen=True, slots=True)
class SearchRules:
    """When answers end and how they are scored.

    Attributes:
        ending_ids: tokens that end an answer. That none comes too early is seen to by who makes the candidates.
        max_tokens: generated ones, at least 1.
    """

    width: int
    length_penalty: float
    early_stopping: bool
    ending_ids: frozenset[int]
    max_tokens: int

    @property
    def num_candidates(self) -> int:
        """As many of a beam's best tokens are enough: `width` of them do not end."""
        return self.width + len(self.ending_ids)

    def score(self, beam: Beam) -> float:
        """What answers are ranked by; of no tokens: 0."""
        return beam.cumulative_logprob / beam.num_tokens**self.length_penalty if beam.num_tokens else 0.0


class Search:
    """One search, from the one beam without tokens to its end.

    Attributes:
        beams: the best first; at first one without tokens.
        finished: at most `width`, the best first.
        num_tokens: that were put behind beams so far, those that ended one among them.
    """

    def __init__(self, rules: SearchRules) -> None:
        self.rules = rules
        self.beams = [Beam()]
        self.finished: list[Hypothesis] = []
        self.num_tokens = 0
        self.is_done = False

    def advance(self, candidates: Sequence[Sequence[Candidate]]) -> list[Continuation]:
        """One token more.

        Args:
            candidates: of each beam, in order, its best tokens: `rules.num_candidates`, or all that there are.

        Returns:
            Where each of the new beams comes from, in their order.
        """
        rules = self.rules
        going_on: list[tuple[int, Candidate]] = []
        ended: list[Beam] = []
        is_last = self.beams[0].num_tokens + 1 >= rules.max_tokens
        for rank, (_, index, _, candidate) in enumerate(self._ranked(candidates)):
            if rank >= rules.width and len(going_on) == rules.width:
                break
            if is_last or candidate.token_id in rules.ending_ids:
                if rank < rules.width:
                    ended.append(self.beams[index].extended(candidate))
            elif len(going_on) < rules.width:
                going_on.append((index, candidate))
        self._finish(ended)
        self.num_tokens += len(going_on) + len(ended)
        self.beams = [self.beams[index].extended(candidate) for index, candidate in going_on]
        self.is_done = not self.beams or self._cannot_improve()
        return [Continuation(index, candidate.token_id) for index, candidate in going_on]

    def refit(self, max_tokens: int) -> None:
        """Before it began: answers may become as long at most."""
        self.rules = replace(self.rules, max_tokens=max_tokens)

    def best(self, count: int) -> list[Hypothesis]:
        """The best answers; before the end of the search its beams are answers too, as they are."""
        cut = [] if self.is_done else [Hypothesis(beam, self.rules.score(beam), is_cut=True) for beam in self.beams]
        return sorted([*self.finished, *cut], key=lambda found: -found.score)[:count]

    def _ranked(self, candidates: Sequence[Sequence[Candidate]]) -> list[tuple[float, int, int, Candidate]]:
        sums = [
            (-(beam.cumulative_logprob + candidate.score), index, candidate.token_id, candidate)
            for index, (beam, best) in enumerate(zip(self.beams, candidates, strict=True))
            for candidate in best
        ]
        return sorted(sums, key=lambda each: each[:3])

    def _finish(self, ended: list[Beam]) -> None:
        found = [*self.finished, *(Hypothesis(beam, self.rules.score(beam)) for beam in ended)]
        self.finished = sorted(found, key=lambda each: -each.score)[: self.rules.width]  # of equals the older

    def _cannot_improve(self) -> bool:
        """Once `width` answers are finished: at once, or when the best beam would not be better if it ended here."""
        if len(self.finished) < self.rules.width:
            return False
        return self.rules.early_stopping or self.rules.score(self.beams[0]) <= self.finished[-1].score
