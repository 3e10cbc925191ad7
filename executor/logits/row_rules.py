"""What one row asks of its logits beyond a few numbers: biases, penalties, ids that are out now.

Kept up token by token, so that a step costs what the row's rules are worth and not what its history is long. Most rows
have none of it, and no object here. Not here: tensors (`adjust`).
"""

import copy
from collections import deque

import numpy as np

from executor.logits.constraint import MakeConstraint
from executor.step import NO_INTS, Ints, RowSampling


class TokenCounts:
    """How often ids were generated, with the ids of the prompt among them where those count too: arrays that grow."""

    def __init__(self, prompt: Ints, generated: Ints) -> None:
        ids, where = np.unique(np.concatenate((prompt, generated)), return_inverse=True)
        self._size = len(ids)
        self._ids = ids
        self._counts = np.bincount(where[len(prompt) :], minlength=self._size)
        self._index = {token_id: index for index, token_id in enumerate(ids.tolist())}

    @property
    def token_ids(self) -> Ints:
        """[num_seen], distinct."""
        return self._ids[: self._size]

    @property
    def counts(self) -> Ints:
        """[num_seen], 0 for ids of the prompt alone."""
        return self._counts[: self._size]

    def copy(self) -> "TokenCounts":
        """One that goes its own way."""
        other = TokenCounts.__new__(TokenCounts)
        other._size, other._index = self._size, dict(self._index)
        other._ids, other._counts = self._ids.copy(), self._counts.copy()
        return other

    def add(self, token_id: int) -> None:
        """It was generated once more."""
        index = self._index.setdefault(token_id, self._size)
        if index == self._size:
            self._append(token_id)
        self._counts[index] += 1

    def _append(self, token_id: int) -> None:
        if self._size == len(self._ids):
            room = np.zeros(max(16, self._size), dtype=np.int64)
            self._ids, self._counts = np.concatenate((self._ids, room)), np.concatenate((self._counts, room))
        self._ids[self._size], self._counts[self._size] = token_id, 0
        self._size += 1


class RowRules:
    """The rules of a row and what of its history they look at."""

    def __init__(self, sampling: RowSampling, history: Ints, make_constraint: MakeConstraint) -> None:
        """history: [num_tokens], prompt and generated."""
        prompt, generated = history[: sampling.num_prompt_tokens], history[sampling.num_prompt_tokens :]
        self.sampling = sampling
        self.counts: TokenCounts | None = None
        if has_penalties(sampling):
            self.counts = TokenCounts(prompt if sampling.repetition_penalty != 1 else NO_INTS, generated)
        self.constraint = make_constraint(sampling.grammar, generated) if sampling.grammar else None
        ends = np.cumsum(sampling.banned_lengths)[:-1]
        self._banned = [each.tolist() for each in np.split(sampling.banned_token_ids, ends) if len(each)]
        longest = max(map(len, self._banned), default=0)
        self._tail = deque(generated.tolist()[-longest:] if longest else (), maxlen=max(0, longest - 1))

    def copy(self) -> "RowRules":
        """Rules that go their own way. Not of a row with a constraint, whose state stays one."""
        assert self.constraint is None, "rows that are appended to follow no grammar"
        other = copy.copy(self)
        other.counts = self.counts.copy() if self.counts is not None else None
        other._tail = self._tail.copy()
        return other

    @property
    def depend_on_answer(self) -> bool:
        """Whether the row's next token cannot be chosen before the one before it is known."""
        return self.counts is not None or self.constraint is not None or any(len(each) > 1 for each in self._banned)

    def append(self, token_id: int) -> None:
        """The row generated a token."""
        if self.counts is not None:
            self.counts.add(token_id)
        if self.constraint is not None:
            self.constraint.append(token_id)
        self._tail.append(token_id)

    def banned_ids(self, num_tokens: int) -> list[int]:
        """Ids that cannot be sampled behind a history of this length; some may appear twice."""
        sampling, tail = self.sampling, list(self._tail)
        banned = sampling.suppressed_token_ids.tolist() if num_tokens < sampling.suppress_until else []
        for *before, last in self._banned:
            if not before or tail[-len(before) :] == before:
                banned.append(last)
        return banned


def has_penalties(sampling: RowSampling) -> bool:
    """Whether what was seen before changes the row's logits."""
    return sampling.repetition_penalty != 1 or sampling.presence_penalty != 0 or sampling.frequency_penalty != 0


def has_rules(sampling: RowSampling) -> bool:
    """Whether the row needs a `RowRules`."""
    ids = (sampling.suppressed_token_ids, sampling.bias_token_ids, sampling.allowed_token_ids)
    return has_penalties(sampling) or bool(sampling.grammar) or any(map(len, (*ids, sampling.banned_token_ids)))
