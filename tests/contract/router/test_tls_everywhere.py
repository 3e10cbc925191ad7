"""A whole stack with TLS: mutual between the processes, and for clients what the router asks of them."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cache_service.app import outside_of, running
from cache_service.config import CacheServiceConfig
from octavo.async_client import AsyncClient
from octavo.client import Client
from octavo.errors import Code, OctavoError
from octavo.rpc import is_serving
from octavo.tls import TlsFiles, TlsSource
from router.app import Router
from router.config import RouterConfig
from tests.certificates import Authority, Files
from tests.fakes import FakeExecutor, counting
from tests.stacks import FakeProcess, until

SERVICE = "octavo.v1.InferenceService"


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "tls")


@asynccontextmanager
async def stack(source: str, internal: Files, **config: Any) -> AsyncIterator[Router]:
    """Three processes in this one, over TLS inside; not waited for."""
    cache_config = CacheServiceConfig(
        listen="127.0.0.1:0", metrics_listen="", drain_grace_s=0, min_lease_ttl_s=0.2, **internal.internal
    )
    outside = replace(outside_of(cache_config), watch_process=lambda pid: FakeProcess())
    async with running(cache_config, outside) as app:
        cache_address = f"127.0.0.1:{app.server.port}"
        tls = TlsSource(TlsFiles(internal.certificate, internal.key, internal.ca))
        executor = FakeExecutor(counting, source, cache_address, tls=tls)
        await executor.start()
        addresses = {"cache_service": cache_address, "executor": executor.address}
        waits = {"drain_accept_window_s": 0, "lease_ttl_s": 2}
        options = {"listen": "127.0.0.1:0", "metrics_listen": "", "health_listen": "127.0.0.1:0"}
        router = Router(RouterConfig(**{**options, **addresses, **waits, **config}))
        await router.start()
        try:
            yield router
        finally:
            await router.close()
            await executor.stop()


async def is_ready(router: Router) -> bool:
    return await until(lambda: is_serving(f"127.0.0.1:{router.health_port}", SERVICE), 20)


async def test_tls_outside_and_mutual_tls_inside(source: str, authority: Authority, tmp_path: Path):
    internal, server = authority.issue("internal"), authority.issue("server")
    public = {"tls_certificate": server.certificate, "tls_key": server.key}
    async with stack(source, internal, **internal.internal, **public) as router:
        assert await is_ready(router)
        address = f"127.0.0.1:{router.port}"
        async with AsyncClient(address, tls_ca=server.ca) as client:
            assert (await client.generate("hi?", max_tokens=3)).usage.generated_tokens == 3
        with Client(address, tls_ca=server.ca) as client:
            models = await asyncio.to_thread(client.models)
            assert [model.name for model in models] == ["scripted"]
        other_ca = Authority(tmp_path / "other").issue("server").ca
        for security in ({}, {"tls": True}, {"tls_ca": other_ca}):
            await assert_is_refused(address, **security)


async def test_clients_need_a_certificate_where_the_router_asks_for_one(
    source: str, authority: Authority, tmp_path: Path
):
    internal, server, mine = authority.issue("internal"), authority.issue("server"), authority.issue("client")
    public = {"tls_certificate": server.certificate, "tls_key": server.key, "tls_client_ca": server.ca}
    async with stack(source, internal, **internal.internal, **public) as router:
        assert await is_ready(router)
        address = f"127.0.0.1:{router.port}"
        own = {"tls_certificate": mine.certificate, "tls_key": mine.key}
        async with AsyncClient(address, tls_ca=server.ca, **own) as client:
            assert (await client.generate("hi?", max_tokens=3)).usage.generated_tokens == 3
        await assert_is_refused(address, tls_ca=server.ca)
        foreign = Authority(tmp_path / "other").issue("client")
        await assert_is_refused(address, tls_ca=server.ca, tls_certificate=foreign.certificate, tls_key=foreign.key)


async def test_a_router_without_the_internal_certificate_never_serves(source: str, authority: Authority):
    async with stack(source, authority.issue("internal"), recovery_grace_s=0) as router:
        assert not await until(lambda: is_serving(f"127.0.0.1:{router.health_port}", SERVICE), 1)


async def assert_is_refused(address: str, **security: Any) -> None:
    async with AsyncClient(address, retry=None, timeout_s=5, **security) as client:
        with pytest.raises(OctavoError) as raised:
            await client.models()
    assert raised.value.code in (Code.UNAVAILABLE, Code.DEADLINE_EXCEEDED)
