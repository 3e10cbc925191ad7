"""The one exception that crosses the parts of Octavo, free of gRPC.

Domain code raises `OctavoError`; `octavo.rpc` turns it into a status with details at the edge, and back at the client.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum


class Code(Enum):
    """The gRPC status codes that Octavo answers with, by their numbers on the wire."""

    CANCELLED = 1
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    OUT_OF_RANGE = 11
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    DATA_LOSS = 15
    UNAUTHENTICATED = 16


@dataclass(frozen=True, slots=True)
class FieldViolation:
    """One bad field: its path (`sampling.top_p`) and what is wrong with it and what is allowed."""

    field: str
    description: str


class OctavoError(Exception):
    """Something that a caller can be told.

    Args:
        code: the status.
        reason: a stable UPPER_SNAKE name for programs (`ErrorInfo.reason`).
        message: for people: what was wrong, what was allowed, what to do next.
        metadata: numbers and names of the case, as strings (`ErrorInfo.metadata`).
        violations: bad fields, for INVALID_ARGUMENT (`BadRequest`).
        retry_after_s: when trying again makes sense (`RetryInfo` and the pushback trailer); None: not said.
    """

    def __init__(
        self,
        code: Code,
        reason: str,
        message: str,
        *,
        metadata: Mapping[str, str] | None = None,
        violations: Sequence[FieldViolation] = (),
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason
        self.message = message
        self.metadata = dict(metadata or {})
        self.violations = tuple(violations)
        self.retry_after_s = retry_after_s

    def __repr__(self) -> str:
        return f"OctavoError({self.code.name}, {self.reason}, {self.message!r})"


def invalid_argument(*violations: FieldViolation) -> OctavoError:
    """INVALID_ARGUMENT that names every bad field, the first in its message."""
    first = violations[0]
    more = f" (and {len(violations) - 1} more)" if len(violations) > 1 else ""
    return OctavoError(
        Code.INVALID_ARGUMENT,
        "INVALID_FIELD",
        f"{first.field}: {first.description}{more}",
        violations=violations,
    )
