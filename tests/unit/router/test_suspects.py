"""Suspects that end while they are tried. How whole engines find out who kills is in the contract tests."""

from typing import Any

from router.suspects import Suspects


class Request:
    """All that suspects look at."""

    is_ended = False


def test_a_suspect_that_is_cancelled_during_its_trial_is_forgotten() -> None:
    request: Any = Request()
    suspects = Suspects(limit=2, num_trials=2)
    suspects.reopen("executor-0", 1)
    suspects.lose([request])
    assert suspects.reopen("executor-0", 2) == []
    suspects.try_alone(request)
    request.is_ended = True
    assert suspects.groups([]) == [[]]  # planned once more while the step is in flight
    suspects.end_trial()
    assert suspects.groups([]) == [[]]
