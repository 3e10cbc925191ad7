"""Requests that may have killed an executor: run alone until a step of theirs succeeds, failed when they kill again.

    an executor dies     every request of the steps in flight is a suspect
    its successor        runs the suspects one at a time, in steps of their own, before all others' next step with them
    steps of it succeed  as many as are in flight at most: it is cleared
    it dies, too         with one suspect in flight, alone: counted against it; at the limit it fails, others go on

A connection that breaks while the executor lives is nobody's doing. Pure. Not here: planning and sending (engine).
"""

from collections.abc import Iterable

from router.live import Choice, LiveRequest


class Suspects:
    """Part of one engine.

    Args:
        limit: deaths of executors, while a request ran alone, that end it.
        num_trials: steps of a suspect, alone, that clear it.
    """

    def __init__(self, limit: int, num_trials: int) -> None:
        self._limit = limit
        self._num_trials = num_trials
        self._trials: dict[LiveRequest, int] = {}  # steps that succeeded
        self._on_trial: LiveRequest | None = None
        self._deaths_alone: dict[LiveRequest, int] = {}  # suspects, in the order in which they came to be
        self._in_flight: tuple[LiveRequest, ...] = ()
        self._epoch: tuple[str, int] | None = None  # of the executor of the last session

    def lose(self, in_flight: Iterable[LiveRequest]) -> None:
        """The session is lost, with these requests in its steps in flight."""
        self._in_flight = tuple(dict.fromkeys(in_flight))
        self._on_trial = None

    def reopen(self, executor_id: str, executor_epoch: int) -> list[LiveRequest]:
        """There is a session again; where its executor is another process, the one before is dead.

        Returns:
            Requests that are to fail.
        """
        died = self._epoch is not None and self._epoch != (executor_id, executor_epoch)
        self._epoch = (executor_id, executor_epoch)
        accused, self._in_flight = [request for request in self._in_flight if not request.is_ended], ()
        if not died:
            return []
        is_alone = len(accused) == 1 and accused[0] in self._deaths_alone
        for request in accused:
            self._deaths_alone[request] = self._deaths_alone.get(request, 0) + is_alone
            self._trials[request] = 0
        return [request for request in accused if self._deaths_alone[request] >= self._limit]

    def try_alone(self, request: LiveRequest) -> None:
        """The next step is of this one; if it is a suspect, of nobody else."""
        self._on_trial = request if request in self._deaths_alone else None

    def end_trial(self) -> None:
        """No step is in flight: the one that ran alone succeeded, or failed with its request."""
        request, self._on_trial = self._on_trial, None
        if request not in self._trials:  # nobody ran alone, or who did was given up meanwhile
            return
        self._trials[request] += 1
        if self._trials[request] >= self._num_trials:
            del self._deaths_alone[request], self._trials[request]

    def groups(self, choices: Iterable[Choice]) -> list[list[Choice]]:
        """Groups of choices, of which one makes up the next step: the first that has something to run.

        More than one: one step at a time may be in flight.
        """
        for request in [suspect for suspect in self._deaths_alone if suspect.is_ended]:
            del self._deaths_alone[request], self._trials[request]
        running = list(choices)
        if not self._deaths_alone:
            return [running]
        alone = [[choice for choice in running if choice.request is request] for request in self._deaths_alone]
        return [*filter(None, alone), [choice for choice in running if choice.request not in self._deaths_alone]]
