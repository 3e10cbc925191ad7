"""Block events over gRPC: what a balancer that follows them knows is what can be hit, whatever happens between."""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import replace

import grpc
import pytest

from cache_service import watching
from cache_service.prefix import Extras, blake2b_key, pack_tokens
from octavo.errors import Code, OctavoError
from octavo.rpc import error_of_call
from octavo.v1 import cache_pb2
from tests.property.cache_service.cache_drivers import ARENA, GrpcDriver, tokens
from tests.property.cache_service.cache_router import ScriptedRouter

B = 4


class Follower:
    """Keeps what the messages say: keys with their parents and tokens."""

    def __init__(self, driver: GrpcDriver) -> None:
        self._driver = driver
        self.known: dict[bytes, tuple[bytes, tuple[int, ...]]] = {}
        self.stream_id, self.last_number = "", 0
        self.num_snapshots = 0
        self._call: grpc.aio.UnaryStreamCall | None = None

    def connect(self) -> "Follower":
        request = cache_pb2.WatchBlockEventsRequest(
            arena_id=ARENA, stream_id=self.stream_id, last_number=self.last_number
        )

        async def call() -> grpc.aio.UnaryStreamCall:
            return self._driver.stub.WatchBlockEvents(request)

        self._call = self._driver.run(call())
        return self

    def cut(self) -> None:
        assert self._call is not None
        self._call.cancel()

    def read(self) -> cache_pb2.WatchBlockEventsResponse:
        """One message. Raises OctavoError as the stream ends."""
        call = self._call

        async def one() -> cache_pb2.WatchBlockEventsResponse:
            assert call is not None
            return await asyncio.wait_for(call.read(), 20)

        try:
            message = self._driver.run(one())
        except grpc.aio.AioRpcError as error:
            raise error_of_call(error) from error
        self._take(message)
        return message

    def read_up_to(self, number: int) -> None:
        while self.last_number < number:
            self.read()

    def _take(self, message: cache_pb2.WatchBlockEventsResponse) -> None:
        if message.begins_snapshot:
            self.known.clear()
            self.num_snapshots += 1
        for event in message.events:
            if event.HasField("stored"):
                assert event.stored.key not in self.known
                self.known[event.stored.key] = (event.stored.parent_key, tuple(event.stored.token_ids))
            else:
                del self.known[event.removed.key]
        self.stream_id, self.last_number = message.stream_id, message.last_number


@pytest.fixture
def driver() -> Iterator[GrpcDriver]:
    made = GrpcDriver()
    made.register("e", 9, B)  # 8 usable blocks
    yield made
    made.close()


@pytest.fixture
def router(driver: GrpcDriver) -> ScriptedRouter:
    return ScriptedRouter(driver)


def number_of(driver: GrpcDriver) -> int:
    return driver.service.find_arena(ARENA).manager.events.last_number


def check(follower: Follower, driver: GrpcDriver) -> None:
    nodes = driver.service.find_arena(ARENA).manager.findable()
    assert set(follower.known) == {node.key for node in nodes}


def test_keys_and_tokens_are_those_of_the_documentation(driver: GrpcDriver, router: ScriptedRouter) -> None:
    follower = Follower(driver).connect()
    assert follower.read().begins_snapshot
    router.compute(*range(9))
    follower.read_up_to(number_of(driver))
    root = blake2b_key(Extras().encode())
    first = blake2b_key(root + pack_tokens(tokens(0, 1, 2, 3)))
    second = blake2b_key(first + pack_tokens(tokens(4, 5, 6, 7)))
    assert follower.known == {first: (root, (0, 1, 2, 3)), second: (first, (4, 5, 6, 7))}


def test_what_is_evicted_is_removed(driver: GrpcDriver, router: ScriptedRouter) -> None:
    follower = Follower(driver).connect()
    for start in range(0, 200, 10):
        router.compute(*range(start, start + 10))
        follower.read_up_to(number_of(driver))
        check(follower, driver)
    assert follower.num_snapshots == 1


def test_who_comes_back_is_told_what_was_missed(driver: GrpcDriver, router: ScriptedRouter) -> None:
    follower = Follower(driver).connect()
    router.compute(*range(9))
    follower.read_up_to(number_of(driver))
    follower.cut()
    for start in range(100, 200, 10):
        router.compute(*range(start, start + 10))
    follower.connect().read_up_to(number_of(driver))
    check(follower, driver)
    assert follower.num_snapshots == 1


def test_who_missed_too_much_begins_anew(driver: GrpcDriver, router: ScriptedRouter) -> None:
    follower = Follower(driver).connect()
    follower.read()
    follower.cut()
    events = driver.service.find_arena(ARENA).manager.events
    events._kept = type(events._kept)(maxlen=3)  # instead of 16,384
    for start in range(0, 100, 10):
        router.compute(*range(start, start + 10))
    follower.connect().read_up_to(number_of(driver))
    check(follower, driver)
    assert follower.num_snapshots == 2


def test_a_snapshot_of_many_messages_has_parents_first_and_is_not_taken_up_in_its_middle(
    driver: GrpcDriver, router: ScriptedRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watching, "MAX_EVENTS", 2)
    router.compute(*range(25))  # 6 full blocks
    follower = Follower(driver).connect()
    assert [follower.read().last_number for _ in range(3)] == [0, 0, number_of(driver)]
    for key, (parent, _) in follower.known.items():
        assert parent == blake2b_key(Extras().encode()) or list(follower.known).index(parent) < list(
            follower.known
        ).index(key)
    check(follower, driver)


def test_after_a_death_everything_is_told_anew(driver: GrpcDriver, router: ScriptedRouter) -> None:
    router.compute(*range(9))
    follower = Follower(driver).connect()
    follower.read()
    driver.die()
    follower.connect().read()
    assert follower.num_snapshots == 2
    check(follower, driver)


def test_a_stop_ends_the_streams_at_once_and_a_new_arena_too(driver: GrpcDriver) -> None:
    async def first_and_end(watched: watching.Watching, end: Callable[[], None]) -> OctavoError:
        stream = watched.follow(ARENA, "", 0)
        assert (await anext(stream)).begins_snapshot
        end()
        with pytest.raises(OctavoError) as caught:
            await asyncio.wait_for(anext(stream), 20)
        return caught.value

    def replace_arena() -> None:
        arenas = driver.service._arenas
        arenas.add(replace(arenas.find(ARENA), serial=99))

    watched = watching.Watching(driver.service)
    error = driver.run(first_and_end(watched, replace_arena))
    assert (error.code, error.reason) == (Code.ABORTED, "ARENA_REPLACED")
    error = driver.run(first_and_end(watched, watched.end))
    assert (error.code, error.reason) == (Code.UNAVAILABLE, "STOPPING")


def test_an_unknown_arena_and_one_follower_too_many(driver: GrpcDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "MAX_WATCHES", 1)
    first = Follower(driver).connect()
    first.read()
    with pytest.raises(OctavoError) as caught:
        Follower(driver).connect().read()
    assert (caught.value.code, caught.value.reason) == (Code.RESOURCE_EXHAUSTED, "TOO_MANY_WATCHES")
    first.cut()
    request = cache_pb2.WatchBlockEventsRequest(arena_id="nowhere")
    with pytest.raises(OctavoError) as caught:
        driver.run(_read_one(driver, request))
    assert (caught.value.code, caught.value.reason) == (Code.NOT_FOUND, "UNKNOWN_ARENA")


async def _read_one(driver: GrpcDriver, request: cache_pb2.WatchBlockEventsRequest) -> None:
    try:
        await driver.stub.WatchBlockEvents(request).read()
    except grpc.aio.AioRpcError as error:
        raise error_of_call(error) from error
