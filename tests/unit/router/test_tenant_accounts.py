"""Limits of tenants: pure, the time is an argument."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.errors import Code, OctavoError
from router.tenants.accounts import Accounts, TokenBucket
from router.tenants.metrics import OTHERS, TenantLabels
from router.tenants.tenant import Tenant


def refusal_of(accounts: Accounts, tenant: Tenant, now: float) -> OctavoError:
    with pytest.raises(OctavoError) as raised:
        accounts.begin(tenant, now)
    assert raised.value.code is Code.RESOURCE_EXHAUSTED
    assert raised.value.retry_after_s is not None
    assert raised.value.retry_after_s > 0
    return raised.value


def test_calls_at_a_time_are_those_of_a_tenant():
    accounts, first, second = Accounts(), Tenant("a", max_requests_in_flight=2), Tenant("b", max_requests_in_flight=1)
    accounts.begin(first, 0)
    accounts.begin(first, 0)
    assert refusal_of(accounts, first, 0).metadata == {"limit": "max_requests_in_flight", "allowed": "2"}
    accounts.begin(second, 0)
    assert accounts.in_flight() == {"a": 2, "b": 1}
    accounts.end(first, 0)
    accounts.begin(first, 0)
    for tenant in (first, first, second):
        accounts.end(tenant, 0)
    assert accounts.in_flight() == {}


def test_tokens_come_back_with_time_and_what_is_owed_is_waited_for():
    accounts, tenant = Accounts(), Tenant("a", tokens_per_minute=600)  # 10 a second
    accounts.begin(tenant, 0)
    accounts.take(tenant, 700, 0)  # 100 more than there are
    error = refusal_of(accounts, tenant, 0)
    assert error.metadata["limit"] == "tokens_per_minute"
    assert error.retry_after_s == pytest.approx(10.1)
    refusal_of(accounts, tenant, 9.9)
    accounts.begin(tenant, error.retry_after_s)
    accounts.take(tenant, 2, 100)  # full again by then
    accounts.begin(tenant, 100)


def test_nobody_waits_longer_than_a_minute_for_being_told_so():
    accounts, tenant = Accounts(), Tenant("a", tokens_per_minute=1)
    accounts.begin(tenant, 0)
    accounts.take(tenant, 10_000, 0)
    assert refusal_of(accounts, tenant, 0).retry_after_s == 60


def test_a_limit_that_changed_holds_from_the_next_call_on():
    accounts = Accounts()
    accounts.begin(Tenant("a", tokens_per_minute=100), 0)
    accounts.take(Tenant("a", tokens_per_minute=100), 100, 0)
    refusal_of(accounts, Tenant("a", tokens_per_minute=100), 0)
    accounts.begin(Tenant("a"), 0)  # the limit is gone
    assert refusal_of(accounts, Tenant("a", max_requests_in_flight=2), 0).metadata["allowed"] == "2"


def test_who_has_used_nothing_lately_is_forgotten():
    accounts = Accounts()
    for number in range(1000):
        tenant = Tenant(f"t{number}", tokens_per_minute=60)
        accounts.begin(tenant, 0)
        accounts.take(tenant, 30, 0)
        accounts.end(tenant, 60)
    assert len(accounts._accounts) == 0


@given(st.lists(st.tuples(st.integers(0, 300), st.floats(0, 30)), max_size=40))
def test_a_bucket_gives_no_more_than_its_rate_in_the_long_run(uses: list[tuple[int, float]]):
    """Who takes only when there is something has, after any time, a minute's worth, the rate, and one use at most."""
    bucket, now, taken = TokenBucket(120, 120.0, 0.0), 0.0, 0
    for num_tokens, pause_s in uses:
        now += pause_s
        bucket.refill(120, now)
        if not bucket.wait_s:
            bucket.level -= num_tokens
            taken += num_tokens
        assert taken <= 120 + 2 * now + 300
        assert bucket.level <= 120


def test_labels_are_bounded():
    labels = TenantLabels(2)
    assert [labels.of(name) for name in ("a", "b", "c", "a", "d")] == ["a", "b", OTHERS, "a", OTHERS]
    assert TenantLabels(0).of("a") == OTHERS
