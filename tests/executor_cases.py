"""Shorthand for tests of the executor: steps, a scripted runner, and sessions without a model."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from executor.batch import Batch
from executor.begun import BegunStep
from executor.ids import SessionId, StepId
from executor.pending import DoneOutput
from executor.runner import Runner
from executor.session import Session
from executor.sessions import Opened, SessionStore
from executor.step import BlockTable, Ints, RowSampling, RowStart, Step, StepError, StepOutcome, StepOutput
from executor.step_check import StepLimits

BLOCK = 4
LIMITS = StepLimits(block_size=BLOCK, num_blocks=32, vocabulary_size=100, max_context_tokens=64, max_tokens_per_step=40)


def ints(*numbers: int) -> Ints:
    """[len(numbers)] int64"""
    return np.array(numbers, dtype=np.int64)


def row(
    slot: int,
    tokens: Sequence[int],
    blocks: Sequence[int],
    computed: int = 0,
    sampling: RowSampling | None = None,
    incarnation: int = 1,
) -> RowStart:
    """A row with one block table."""
    tables = (BlockTable(0, ints(*blocks)),)
    return RowStart(slot, incarnation, ints(*tokens), computed, tables, sampling or RowSampling())


def step(step_id: int, runs: Sequence[tuple[int, int, int]] = (), **fields: object) -> Step:
    """runs: (slot, start position, number of tokens) per running row."""
    slots, starts, counts = (ints(*column) for column in zip(*runs, strict=True)) if runs else (ints(),) * 3
    return Step(StepId(step_id), slots=slots, start_positions=starts, num_tokens=counts, **fields)  # type: ignore[arg-type]


class TableModel:
    """A forward pass without a model: the logits behind a token are the token's row of a table."""

    def __init__(self, table: Tensor) -> None:
        """table: [vocabulary_size, vocabulary_size] float32"""
        self.table = table

    def forward(self, batch: Batch, attention: object) -> Tensor:
        tokens = batch.logits_tokens
        if batch.prompt_scores is not None:
            tokens = torch.cat((tokens, batch.prompt_scores.logits_tokens))
        return self.table[batch.input_ids[tokens]]


class NoAttention:
    """A back end with nothing to prepare."""

    def copy_blocks(self, blocks: object, sources: Ints, targets: Ints) -> None: ...

    def prepare(self, batch: object, views: object) -> None: ...


class NoArena:
    """Blocks that hold nothing."""

    blocks = None
    views = ()


def table_session(table: Tensor, max_rows: int = 8, **limits: int) -> Session:
    """A session whose tokens are really sampled, from the logits of a table. limits: fields of `StepLimits`."""
    runner = Runner(TableModel(table), NoArena(), NoAttention())  # type: ignore[arg-type]
    return Session(SessionId(1), max_rows, replace(LIMITS, **limits), runner)


class ScriptedRunner:
    """Says what it is told: by default the token after a row's last input token, modulo the vocabulary."""

    def __init__(self, answer: Callable[[Batch], Ints] | None = None) -> None:
        self._answer = answer or (lambda batch: (batch.input_ids[batch.logits_tokens].numpy() + 1) % 100)
        self.batches: list[Batch | None] = []
        self.copies: list[tuple[list[int], list[int]]] = []
        self.not_finite: set[int] = set()  # sampling rows of the next batch
        self.error: StepError | None = None  # of the next batch

    def begin(self, copy_sources: Ints, copy_targets: Ints, batch: Batch | None, before: object = None) -> DoneOutput:
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        self.batches.append(batch)
        self.copies.append((copy_sources.tolist(), copy_targets.tolist()))
        tokens = self._answer(batch) if batch is not None else ints()
        finite = np.array([index not in self.not_finite for index in range(len(tokens))], dtype=bool)
        self.not_finite = set()
        return DoneOutput(StepOutput(tokens, finite, 7))


def scripted_session(runner: ScriptedRunner | None = None, max_rows: int = 8) -> Session:
    """A session whose model is a script."""
    return Session(SessionId(1), max_rows, LIMITS, runner or ScriptedRunner())


def process(session: Session, step: Step) -> StepOutcome:
    """Begin a step and finish it."""
    begun = session.begin(step)
    return session.finish(begun) if isinstance(begun, BegunStep) else begun


def process_in(store: SessionStore, opened: Opened, step: Step) -> StepOutcome:
    """Begin a step of a connection and finish it."""
    begun = store.begin(opened, step)
    return store.finish(opened, begun) if isinstance(begun, BegunStep) else begun
