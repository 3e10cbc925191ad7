"""Channels and servers with TLS: who is let in, what health probes see, and certificates that change meanwhile."""

import stat
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from octavo import secure_channel
from octavo.rpc import ServerParts, is_serving, open_channel, start_server
from octavo.tls import TlsFiles, TlsSource
from tests.certificates import Authority, Files
from tests.stacks import until

NAME = "octavo.v1.Nothing"
SERVING = health_pb2.HealthCheckResponse.SERVING


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "tls")


def source_of(files: Files) -> TlsSource:
    return TlsSource(TlsFiles(files.certificate, files.key, files.ca))


def overwrite(files: Files, others: Files) -> None:
    for name in ("certificate", "key", "ca"):
        Path(getattr(files, name)).write_bytes(Path(getattr(others, name)).read_bytes())


async def start(listen: str = "127.0.0.1:0", **options) -> ServerParts:
    parts = await start_server(listen, [(NAME, lambda server: None)], **options)
    await parts.set_serving(True)
    return parts


async def health(channel: grpc.aio.Channel, timeout_s: float = 20) -> int:
    stub = health_pb2_grpc.HealthStub(channel)
    return (await stub.Check(health_pb2.HealthCheckRequest(service=NAME), timeout=timeout_s)).status


async def test_mutual_tls_lets_in_certificates_of_the_ca_alone(authority: Authority, tmp_path: Path):
    parts = await start(tls=source_of(authority.issue("server")))
    address = f"127.0.0.1:{parts.port}"
    async with open_channel(address, source_of(authority.issue("client"))) as channel:
        assert await health(channel) == SERVING
    foreign = Authority(tmp_path / "foreign").issue("client")
    refused = [
        None,
        TlsSource(TlsFiles(ca=authority.issue("server").ca)),
        TlsSource(TlsFiles(foreign.certificate, foreign.key, authority.issue("server").ca)),
        source_of(foreign),
    ]
    for tls in refused:
        async with open_channel(address, tls) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await health(channel)
            assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
    await parts.stop(None)


async def test_a_server_of_another_name_is_not_trusted_unless_it_is_named(authority: Authority):
    parts = await start(tls=source_of(authority.issue("server", "router.octavo.svc")))
    address, client = f"127.0.0.1:{parts.port}", source_of(authority.issue("client"))
    async with open_channel(address, client) as channel:
        with pytest.raises(grpc.aio.AioRpcError):
            await health(channel)
    async with open_channel(address, client, "router.octavo.svc") as channel:
        assert await health(channel) == SERVING
    await parts.stop(None)


async def test_health_alone_is_answered_in_plain_text_where_probes_ask(authority: Authority):
    parts = await start(tls=source_of(authority.issue("server")), health_listen="127.0.0.1:0")
    address = f"127.0.0.1:{parts.health_port}"
    assert await is_serving(address, NAME)
    assert not await is_serving(f"127.0.0.1:{parts.port}", NAME)
    await parts.set_serving(False)
    assert not await is_serving(address, NAME)
    async with open_channel(address) as channel:
        reflection = channel.stream_stream("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo")
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await reflection(iter([b""])).read()
        assert raised.value.code() is grpc.StatusCode.UNIMPLEMENTED
    await parts.stop(None)
    assert not await is_serving(address, NAME)


async def test_a_new_certificate_is_shown_to_the_next_connection(authority: Authority, tmp_path: Path, monkeypatch):
    """Both sides move to another CA while a stream of before goes on."""
    monkeypatch.setattr(secure_channel, "_LOOK_INTERVAL_S", 0)
    server_files, client_files = authority.issue("server"), authority.issue("client")
    parts = await start(tls=source_of(server_files))
    channel = open_channel(f"127.0.0.1:{parts.port}", source_of(client_files))
    watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=NAME))
    assert (await watch.read()).status == SERVING
    new = Authority(tmp_path / "new")
    fresh = {server_files: new.issue("server"), client_files: new.issue("client")}
    old_client = source_of(client_files)
    old_material = old_client.latest()
    monkeypatch.setattr(old_client, "latest", lambda: old_material)
    for files, others in fresh.items():
        overwrite(files, others)
    assert await health(channel) == SERVING  # a new connection: the files of the old CA are gone
    async with open_channel(f"127.0.0.1:{parts.port}", old_client) as late:
        with pytest.raises(grpc.aio.AioRpcError):
            await health(late)
    await parts.set_serving(False)
    assert (await watch.read()).status != SERVING  # the stream of before
    watch.cancel()
    await channel.close()
    await parts.stop(None)


async def test_the_channel_of_before_closes_with_its_last_call(authority: Authority, monkeypatch):
    monkeypatch.setattr(secure_channel, "_LOOK_INTERVAL_S", 0)
    client_files = authority.issue("client")
    parts = await start(tls=source_of(authority.issue("server")))
    channel = open_channel(f"127.0.0.1:{parts.port}", source_of(client_files))
    assert isinstance(channel, secure_channel.SecureChannel)
    watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=NAME))
    await watch.read()
    before = channel.current()
    authority.issue("client")
    assert await health(channel) == SERVING
    assert channel.current() is not before
    assert before.channel.get_state() is not grpc.ChannelConnectivity.SHUTDOWN
    watch.cancel()
    assert await until(lambda: _is_closed(before.channel), 20)
    await channel.close()
    await parts.stop(None)


def _is_closed(channel: grpc.aio.Channel) -> bool:
    try:
        return channel.get_state() is grpc.ChannelConnectivity.SHUTDOWN
    except grpc.aio.UsageError:
        return True


async def test_a_unix_socket_is_private_and_needs_no_tls(authority: Authority, tmp_path: Path):
    sockets = [tmp_path / "api.sock", tmp_path / "health.sock"]
    tls = source_of(authority.issue("server"))
    parts = await start(f"unix:{sockets[0]}", tls=tls, health_listen=f"unix:{sockets[1]}")
    assert [stat.S_IMODE(path.stat().st_mode) for path in sockets] == [0o600, 0o600]
    async with open_channel(f"unix:{sockets[0]}", tls) as channel:
        assert await health(channel) == SERVING
    assert await is_serving(f"unix:{sockets[1]}", NAME)
    await parts.stop(None)
