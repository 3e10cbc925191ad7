"""The arena on a device, between real processes and the real driver: what lives, what dies, what it costs."""

import json
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from typing import Any

import pytest
import torch

from cache_service.device_arena import create_device_arena
from cache_service.geometry import KvGeometry, LayerGeometry
from cache_service.servicer_messages import arena_message
from executor.clients.cache import ArenaGrant, _grant_of
from executor.cuda.arena import CudaArena, map_cuda_arena
from octavo.cuda_driver import load_driver
from octavo.errors import OctavoError
from octavo.v1 import cache_pb2

KV_BYTES = 1 << 30
SLACK_BYTES = 64 << 20  # of the driver's own
GEOMETRY = KvGeometry(16, "bfloat16", (LayerGeometry(8, 128, 128),) * 4)
MAKER = """
import sys
from cache_service.device_arena import create_device_arena
from cache_service.geometry import KvGeometry, LayerGeometry
from cache_service.servicer_messages import arena_message
from octavo.cuda_driver import load_driver
from octavo.v1 import cache_pb2
geometry = KvGeometry(16, "bfloat16", (LayerGeometry(8, 128, 128),) * 4)
arena = create_device_arena("cuda:0", "model", geometry, 1 << 30, driver=load_driver(), sharing=sys.argv[1])
assert "torch" not in sys.modules
grant = cache_pb2.RegisterExecutorResponse(arena=arena_message(arena.description), executor_epoch=1)
print(grant.SerializeToString().hex(), flush=True)
sys.stdin.readline()
arena.close()
"""
HOLDER = """
import sys, torch
from executor.clients.cache import _grant_of
from executor.cuda.arena import map_cuda_arena
from octavo.v1 import cache_pb2
grant = _grant_of(cache_pb2.RegisterExecutorResponse.FromString(bytes.fromhex(sys.argv[1])))
arena = map_cuda_arena(grant.cuda, grant.layout, grant.geometry, 0)
arena.views[3].v[7].fill_(float(sys.argv[2]))
torch.cuda.synchronize()
print("written", flush=True)
sys.stdin.readline()
arena.close()
"""


def start(program: str, *arguments: str) -> tuple["subprocess.Popen[str]", str]:
    """A process that has said its first line."""
    process = subprocess.Popen(
        [sys.executable, "-c", program, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    line = process.stdout.readline().strip()
    assert line, f"it ended with {process.wait()}"
    return process, line


def stop(process: "subprocess.Popen[str]") -> None:
    process.communicate("\n", timeout=60)
    assert process.returncode == 0


def kill(process: "subprocess.Popen[str]") -> None:
    process.kill()
    assert process.wait() == -signal.SIGKILL


def parse(line: str) -> ArenaGrant:
    return _grant_of(cache_pb2.RegisterExecutorResponse.FromString(bytes.fromhex(line)))


def map_here(grant: ArenaGrant) -> CudaArena:
    assert grant.cuda is not None
    return map_cuda_arena(grant.cuda, grant.layout, grant.geometry, 0)


def free_bytes() -> int:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


def wait_for_free(at_least: int) -> int:
    """The driver takes memory back in its own time."""
    deadline_s = time.monotonic() + 20
    while free_bytes() < at_least and time.monotonic() < deadline_s:
        time.sleep(0.1)
    return free_bytes()


@pytest.mark.parametrize("sharing", ["descriptor", "ipc"])
def test_two_processes_see_the_same_bytes_without_a_copy(sharing, device):
    torch.ones(1, device=device)
    maker, line = start(MAKER, sharing)
    before = free_bytes()
    arena = map_here(parse(line))
    assert before - free_bytes() < SLACK_BYTES, "mapping is no copy"
    holder, _ = start(HOLDER, line, "42.0")
    assert (arena.views[3].v[7] == 42.0).all()
    arena.views[0].k[5].fill_(3.0)
    assert (arena.views[0].k[5].sum().item()) == 3.0 * arena.views[0].k[5].numel()
    stop(holder)
    arena.close()
    stop(maker)


def test_the_cache_service_makes_no_context(device):
    torch.ones(1, device=device)
    before = free_bytes()
    maker, _ = start(MAKER, "descriptor")
    taken = before - free_bytes()
    assert taken + SLACK_BYTES >= KV_BYTES
    assert taken < KV_BYTES + SLACK_BYTES, f"{(taken - KV_BYTES) >> 20} MiB more than the arena"
    stop(maker)
    assert before - wait_for_free(before - SLACK_BYTES) < SLACK_BYTES, "all of it came back"


def test_memory_stays_whole_when_its_maker_is_killed(device):
    """Field failure 5: the owner dies while steps run."""
    torch.ones(1, device=device)
    before = free_bytes()
    maker, line = start(MAKER, "descriptor")
    arena = map_here(parse(line))
    arena.views[1].k[9].fill_(5.0)
    kill(maker)
    assert arena.lost_reason() is None
    product = arena.views[1].k[9].flatten().float() @ arena.views[1].k[9].flatten().float()
    assert product.item() == 25.0 * arena.views[1].k[9].numel()
    with pytest.raises(OctavoError, match="nobody answers"):
        map_here(parse(line))
    arena.close()
    assert before - wait_for_free(before - SLACK_BYTES) < SLACK_BYTES, "the last holder gave it back"


def test_the_death_of_a_maker_by_ipc_handle_is_told_at_once(device):
    torch.ones(1, device=device)
    maker, line = start(MAKER, "ipc")
    arena = map_here(parse(line))
    assert arena.lost_reason() is None
    kill(maker)
    assert "goes with it" in (arena.lost_reason() or "")


@pytest.mark.parametrize("ending", [stop, kill])
def test_what_an_executor_wrote_is_there_for_the_next(ending, device):
    maker, line = start(MAKER, "descriptor")
    holder, _ = start(HOLDER, line, "8.5")
    ending(holder)
    arena = map_here(parse(line))
    assert (arena.views[3].v[7] == 8.5).all()
    arena.close()
    stop(maker)


def test_errors_name_what_is_wrong(device):
    driver = load_driver()
    arena = create_device_arena("cuda:0", "model", GEOMETRY, KV_BYTES, driver=driver)
    grant = _grant_of(cache_pb2.RegisterExecutorResponse(arena=arena_message(arena.description), executor_epoch=1))

    def refusal(**changes: Any) -> str:
        memory = type(grant.cuda)(**(asdict(grant.cuda) | changes))
        with pytest.raises(OctavoError) as caught:
            map_cuda_arena(memory, grant.layout, grant.geometry, 0)
        return f"{caught.value.reason}: {caught.value.message}"

    assert refusal(device_uuid="00" * 16).startswith("WRONG_DEVICE")
    assert refusal(memory_id="another").startswith("MEMORY_GONE")
    assert refusal(size_bytes=4096).startswith("ARENA_UNUSABLE")
    arena.close()
    assert refusal().startswith("MEMORY_GONE")
    with pytest.raises(OctavoError, match="more than is free"):
        create_device_arena("cuda:0", "model", GEOMETRY, driver.total_bytes(0) * 2, driver=driver)
    print(json.dumps({"exports_descriptors": driver.exports_descriptors(0)}))
