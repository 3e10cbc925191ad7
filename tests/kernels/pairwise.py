"""All pairs of factor values in few cases (greedy, deterministic)."""

import itertools
import random
from collections.abc import Mapping, Sequence
from typing import Any


def pairwise(factors: Mapping[str, Sequence[Any]], seed: int = 0, candidates: int = 40) -> list[dict[str, Any]]:
    """Cases such that every two values of two different factors meet in at least one of them."""
    rng = random.Random(seed)
    names = list(factors)
    missing = {
        ((a, i), (b, j))
        for a, b in itertools.combinations(names, 2)
        for i in range(len(factors[a]))
        for j in range(len(factors[b]))
    }
    cases = []
    while missing:
        fixed = dict(rng.choice(sorted(missing)))
        best, best_new = None, -1
        for _ in range(candidates):
            case = {name: fixed.get(name, rng.randrange(len(factors[name]))) for name in names}
            new = sum(pair in missing for pair in itertools.combinations(case.items(), 2))
            if new > best_new:
                best, best_new = case, new
        missing.difference_update(itertools.combinations(best.items(), 2))
        cases.append({name: factors[name][index] for name, index in best.items()})
    return cases


def case_id(case: Mapping[str, Any]) -> str:
    return "-".join(str(value).replace("torch.", "").replace(" ", "") for value in case.values())
