"""Leases: who the clients are, whether they still live, and in which order their messages apply.

Here belongs one client's claim: its epoch, deadline, sequence numbers, stored last answer, and the names of what it
holds. Not here: blocks (manager), and what happens to them when a lease ends (service). Time is an argument.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from cache_service import refusal
from cache_service.fence import SessionKey
from cache_service.id_ranges import IdRanges
from cache_service.operation import LeaseId, SequenceId
from octavo.errors import FieldViolation, invalid_argument

# Epochs given by a client stay below this, so that the next one can always be granted on a 64-bit wire.
MAX_EPOCH = 2**63


def grant_epoch(previous: int, unix_ms: int) -> int:
    """The next epoch: higher than any before, also of a cache service that was here before this one."""
    return max(previous + 1, unix_ms)


@dataclass(slots=True, eq=False)
class Lease:
    """One live lease. Changed by the service alone."""

    lease_id: LeaseId
    client_id: str
    client_epoch: int
    ttl_s: float
    deadline: float  # s, of the clock that the service is told
    last_number: int = 0
    last_request: Any = None
    last_answer: Any = None
    arena_of: dict[SequenceId, str] = field(default_factory=dict)  # live sequence -> its arena
    released: IdRanges = field(default_factory=IdRanges)  # tombstones: ids that cannot be allocated any more
    sessions: set[SessionKey] = field(default_factory=set)  # open sessions that this client's steps run in
    # False after a restart of the cache service, until the client has said what it holds.
    is_known: bool = True

    def renew(self, now: float) -> None:
        """The client was heard of."""
        self.deadline = now + self.ttl_s

    def is_repeat(self, number: int, request: Any) -> bool:
        """Whether this is the last message again. Raises ABORTED SEQUENCE_GAP if it is neither that nor the next."""
        if number == self.last_number and number and request == self.last_request:
            return True
        if number != self.last_number + 1:
            raise refusal.sequence_gap(number, self.last_number + 1)
        return False

    def store_answer(self, number: int, request: Any, answer: Any) -> None:
        """The message was applied: remember it and its answer until the next one."""
        self.last_number, self.last_request, self.last_answer = number, request, answer


class LeaseBook:
    """All live leases, and the last epoch of every client there was."""

    def __init__(self) -> None:
        self._leases: dict[LeaseId, Lease] = {}
        self._live_of_client: dict[str, Lease] = {}
        self._last_epochs: dict[str, int] = {}
        self.last_lease_id = 0  # ever granted
        self.last_epoch = 0  # ever granted, to any client

    def __len__(self) -> int:
        return len(self._leases)

    def __iter__(self) -> Iterator[Lease]:
        return iter(list(self._leases.values()))

    def find(self, lease_id: LeaseId) -> Lease:
        """The live lease. Raises FAILED_PRECONDITION LEASE_EXPIRED."""
        lease = self._leases.get(lease_id)
        if lease is None:
            raise refusal.lease_expired(lease_id)
        return lease

    def is_live(self, lease_id: LeaseId) -> bool:
        return lease_id in self._leases

    def find_client(self, client_id: str, client_epoch: int) -> Lease:
        """The live lease of a client's epoch. Raises FAILED_PRECONDITION LEASE_EXPIRED."""
        lease = self._live_of_client.get(client_id)
        if lease is None or lease.client_epoch != client_epoch:
            raise refusal.no_live_lease(client_id, client_epoch)
        return lease

    def live_of_client(self, client_id: str) -> Lease | None:
        return self._live_of_client.get(client_id)

    def check_epoch(self, client_id: str, client_epoch: int) -> None:
        """Raise unless a lease of this epoch is live or may be opened (0: may always)."""
        if not client_id:
            raise invalid_argument(FieldViolation("client_id", "is empty; a name that tells this client from others"))
        if client_epoch >= MAX_EPOCH:
            raise invalid_argument(
                FieldViolation("client_epoch", f"is {client_epoch}; below 2**63, or 0 to be given one")
            )
        live, last = self._live_of_client.get(client_id), self._last_epochs.get(client_id, 0)
        is_live = live is not None and live.client_epoch == client_epoch
        if client_epoch and client_epoch <= last and not is_live:
            raise refusal.stale_epoch(f"client {client_id!r}", client_epoch, last)

    def open(self, client_id: str, client_epoch: int, ttl_s: float, now: float, unix_ms: int) -> Lease:
        """A new lease; the epoch was checked and the client has no live lease. Epoch 0: the next one is granted.

        Lease ids start at the time, so that a client of an earlier cache service does not meet another's lease.
        """
        epoch = client_epoch or grant_epoch(max(self.last_epoch, self._last_epochs.get(client_id, 0)), unix_ms)
        self.last_lease_id = max(self.last_lease_id + 1, unix_ms)
        lease = Lease(LeaseId(self.last_lease_id), client_id, epoch, ttl_s, now + ttl_s)
        self._add(lease)
        if not client_epoch:
            self.last_epoch = epoch
        return lease

    def restore(self, lease: Lease) -> None:
        """A live lease of the time before."""
        self._add(lease)

    def _add(self, lease: Lease) -> None:
        self._leases[lease.lease_id] = self._live_of_client[lease.client_id] = lease
        self._last_epochs[lease.client_id] = lease.client_epoch

    def count_unknown(self) -> int:
        """Clients that have not said yet what they hold."""
        return sum(not lease.is_known for lease in self._leases.values())

    def remove(self, lease: Lease) -> None:
        """The lease is over."""
        del self._leases[lease.lease_id]
        del self._live_of_client[lease.client_id]

    def overdue(self, now: float) -> list[Lease]:
        """Live leases whose deadline has passed."""
        return [lease for lease in self._leases.values() if lease.deadline <= now]

    def postpone(self, delay_s: float) -> None:
        """Move every deadline: the time in which this process stood still is nobody's silence."""
        for lease in self._leases.values():
            lease.deadline += delay_s
