"""A cache service that goes away and comes back, with the same arena or another."""

from dataclasses import dataclass, field, replace

import pytest

from executor.arena import ArenaLayout, KvGeometry
from executor.cache_link import CacheLink
from executor.clients.cache import ArenaGrant
from executor.ids import SessionId
from executor.sessions import Opening
from octavo.errors import Code, OctavoError

GRANT = ArenaGrant(7, "/dev/shm/a", 4096, ArenaLayout(0, 1024, 4, ()), KvGeometry(4, "float32", ()))
GONE = OctavoError(Code.UNAVAILABLE, "UNAVAILABLE", "connection refused")


@dataclass
class Client:
    """Answers of the cache service."""

    error: OctavoError | None = None
    grant: ArenaGrant = GRANT
    register_error: OctavoError | None = None
    calls: list[str] = field(default_factory=list)

    async def register(self, timeout_s: float) -> ArenaGrant:
        self.calls.append("register")
        if self.register_error is not None:
            raise self.register_error
        return self.grant

    async def orphaned_sessions(self) -> frozenset[SessionId]:
        self.calls.append("orphans")
        if self.error is not None:
            raise self.error
        return frozenset({SessionId(3)})

    async def open_session(self, session_id: SessionId, opening: Opening) -> None: ...

    async def close_session(self, session_id: SessionId) -> None: ...


@pytest.fixture
def replaced() -> list[str]:
    return []


async def lost(client: Client, link: CacheLink, error: OctavoError = GONE) -> None:
    client.error = error
    with pytest.raises(OctavoError):
        await link.orphaned_sessions()
    client.error = None
    client.calls.clear()


async def test_a_link_that_holds_does_not_register_again(replaced):
    client = Client()
    link = CacheLink(client, GRANT, replaced.append)
    assert await link.orphaned_sessions() == {3}
    assert (client.calls, replaced) == (["orphans"], [])


@pytest.mark.parametrize("error", [GONE, OctavoError(Code.FAILED_PRECONDITION, "STALE_EPOCH", "who are you")])
async def test_a_lost_link_registers_again_once_and_goes_on(replaced, error):
    client = Client()
    link = CacheLink(client, GRANT, replaced.append)
    await lost(client, link, error)
    assert await link.orphaned_sessions() == {3}
    assert await link.orphaned_sessions() == {3}
    assert (client.calls, replaced) == (["register", "orphans", "orphans"], [])


async def test_as_long_as_nobody_answers_it_tries_and_goes_on(replaced):
    client = Client()
    link = CacheLink(client, GRANT, replaced.append)
    await lost(client, link)
    client.register_error = GONE
    for _ in range(3):
        with pytest.raises(OctavoError):
            await link.orphaned_sessions()
    assert (client.calls, replaced) == (["register"] * 3, [])


@pytest.mark.parametrize("grant", [replace(GRANT, path="/dev/shm/b"), replace(GRANT, executor_epoch=8)])
async def test_another_arena_or_epoch_means_the_end_of_this_process(replaced, grant):
    """Steps would go on writing into memory that nobody reads."""
    client = Client(grant=grant)
    link = CacheLink(client, GRANT, replaced.append)
    await lost(client, link)
    await link.orphaned_sessions()
    assert len(replaced) == 1


async def test_a_refusal_means_the_end_of_this_process(replaced):
    client = Client(register_error=OctavoError(Code.FAILED_PRECONDITION, "GEOMETRY_MISMATCH", "another model"))
    link = CacheLink(client, GRANT, replaced.append)
    await lost(client, link)
    with pytest.raises(OctavoError):
        await link.orphaned_sessions()
    assert "another model" in replaced[0]
