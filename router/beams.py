"""A search and who computes its beams: lanes of one request, by number. Pure; no blocks, no steps, no prompts.

    together    lane 0 computes what all beams begin with: the prompt, and after a preemption more
    apart       each beam has a lane; the others are free

A beam goes on in the lane of the beam that it comes from; where that one goes on twice, all but the first fork from it
into free lanes. A lane whose beam does not go on is free. Not here: what a lane holds (live), and the calls and steps
that a move takes (searching).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from router.beam import Candidate, Search


@dataclass(frozen=True, slots=True)
class Moves:
    """What changes between two steps: lanes that are given up, and lanes that are forked from others."""

    freed: tuple[int, ...] = ()
    forks: tuple[tuple[int, tuple[int, ...]], ...] = ()  # (parent, children)


@dataclass(slots=True)
class BeamGroup:
    """The search of one request.

    Attributes:
        lane_of: of each beam, while they are apart; None: they are together.
        num_forking: lanes that wait for their share of blocks; until then no lane goes on.
    """

    search: Search
    lane_of: list[int] | None = None
    num_forking: int = 0
    _candidates: dict[int, Sequence[Candidate]] = field(default_factory=dict)  # by lane

    def offer(self, lane: int, candidates: Sequence[Candidate]) -> bool:
        """What a lane computed. Returns whether all beams have their candidates now."""
        self._candidates[lane] = candidates
        return self.lane_of is None or len(self._candidates) == len(self.lane_of)

    def advance(self) -> Moves:
        """One token more; or, where lane 0 computed what several beams of one length begin with, they part."""
        offered, self._candidates = self._candidates, {}
        if self.lane_of is None:
            return self._part(offered[0])
        before = self.lane_of
        parents = [before[each.beam] for each in self.search.advance([offered[lane] for lane in before])]
        return self._settle(before, parents)

    def gather(self) -> list[int]:
        """The beams lost their lanes: lane 0 computes what they begin with, and each has a token left to compute then.

        Returns:
            Those tokens, behind the prompt.
        """
        self.lane_of, self.num_forking = None, 0
        self._candidates.clear()
        first, *others = [beam.token_ids() for beam in self.search.beams]
        num_common = max(0, len(first) - 1)
        for other in others:
            for place in range(num_common):
                if first[place] != other[place]:
                    num_common = place
                    break
        return first[:num_common]

    def tail(self, lane: int, num_known: int) -> list[int]:
        """What comes behind the generated tokens that a lane has, once it goes on."""
        assert self.lane_of is not None, "beams that are together have no lanes"
        beam = self.search.beams[self.lane_of.index(lane)]
        if num_known == beam.num_tokens - 1 and beam.path is not None:
            return [beam.path.candidate.token_id]
        return beam.token_ids()[num_known:]

    def _part(self, candidates: Sequence[Candidate]) -> Moves:
        """All come out of lane 0."""
        if self.search.beams[0].num_tokens == 0:
            self.search.advance([candidates])
        return self._settle([0], [0] * len(self.search.beams))

    def _settle(self, before: Sequence[int], parents: Sequence[int]) -> Moves:
        """Lanes for new beams, of which `parents` names the lanes that they come from."""
        kept = set(parents)
        free = [lane for lane in range(self.search.rules.width) if lane not in kept]
        self.lane_of, seen = [], set()
        forks: dict[int, list[int]] = {}
        for parent in parents:
            if parent in seen:
                forks.setdefault(parent, []).append(free.pop(0))
            self.lane_of.append(forks[parent][-1] if parent in seen else parent)
            seen.add(parent)
        self.num_forking = sum(map(len, forks.values()))
        freed = tuple(lane for lane in before if lane not in kept)
        return Moves(freed, tuple((parent, tuple(children)) for parent, children in forks.items()))
