"""The arena on a device, its maker and its holders: who may end how, and what stays (on a stand-in for CUDA)."""

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace

import pytest
import torch
from torch import Tensor

from cache_service import app as cache_app
from cache_service import device_arena
from cache_service.config import CacheServiceConfig
from cache_service.device_arena import DeviceArena, create_device_arena
from cache_service.geometry import KvGeometry, LayerGeometry
from cache_service.servicer_messages import arena_message
from executor import arena as executor_arena
from executor.clients.cache import ArenaGrant, CacheClient, Registration, _grant_of
from executor.cuda.arena import CudaArena, CudaMapping, map_cuda_arena
from octavo.cuda_driver import CudaDriver
from octavo.errors import Code, OctavoError
from octavo.memory_handle import fetch_memory
from octavo.v1 import cache_pb2
from tests.fake_cuda import FakeCuda, Result

GEOMETRY = KvGeometry(4, "float32", (LayerGeometry(2, 8, 8), LayerGeometry(1, 8, 4)))
KV_BYTES = 1 << 20
MAKER = """
import sys
from cache_service.device_arena import create_device_arena
from cache_service.geometry import KvGeometry, LayerGeometry
from cache_service.servicer_messages import arena_message
from octavo.cuda_driver import CudaDriver
from octavo.v1 import cache_pb2
from tests.fake_cuda import FakeCuda
geometry = KvGeometry(4, "float32", (LayerGeometry(2, 8, 8), LayerGeometry(1, 8, 4)))
arena = create_device_arena("cuda:0", "model", geometry, 1 << 20, driver=CudaDriver(FakeCuda()), sharing=sys.argv[1])
grant = cache_pb2.RegisterExecutorResponse(arena=arena_message(arena.description), executor_epoch=1)
print(grant.SerializeToString().hex(), flush=True)
sys.stdin.read()
"""
HOLDER = """
import sys
from octavo.memory_handle import fetch_memory
hold = fetch_memory(sys.argv[1], sys.argv[2])
print("held", flush=True)
sys.stdin.read()
"""


def start(program: str, *arguments: str) -> tuple["subprocess.Popen[str]", str]:
    """A process that has said its first line."""
    process = subprocess.Popen(
        [sys.executable, "-c", program, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


def kill(process: "subprocess.Popen[str]") -> None:
    process.kill()
    assert process.wait() == -signal.SIGKILL


def on_host(mapping: CudaMapping, ordinal: int) -> Tensor:
    """The stand-in's memory is this process's own."""
    interface = mapping.__cuda_array_interface__
    address, read_only = interface["data"]
    assert (interface["typestr"], interface["version"], read_only) == ("|u1", 3, False)
    return torch.frombuffer((ctypes.c_uint8 * interface["shape"][0]).from_address(address), dtype=torch.uint8)


def grant_of(arena: DeviceArena) -> ArenaGrant:
    """As it comes over the wire."""
    return _grant_of(cache_pb2.RegisterExecutorResponse(arena=arena_message(arena.description), executor_epoch=1))


def map_grant(grant: ArenaGrant, binding: FakeCuda, ordinal: int = 0) -> CudaArena:
    assert grant.cuda is not None
    return map_cuda_arena(grant.cuda, grant.layout, grant.geometry, ordinal, driver=CudaDriver(binding), wrap=on_host)


@pytest.fixture
def cuda() -> Iterator[FakeCuda]:
    binding = FakeCuda()
    yield binding
    assert binding.left == {}, "something was not given back"


@pytest.fixture
def arena(cuda: FakeCuda) -> Iterator[DeviceArena]:
    made = create_device_arena("cuda:0", "model", GEOMETRY, KV_BYTES, driver=CudaDriver(cuda))
    yield made
    made.close()


def test_an_arena_is_whole_blocks_from_block_0_on_the_device(arena, cuda):
    description = arena.description
    assert description.layout.data_offset == 0
    assert description.num_blocks == KV_BYTES // description.layout.block_bytes
    assert description.size_bytes >= description.num_blocks * description.layout.block_bytes
    assert (description.path, description.cuda.device_uuid) == ("", "01" * 16)
    assert not cuda.has_context, "the cache service costs no memory of the device"


def test_two_holders_see_the_same_bytes_without_a_copy(arena, cuda):
    first, second = (map_grant(grant_of(arena), cuda) for _ in "12")
    first.views[1].v[3].fill_(7.0)
    assert (second.views[1].v[3] == 7.0).all()
    assert first.blocks.shape == (arena.description.num_blocks, arena.description.layout.block_bytes)
    for each in (first, second):
        each.close()
        each.close()


@pytest.mark.parametrize("sharing", ["descriptor", "ipc"])
def test_an_executor_whose_maker_was_killed(sharing, cuda):
    """Field failure 5: a dead owner. By descriptor the memory stays whole; by IPC handle it is known to be lost."""
    maker, line = start(MAKER, sharing)
    response = cache_pb2.RegisterExecutorResponse.FromString(bytes.fromhex(line))
    arena = map_grant(_grant_of(response), cuda)
    arena.views[0].k[1].fill_(3.0)
    assert arena.lost_reason() is None
    kill(maker)
    if sharing == "descriptor":
        assert arena.lost_reason() is None
        assert (arena.views[0].k[1] == 3.0).all()
    else:
        assert "goes with it" in (arena.lost_reason() or "")
    with pytest.raises(OctavoError, match="nobody answers") as caught:
        map_grant(_grant_of(response), cuda)
    assert (caught.value.code, caught.value.reason) == (Code.FAILED_PRECONDITION, "MEMORY_GONE")
    arena.close()


def test_a_holder_that_is_killed_holds_no_more(arena):
    handle = arena.description.cuda
    holder, line = start(HOLDER, handle.socket, handle.memory_id)
    assert (line, arena.num_holders) == ("held", 1)
    kill(holder)
    assert arena._server.wait_for_holders(timeout_s=60)
    assert arena.num_holders == 0


def test_a_closed_arena_is_handed_out_no_more_and_kept_by_those_that_have_it(arena, cuda):
    grant = grant_of(arena)
    mapped = map_grant(grant, cuda)
    mapped.views[0].v[2].fill_(5.0)
    arena.close()
    arena.close()
    assert (mapped.views[0].v[2] == 5.0).all()
    with pytest.raises(OctavoError, match="nobody answers"):
        map_grant(grant, cuda)
    mapped.close()


async def test_an_executor_registers_for_a_device_and_maps_what_it_is_granted(cuda, monkeypatch, tmp_path):
    """Over gRPC, as the two processes do it."""
    monkeypatch.setattr(cache_app, "load_driver", lambda: CudaDriver(cuda))
    address = f"unix:{tmp_path}/cache.sock"
    config = CacheServiceConfig(listen=address, metrics_listen="", drain_grace_s=0)
    layers = tuple(executor_arena.LayerGeometry(**asdict(layer)) for layer in GEOMETRY.layers)
    geometry = executor_arena.KvGeometry(GEOMETRY.block_size, GEOMETRY.dtype, layers)
    registration = Registration("e", os.getpid(), "cuda:0", "model", geometry, KV_BYTES)
    async with cache_app.running(config, cache_app.outside_of(config)) as app:
        client = CacheClient(address, registration)
        grant, again = await client.register(30), await client.register(30)
        assert (grant.memory_id, grant.geometry) == (again.memory_id, geometry)
        mapped = map_grant(grant, cuda)
        assert mapped.num_blocks == app.service.find_arena("cuda:0").memory.description.num_blocks
        mapped.close()
        await client.close()


class TestIpcHandles:
    """Memory that dies with its maker."""

    def test_where_descriptors_cannot_be_had_ipc_handles_are_used(self, caplog):
        unsaid = FakeCuda(descriptors=False)
        refused = FakeCuda(errors={"cuMemExportToShareableHandle": Result.CUDA_ERROR_NOT_PERMITTED})
        for binding in (unsaid, refused):
            arena = create_device_arena("cuda:0", "model", GEOMETRY, KV_BYTES, driver=CudaDriver(binding))
            mapped = map_grant(grant_of(arena), binding)
            assert "cuIpcOpenMemHandle" in binding.calls
            mapped.close()
            arena.close()
            assert binding.left == {}
        assert "CUDA_ERROR_NOT_PERMITTED" in caplog.text

    def test_a_handle_is_closed_before_the_memory_is_freed(self, cuda):
        arena = create_device_arena("cuda:0", "model", GEOMETRY, KV_BYTES, driver=CudaDriver(cuda), sharing="ipc")
        mapped = map_grant(grant_of(arena), cuda)
        mapped.close()
        arena.close()
        assert cuda.calls.index("cuIpcCloseMemHandle") < cuda.calls.index("cuMemFree")
        assert cuda.calls.count("cuIpcOpenMemHandle") == 1

    def test_memory_that_is_still_used_is_not_freed(self, cuda, monkeypatch, caplog):
        monkeypatch.setattr(device_arena, "_HOLDERS_TIMEOUT_S", 0.05)
        arena = create_device_arena("cuda:0", "model", GEOMETRY, KV_BYTES, driver=CudaDriver(cuda), sharing="ipc")
        mapped = map_grant(grant_of(arena), cuda)
        arena.close()
        assert "cuMemFree" not in cuda.calls
        assert "executors still use the memory" in caplog.text
        mapped.close()
        CudaDriver(cuda).free(next(iter(cuda.plain)))


class TestErrors:
    """Each names what was wrong and what to do, and leaves nothing behind."""

    def test_a_name_that_is_used_again_for_another_memory(self, arena):
        with pytest.raises(OctavoError, match=f"has {arena.description.cuda.memory_id} by now"):
            fetch_memory(arena.description.cuda.socket, "another")
        assert arena._server.wait_for_holders(timeout_s=60)

    def test_another_device_than_the_executors(self, arena):
        other, mine = FakeCuda(uuids=(b"\x02" * 16,)), FakeCuda(uuids=(b"\x02" * 16, b"\x01" * 16))
        for binding, advice in ((other, "does not see that device at all"), (mine, "that is cuda:1 here")):
            with pytest.raises(OctavoError, match=advice) as caught:
                map_grant(grant_of(arena), binding)
            assert caught.value.reason == "WRONG_DEVICE"
            assert binding.left == {}

    def test_another_geometry_than_the_memory_holds(self, arena, cuda):
        grant = grant_of(arena)
        larger = replace(grant, layout=replace(grant.layout, num_blocks=grant.layout.num_blocks * 8))
        with pytest.raises(OctavoError, match="blocks of"):
            map_grant(larger, cuda)
        with pytest.raises(OctavoError, match="were handed out"):
            map_grant(replace(grant, cuda=replace(grant.cuda, size_bytes=4096)), cuda)
        assert {name: number for name, number in cuda.left.items() if name != "allocations"} == {}

    @pytest.mark.parametrize("call", ["cuMemImportFromShareableHandle", "cuMemMap", "cuDevicePrimaryCtxRetain"])
    def test_what_the_driver_refuses_while_mapping(self, call, arena, cuda):
        cuda.errors[call] = Result.CUDA_ERROR_NOT_SUPPORTED
        with pytest.raises(OctavoError, match=f"{call} failed with CUDA_ERROR_NOT_SUPPORTED") as caught:
            map_grant(grant_of(arena), cuda)
        assert caught.value.reason == "ARENA_UNUSABLE"
        assert arena._server.wait_for_holders(timeout_s=60)

    @pytest.mark.parametrize("arena_id", ["cuda", "cuda:1", "cuda:x"])
    def test_a_device_that_is_not_there(self, arena_id, cuda):
        with pytest.raises(OctavoError, match="sees 1 devices") as caught:
            create_device_arena(arena_id, "model", GEOMETRY, KV_BYTES, driver=CudaDriver(cuda))
        assert caught.value.violations[0].field == "arena_id"

    def test_more_bytes_than_the_device_has(self, cuda):
        with pytest.raises(OctavoError, match="more than is free") as caught:
            create_device_arena("cuda:0", "model", GEOMETRY, 2 << 30, driver=CudaDriver(cuda))
        assert (caught.value.code, caught.value.reason) == (Code.RESOURCE_EXHAUSTED, "ARENA_TOO_LARGE")

    def test_what_the_driver_refuses_while_making(self, cuda):
        cuda.errors["cuMemCreate"] = Result.CUDA_ERROR_INVALID_VALUE
        with pytest.raises(OctavoError, match="cuMemCreate failed") as caught:
            create_device_arena("cuda:0", "model", GEOMETRY, KV_BYTES, driver=CudaDriver(cuda))
        assert caught.value.reason == "CUDA_FAILED"

    def test_processes_of_other_users_are_refused(self, arena, monkeypatch):
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
        with pytest.raises(OctavoError, match="its own user alone"):
            fetch_memory(arena.description.cuda.socket, arena.description.cuda.memory_id)
