"""The identities and small numbers that must not pass for one another. No logic."""

from typing import NewType

RouterId = NewType("RouterId", str)
RouterEpoch = NewType("RouterEpoch", int)  # higher replaces
SessionId = NewType("SessionId", int)  # 1, 2, 3 ... within an executor epoch
StepId = NewType("StepId", int)  # 1, 2, 3 ... within a session; 0: none yet
Attachment = NewType("Attachment", int)  # one connection to a session; only the newest may run steps
