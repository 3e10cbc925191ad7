"""Identities that must not pass for each other. Nothing but names."""

from dataclasses import dataclass
from typing import NewType

BlockId = NewType("BlockId", int)
SequenceId = NewType("SequenceId", int)  # of a lease; never used twice
Slot = NewType("Slot", int)  # of a session: the executor's row
StepId = NewType("StepId", int)  # 1, 2, 3, ... of a session
TokenId = NewType("TokenId", int)


@dataclass(frozen=True, slots=True)
class SessionKey:
    """One router's ordered steps on one process of an executor."""

    executor_id: str
    executor_epoch: int
    session_id: int
