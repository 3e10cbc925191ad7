"""Random lives of a cache service, judged by a model of the KV memory after every operation.

Field failure 8: allocate, fork, extend, commit, hit, free, evict, cancel, fence, lease expiry, executor death in any
order: the sum of states is the pool after every call, and no sequence ever reads what is not its own.
"""

import logging
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from cache_service.eviction import POLICIES, Eviction
from tests.property.cache_service.cache_drivers import DRIVERS, HASHES, CacheDriver, FakeMemory
from tests.property.cache_service.cache_world import CacheWorld, Client, Row, Session

BLOCK_SIZE = 4
PICK = st.integers(0, 1000)
TOKEN = st.integers(0, 1)
EXTRAS = st.sampled_from(
    [{}, {}, {}, {"salt": "a"}, {"salt": ""}, {"adapter": "a"}, {"tenant": "a"}, {"tenant": "b", "salt": "a"}]
)
EVICTIONS = st.builds(Eviction, st.sampled_from(list(POLICIES.values())), st.sampled_from([{}, {"a": 3.0}]))


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    """Thousands of leases and executors end here; a failure is told by hypothesis."""
    caplog.set_level(logging.ERROR)


class CacheMachine(RuleBasedStateMachine):
    """Two routers, two executors, two token ids, 6 to 16 blocks of 4 tokens."""

    driver_name: ClassVar[str]
    hash_name: ClassVar[str]
    num_operations: ClassVar[int] = 0

    world: CacheWorld
    driver: CacheDriver | None = None

    @initialize(num_blocks=st.integers(6, 16), eviction=EVICTIONS)
    def start(self, num_blocks: int, eviction: Eviction) -> None:
        self.driver = DRIVERS[self.driver_name](HASHES[self.hash_name], eviction)
        self.world = CacheWorld(self.driver, num_blocks, BLOCK_SIZE)

    def teardown(self) -> None:
        if self.driver is None:
            return
        try:
            self.world.settle()
        finally:
            self.driver.close()

    def client(self, pick: int) -> Client:
        return self.world.clients[pick % len(self.world.clients)]

    def rows(self) -> list[Row]:
        return [row for client in self.world.clients for row in client.rows]

    def row(self, pick: int) -> Row:
        rows = self.rows()
        return rows[pick % len(rows)]

    def session(self, pick: int) -> Session:
        return self.world.sessions[pick % len(self.world.sessions)]

    def has_rows(self) -> bool:
        return self.driver is not None and bool(self.rows())

    def has_sessions(self) -> bool:
        return self.driver is not None and bool(self.world.sessions)

    @rule(pick=PICK, prompt=st.lists(TOKEN, min_size=1, max_size=18), extras=EXTRAS, slack=st.integers(0, 2))
    def allocate(self, pick: int, prompt: list[int], extras: dict[str, str], slack: int) -> None:
        self.world.allocate(self.client(pick), prompt, extras, slack, bypass=pick % 7 == 6)

    @precondition(lambda self: self.driver is not None and bool(self.world.histories))
    @rule(pick=PICK, again=PICK, more=st.lists(TOKEN, max_size=5))
    def allocate_again(self, pick: int, again: int, more: list[int]) -> None:
        prompt = (self.world.histories[again % len(self.world.histories)] + more)[:40]
        num_whole = len(prompt) // BLOCK_SIZE * BLOCK_SIZE
        if pick % 3 == 0 and num_whole:
            prompt = prompt[:num_whole]  # ends with a block
        self.world.allocate(self.client(pick), prompt, {}, 0, bypass=False)

    @precondition(has_rows)
    @rule(picks=st.lists(PICK, min_size=1, max_size=3), chunk=st.sampled_from([1, 2, 3, 4, 5, 40]), token=TOKEN)
    def send_step(self, picks: list[int], chunk: int, token: int) -> None:
        self.world.send_step([self.row(pick) for pick in picks], f"e{picks[0] % 2}", chunk, token)

    @precondition(has_rows)
    @rule(pick=PICK, chunk=st.sampled_from([1, 4, 40]), token=TOKEN, overlap=st.integers(0, 3))
    def run_and_commit(self, pick: int, chunk: int, token: int, overlap: int) -> None:
        row = self.row(pick)
        self.world.send_step([row], f"e{pick % 2}", chunk, token)
        session = row.session
        if session is not None:
            while session.sent or session.executed:
                self.world.execute(session)
                self.world.receive(session)
        self.world.commit(row, overlap, ahead=bool(pick % 2))

    @precondition(has_sessions)
    @rule(pick=PICK)
    def execute(self, pick: int) -> None:
        self.world.execute(self.session(pick))

    @precondition(has_sessions)
    @rule(pick=PICK)
    def receive(self, pick: int) -> None:
        self.world.receive(self.session(pick))

    @precondition(has_rows)
    @rule(pick=PICK, overlap=st.integers(0, 6), ahead=st.booleans())
    def commit(self, pick: int, overlap: int, ahead: bool) -> None:
        self.world.commit(self.row(pick), overlap, ahead)

    @precondition(has_rows)
    @rule(pick=PICK, need=st.integers(0, 2), want=st.integers(0, 2))
    def extend(self, pick: int, need: int, want: int) -> None:
        self.world.extend(self.row(pick), need, want)

    @precondition(has_rows)
    @rule(pick=PICK, num_children=st.integers(1, 4))
    def fork(self, pick: int, num_children: int) -> None:
        self.world.fork(self.row(pick), num_children)

    @precondition(has_rows)
    @rule(pick=PICK, with_commit=st.booleans())
    def release(self, pick: int, with_commit: bool) -> None:
        self.world.release(self.row(pick), with_commit)

    @precondition(has_sessions)
    @rule(pick=PICK)
    def drop_session(self, pick: int) -> None:
        self.world.drop_session(self.session(pick), tell=True)

    @rule(pick=PICK)
    def kill_executor(self, pick: int) -> None:
        if pick % 4 == 0:
            self.world.kill_executor(f"e{pick // 4 % 2}")

    @rule(pick=PICK)
    def end_lease(self, pick: int) -> None:
        if pick % 4 == 0:
            self.world.expire(self.client(pick // 4))
        elif pick % 4 == 1:
            self.world.supersede(self.client(pick // 4))

    @rule(pick=PICK, torn=st.lists(st.integers(0, 2**16), max_size=3), runs=st.integers(0, 3))
    def kill_cache_service(self, pick: int, torn: list[int], runs: int) -> None:
        def tear(memory: FakeMemory) -> None:
            for place in torn:
                memory.ledger_buffer[place % len(memory.ledger_buffer)] ^= 1 + place % 255

        def meanwhile() -> None:
            for place in range(min(runs, len(self.world.sessions))):
                self.world.execute(self.session(pick + place))
                self.world.receive(self.session(pick // 3 + place))
            if pick % 5 == 0:
                self.world.kill_executor(f"e{pick % 2}")

        self.world.kill_cache_service(tear, meanwhile, silent=pick // 3 % 6)

    @rule(pick=PICK)
    def close_orphans(self, pick: int) -> None:
        self.world.close_orphans(f"e{pick % 2}")

    @invariant()
    def holds(self) -> None:
        if self.driver is not None:
            type(self).num_operations += 1
            self.world.check()


def run_machine(driver_name: str, hash_name: str, num_examples: int, num_steps: int) -> int:
    """How many operations were judged."""
    names: dict[str, Any] = {"driver_name": driver_name, "hash_name": hash_name}
    machine: type[CacheMachine] = type("Machine", (CacheMachine,), names)
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=num_examples,
            stateful_step_count=num_steps,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
    return machine.num_operations


@pytest.mark.parametrize(
    ("driver_name", "hash_name", "num_examples"),
    [
        ("in process", "blake2b", 90),
        ("in process", "three-bit", 50),
        ("in process", "constant", 50),
        ("grpc", "blake2b", 10),
    ],
)
def test_random_lives_keep_every_invariant(driver_name: str, hash_name: str, num_examples: int) -> None:
    """Field failure 8."""
    run_machine(driver_name, hash_name, num_examples, num_steps=50)


@pytest.mark.long
@pytest.mark.timeout(7200)
@pytest.mark.parametrize(
    ("driver_name", "hash_name", "num_examples", "num_least"),
    [
        ("in process", "blake2b", 1400, 100_000),
        ("in process", "three-bit", 300, 20_000),
        ("in process", "constant", 300, 20_000),
        ("grpc", "blake2b", 100, 7_000),
        ("grpc", "three-bit", 50, 3_500),
        ("grpc", "constant", 50, 3_500),
    ],
)
def test_a_hundred_thousand_random_operations_keep_every_invariant(
    driver_name: str, hash_name: str, num_examples: int, num_least: int
) -> None:
    """Field failure 8, at length."""
    num_operations = run_machine(driver_name, hash_name, num_examples, num_steps=100)
    print(f"{driver_name}, {hash_name}: {num_operations} operations")
    assert num_operations >= num_least
