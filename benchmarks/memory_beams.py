"""Beam search in paged memory: real searches replayed through the block manager's forks and releases.

Here belongs what the beams of one request do to its blocks. Not here: memory of other requests (memory_policies), and
how the searches were recorded (beam_traces).
"""

from array import array
from collections import Counter
from collections.abc import Sequence

from benchmarks.memory_policies import LEASE, Paged, Request
from cache_service.operation import Commit, Extended, Extension, Fork, Release, SequenceId

Parents = Sequence[int]  # beam -> the beam of the step before that it continues


class PagedBeams(Paged):
    """A request's answers are its beams. For loads that leave room: a beam that finds none is an error here.

    After each step, beams that nobody continues are released and those that several continue are forked, a partly
    filled last block copied, as the router does it; then each beam takes its token.

    Args:
        searches: recorded parents by step, of as many beams as requests have answers. They are given to the requests
            in turn; one that is longer than its search goes on with the search's second half, again and again.
    """

    def __init__(self, num_slots: int, block_size: int, searches: Sequence[Sequence[Parents]]) -> None:
        super().__init__(num_slots, block_size)
        self._searches = searches
        self._search_of: dict[Request, Sequence[Parents]] = {}
        self._num_admitted = 0

    def admit(self, request: Request) -> bool:
        """The prompt, once."""
        if not super().admit(request):
            return False
        self._search_of[request] = self._searches[self._num_admitted % len(self._searches)]
        self._num_admitted += 1
        return True

    def grow(self, request: Request) -> bool:
        step = request.num_generated - 1  # whose tokens the beams take now
        beams = self._sequences[request]
        chosen = [0] * request.num_answers if step == 0 else self._parents(request, step - 1)
        self._sequences[request] = beams = self._continued(beams, chosen)
        num_blocks = -(-request.num_held // self._block_size)
        have = -(-(request.num_held - 1) // self._block_size)
        if num_blocks > have:
            wanted = [Extension(each, have, num_blocks, num_blocks) for each in beams]
            assert all(isinstance(each, Extended) for each in self.manager.extend(LEASE, wanted, 0.0))
        for each in beams:
            self.manager.commit(LEASE, Commit(each, request.num_held, request.num_held - 1, array("I", [0])), 0.0)
        return True

    def _parents(self, request: Request, step: int) -> Parents:
        search = self._search_of[request]
        if step < len(search):
            return search[step]
        half = len(search) // 2
        return search[half + (step - half) % (len(search) - half)]

    def _continued(self, beams: list[SequenceId], parents: Parents) -> list[SequenceId]:
        num_children = Counter(parents)
        for place, beam in enumerate(beams):
            if not num_children[place]:
                self.manager.release(LEASE, Release(beam), 0.0)
        heirs: dict[int, list[SequenceId]] = {}
        for place, count in num_children.items():
            children = self._ids(count - 1)
            if children:
                self.manager.fork(LEASE, Fork(beams[place], tuple(children)), 0.0)
            heirs[place] = [beams[place], *children]
        return [heirs[place].pop() for place in parents]


def read_searches(texts: Sequence[str]) -> list[list[Parents]]:
    """As beam_traces writes them: a step for each word, a digit for each beam."""
    return [[tuple(map(int, step)) for step in text.split()] for text in texts]
