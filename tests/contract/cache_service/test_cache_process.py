"""The whole process with real executors (processes that only register): starts, deaths, signals, what is left."""

import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from octavo.rpc import CHANNEL_OPTIONS, error_of_call
from octavo.v1 import cache_pb2, cache_pb2_grpc
from tests.property.cache_service.cache_drivers import geometry_message, kv_bytes_of

SERVICE = "octavo.v1.BlockManagerService"


@pytest.fixture
def executor() -> Iterator["subprocess.Popen[bytes]"]:
    """A process that stands for an executor: the cache service watches its pid."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.communicate()


class CacheProcess:
    """A cache service on a Unix socket."""

    def __init__(self, directory: Path) -> None:
        self.address = f"unix:{directory}/cache.sock"
        command = [sys.executable, "-m", "cache_service", "--listen", self.address, "--metrics-listen", "127.0.0.1:0"]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self.channel = grpc.insecure_channel(self.address, options=CHANNEL_OPTIONS)
        self.stub = cache_pb2_grpc.BlockManagerServiceStub(self.channel)
        self._wait_until_serving()

    def _wait_until_serving(self) -> None:
        health = health_pb2_grpc.HealthStub(self.channel)
        answer = health.Check(health_pb2.HealthCheckRequest(service=SERVICE), wait_for_ready=True, timeout=30)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING

    def register(self, executor_id: str, pid: int, executor_epoch: int = 0) -> cache_pb2.RegisterExecutorResponse:
        request = cache_pb2.RegisterExecutorRequest(
            executor_id=executor_id,
            executor_epoch=executor_epoch,
            pid=pid,
            arena_id="cpu:9",
            geometry=geometry_message(4, "int8"),  # with scales, which a successor must find again too
            kv_bytes=kv_bytes_of(8, 4, "int8"),
        )
        return self.stub.RegisterExecutor(request, timeout=30)

    def num_executors(self) -> int:
        return self.stub.GetStats(cache_pb2.GetStatsRequest(), timeout=10).num_executors

    def end(self, number: int) -> int:
        self.channel.close()
        self.process.send_signal(number)
        self.process.communicate(timeout=30)
        return self.process.returncode


@contextmanager
def held(path: str) -> Iterator[None]:
    """As a process holds it that maps it: other cache services that start on this machine leave it alone."""
    with open(path) as segment:
        fcntl.flock(segment, fcntl.LOCK_SH)
        yield


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[CacheProcess]:
    started = CacheProcess(tmp_path)
    yield started
    if started.process.poll() is None:
        started.end(signal.SIGKILL)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_in_order_and_takes_its_arenas_away(
    cache: CacheProcess, executor: "subprocess.Popen[bytes]", number: int
) -> None:
    """Field failure 37, the cache service's part."""
    path = cache.register("e", executor.pid).arena.posix.path
    assert os.stat(path).st_mode & 0o777 == 0o600
    assert cache.end(number) == 0
    assert not Path(path).exists()


def test_an_epoch_ends_when_its_process_is_dead_and_not_before(
    cache: CacheProcess, executor: "subprocess.Popen[bytes]"
) -> None:
    first = cache.register("e", executor.pid)
    executor.send_signal(signal.SIGSTOP)  # a stopped process may wake and write
    with pytest.raises(grpc.RpcError) as refused:
        cache.register("e", os.getpid())
    assert error_of_call(refused.value).reason == "EXECUTOR_ALIVE"
    executor.kill()
    deadline = time.monotonic() + 10
    while cache.num_executors() and time.monotonic() < deadline:
        time.sleep(0.01)
    second = cache.register("e", os.getpid())
    assert second.executor_epoch > first.executor_epoch
    assert second.arena.posix.path == first.arena.posix.path, "the arena outlives the executor"


def test_the_successor_of_a_killed_cache_service_goes_on_with_its_segment(
    cache: CacheProcess, executor: "subprocess.Popen[bytes]", tmp_path: Path
) -> None:
    """Field failure 38: nothing new in /dev/shm, the executor keeps mapping and epoch, and its death is still heard."""
    registered = cache.register("e", executor.pid)
    lease = cache.stub.OpenLease(cache_pb2.OpenLeaseRequest(client_id="router"), timeout=10)
    path = registered.arena.posix.path
    with held(path):
        cache.end(signal.SIGKILL)
        os.unlink(tmp_path / "cache.sock")
        successor = CacheProcess(tmp_path)
    assert successor.register("e", executor.pid, executor_epoch=registered.executor_epoch) == registered
    with pytest.raises(grpc.RpcError) as refused:
        successor.stub.KeepLeaseAlive(cache_pb2.KeepLeaseAliveRequest(lease_id=lease.lease_id), timeout=10)
    assert error_of_call(refused.value).reason == "RECONCILE"
    header = cache_pb2.LeaseHeader(lease_id=lease.lease_id, sequence_number=1)
    successor.stub.Reconcile(cache_pb2.ReconcileRequest(header=header), timeout=10)
    [stats] = successor.stub.GetStats(cache_pb2.GetStatsRequest(self_check=True), timeout=10).arenas
    assert (stats.free_blocks, list(stats.violations)) == (7, [])
    executor.kill()
    deadline = time.monotonic() + 10
    while successor.num_executors() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert successor.num_executors() == 0
    assert successor.end(signal.SIGTERM) == 0
    assert not Path(path).exists()


def test_an_executor_that_died_between_two_cache_services_is_known_to_be_dead(
    cache: CacheProcess, executor: "subprocess.Popen[bytes]", tmp_path: Path
) -> None:
    registered = cache.register("e", executor.pid)
    with held(registered.arena.posix.path):
        cache.end(signal.SIGKILL)
        executor.kill()
        executor.wait()
        os.unlink(tmp_path / "cache.sock")
        successor = CacheProcess(tmp_path)
    assert successor.num_executors() == 0
    again = successor.register("e", os.getpid())
    assert again.executor_epoch > registered.executor_epoch
    assert again.arena == registered.arena
    assert successor.end(signal.SIGTERM) == 0


def test_a_cache_service_of_another_address_inherits_nothing_and_takes_away_what_nobody_holds(
    cache: CacheProcess, executor: "subprocess.Popen[bytes]", tmp_path: Path
) -> None:
    """Field failure 38: nothing of a killed owner stays once nobody holds it."""
    path = cache.register("e", executor.pid).arena.posix.path
    cache.end(signal.SIGKILL)
    assert Path(path).exists()
    (tmp_path / "other").mkdir()
    other = CacheProcess(tmp_path / "other")
    assert not Path(path).exists()
    assert not other.stub.GetStats(cache_pb2.GetStatsRequest(), timeout=10).arenas
    assert other.end(signal.SIGTERM) == 0


def test_an_arena_that_does_not_fit_is_refused_with_the_numbers(
    cache: CacheProcess, executor: "subprocess.Popen[bytes]"
) -> None:
    """Field failure 38: and the cache service serves on."""
    request = cache_pb2.RegisterExecutorRequest(
        executor_id="e", pid=executor.pid, arena_id="cpu:9", geometry=geometry_message(4), kv_bytes=1 << 39
    )
    with pytest.raises(grpc.RpcError) as refused:
        cache.stub.RegisterExecutor(request, timeout=30)
    error = error_of_call(refused.value)
    assert (refused.value.code(), error.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "ARENA_TOO_LARGE")
    assert int(error.metadata["needed_bytes"]) > int(error.metadata["free_bytes"])
    assert cache.register("e", executor.pid).arena.num_blocks == 8


def test_an_address_that_is_taken_is_one_clear_line(cache: CacheProcess) -> None:
    command = [sys.executable, "-m", "cache_service", "--listen", "127.0.0.1:1x", "--metrics-listen", "127.0.0.1:0"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 2
    assert "octavo cache-service: cannot listen on 127.0.0.1:1x" in ended.stderr
    assert "Traceback" not in ended.stderr
