"""What each tenant uses, against what it may: calls at a time, tokens a minute. Pure: the time is an argument.

Tokens are taken when it is known how many there were: those of a prompt when it is tokenized, generated ones at the
end. A tenant may so go below zero, and waits for as long as it takes to come back. Not here: shares of the queue, which
the engines have.
"""

from dataclasses import dataclass

from octavo.errors import Code, OctavoError
from router.tenants.tenant import Tenant

TENANT_LIMIT = "TENANT_LIMIT"  # the reason of the errors
IN_FLIGHT_RETRY_S = 1.0
MAX_RETRY_S = 60.0


@dataclass(slots=True)
class TokenBucket:
    """Fills steadily to a minute's worth.

    Attributes:
        per_minute: tokens.
        level: tokens; below zero is owed.
        at: when `level` was right, in seconds.
    """

    per_minute: int
    level: float
    at: float

    def refill(self, per_minute: int, now: float) -> None:
        """What has come in since; `per_minute` may have changed."""
        gained = max(0.0, now - self.at) * self.per_minute / 60
        self.per_minute, self.at = per_minute, now
        self.level = min(float(per_minute), self.level + gained)

    @property
    def wait_s(self) -> float:
        """Seconds until there is something again; 0: there is."""
        return 0.0 if self.level > 0 else (1.0 - self.level) * 60 / self.per_minute


@dataclass(slots=True)
class _Account:
    num_in_flight: int = 0
    bucket: TokenBucket | None = None


class Accounts:
    """Of all tenants, by name. A limit that has changed holds from the next call on."""

    def __init__(self) -> None:
        self._accounts: dict[str, _Account] = {}

    def begin(self, tenant: Tenant, now: float) -> None:
        """A call of the tenant begins; `end` must follow.

        Raises:
            OctavoError: RESOURCE_EXHAUSTED with the limit's name in its metadata and when to come back. The call has
                not begun.
        """
        account = self._accounts.setdefault(tenant.name, _Account())
        most = tenant.max_requests_in_flight
        if most and account.num_in_flight >= most:
            running = f"{account.num_in_flight} of its calls run, and {most} may"
            raise over_limit("max_requests_in_flight", running, most, IN_FLIGHT_RETRY_S)
        bucket = self._bucket(account, tenant, now)
        if bucket is not None and bucket.wait_s:
            used = f"it has used its {tenant.tokens_per_minute} tokens a minute"
            raise over_limit("tokens_per_minute", used, tenant.tokens_per_minute, min(bucket.wait_s, MAX_RETRY_S))
        account.num_in_flight += 1

    def take(self, tenant: Tenant, num_tokens: int, now: float) -> None:
        """Tokens of a call that has begun."""
        bucket = self._bucket(self._accounts[tenant.name], tenant, now)
        if bucket is not None:
            bucket.level -= num_tokens

    def end(self, tenant: Tenant, now: float) -> None:
        """A call that has begun is over."""
        account = self._accounts[tenant.name]
        account.num_in_flight -= 1
        bucket = self._bucket(account, tenant, now)
        if not account.num_in_flight and (bucket is None or bucket.level >= bucket.per_minute):
            del self._accounts[tenant.name]  # as if it had never called

    def in_flight(self) -> dict[str, int]:
        """Calls now, by tenant."""
        return {name: account.num_in_flight for name, account in list(self._accounts.items()) if account.num_in_flight}

    @staticmethod
    def _bucket(account: _Account, tenant: Tenant, now: float) -> TokenBucket | None:
        per_minute = tenant.tokens_per_minute
        if not per_minute:
            account.bucket = None
        elif account.bucket is None:
            account.bucket = TokenBucket(per_minute, float(per_minute), now)
        else:
            account.bucket.refill(per_minute, now)
        return account.bucket


def over_limit(limit: str, what: str, allowed: float, retry_after_s: float) -> OctavoError:
    """A tenant has as much as it may have; others are served."""
    return OctavoError(
        Code.RESOURCE_EXHAUSTED,
        TENANT_LIMIT,
        f"this caller is at its limit, {limit}: {what}; come back later",
        metadata={"limit": limit, "allowed": f"{allowed:g}"},
        retry_after_s=retry_after_s,
    )
