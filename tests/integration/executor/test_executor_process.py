"""The executor beside a real cache service: start, a step through the shared arena, death, signals, exit codes."""

import asyncio
import logging
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from executor.__main__ import main
from octavo.rpc import error_of_call, is_serving, open_channel
from octavo.v1 import cache_pb2, cache_pb2_grpc, executor_pb2_grpc
from octavo.v1 import executor_pb2 as pb
from tests.tiny_models import save_tiny_llama

PROMPT = [5, 6, 7, 8, 9, 10]
START_S = 90.0


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("model"))


@contextmanager
def process(*command: str, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as output:
        running = subprocess.Popen([sys.executable, "-m", *command], stdout=output, stderr=subprocess.STDOUT)
    try:
        yield running
    finally:
        running.kill()
        running.wait()


@pytest.fixture
def cache(tmp_path) -> Iterator[str]:
    address = f"unix:{tmp_path}/cache.sock"
    with process("cache_service", f"--listen={address}", "--metrics-listen=", log=tmp_path / "cache.log") as running:
        yield address
        running.send_signal(signal.SIGTERM)
        assert running.wait(20) == 0


def executor(folder: Path, cache: str, model: Path | str, *options: str):
    command = ["executor", f"--listen=unix:{folder}/executor.sock", "--metrics-listen=", f"--cache-service={cache}"]
    command += [f"--model={model}", "--threads=1", "--kv-memory-mib=1", "--drain-accept-window-s=0", *options]
    return process(*command, log=folder / "executor.log")


def wait_for(condition, folder: Path) -> None:
    deadline = time.monotonic() + START_S
    while not condition():
        assert time.monotonic() < deadline, (folder / "executor.log").read_text()
        time.sleep(0.05)


def serves(folder: Path) -> bool:
    return asyncio.run(is_serving(f"unix:{folder}/executor.sock", "octavo.v1.ExecutorService"))


async def one_step(folder: Path, cache: str) -> tuple[pb.StepResult, pb.GetExecutorInfoResponse]:
    """Through a lease, blocks of the cache service, and the arena."""
    async with open_channel(cache) as cache_channel, open_channel(f"unix:{folder}/executor.sock") as channel:
        blocks = cache_pb2_grpc.BlockManagerServiceStub(cache_channel)
        steps = executor_pb2_grpc.ExecutorServiceStub(channel)
        info = await steps.GetExecutorInfo(pb.GetExecutorInfoRequest())
        lease = await blocks.OpenLease(cache_pb2.OpenLeaseRequest(client_id="test"))
        allocation = cache_pb2.SequenceAllocation(sequence_id=1, token_ids=PROMPT)
        header = cache_pb2.LeaseHeader(lease_id=lease.lease_id, sequence_number=1)
        allocated = await blocks.AllocateSequences(
            cache_pb2.AllocateSequencesRequest(header=header, arena_id=info.arena_id, allocations=[allocation])
        )
        start = pb.RowStart(slot=0, token_ids=PROMPT, tables=allocated.sequences[0].tables)
        step = pb.Step(step_id=1, started_rows=[start], slots=[0], start_positions=[0], num_tokens=[len(PROMPT)])
        opening = pb.Open(router_id="test", router_epoch=lease.client_epoch)
        response = await steps.ExecuteStep(pb.ExecuteStepRequest(open=opening, step=step))
        with pytest.raises(Exception) as caught:  # noqa: PT011
            await steps.ExecuteStep(pb.ExecuteStepRequest(open=pb.Open(router_id="nobody", router_epoch=1), step=step))
        assert error_of_call(caught.value).reason == "LEASE_EXPIRED"
        await blocks.CloseLease(cache_pb2.CloseLeaseRequest(lease_id=lease.lease_id))
    return response.result, info


def arenas_of(running: subprocess.Popen[bytes]) -> set[str]:
    maps = Path(f"/proc/{running.pid}/maps").read_text().splitlines()
    return {line.split()[-1] for line in maps if "/dev/shm/octavo" in line}


@pytest.mark.long  # make test has kills of a supervised executor, and spares that take over
def test_a_killed_executor_leaves_the_arena_to_its_successor_which_drains(tmp_path, cache, model):
    """Field failure 38: an attacher that dies by SIGKILL takes nothing with it, and the next one is a higher epoch."""
    with executor(tmp_path, cache, model, "--no-verify-model") as running:
        wait_for(lambda: serves(tmp_path), tmp_path)
        first, before = asyncio.run(one_step(tmp_path, cache))
        arena = arenas_of(running)
        running.send_signal(signal.SIGKILL)
    with executor(tmp_path, cache, model, "--session-timeout-s=0") as running:
        wait_for(lambda: serves(tmp_path), tmp_path)
        second, after = asyncio.run(one_step(tmp_path, cache))
        assert arenas_of(running) == arena != set()
        running.send_signal(signal.SIGTERM)
        assert running.wait(20) == 0
    assert list(first.token_ids) == list(second.token_ids) != []
    assert after.executor_epoch > before.executor_epoch
    log = (tmp_path / "executor.log").read_text()
    for word in ("device cpu", "attention cpu", "weights float32", "1 threads", "blocks of 16 tokens", "verified"):
        assert word in log
    assert "Traceback" not in log


@pytest.mark.long
def test_it_waits_for_the_cache_service_and_a_signal_ends_the_wait(tmp_path, model):
    """Field failure 37: SIGTERM before it serves."""
    with executor(tmp_path, f"unix:{tmp_path}/nobody.sock", model) as running:
        wait_for(lambda: "waiting for the cache service" in (tmp_path / "executor.log").read_text(), tmp_path)
        assert not serves(tmp_path)
        running.send_signal(signal.SIGTERM)
        assert running.wait(10) == 0


# ------------------------------------------------------------------------------------------ exit codes, in this process


@pytest.fixture
def _logging_as_before() -> Iterator[None]:
    """`main` takes the root logger over."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.captureWarnings(False)


@pytest.mark.usefixtures("_logging_as_before")
@pytest.mark.parametrize(
    ("options", "code", "text"),
    [
        (("--model=/no/such/model",), 2, "there is no such file"),
        (("--attention=triton",), 2, "is not available on cpu; available: torch, cpu, triton-interpret"),
        (("--listen=unix:/no/such/folder/socket",), 2, "cannot listen on unix:/no/such/folder/socket"),
        ((), 1, "nobody.sock"),
    ],
)
def test_what_cannot_run_is_said_in_one_line(tmp_path, model, capsys, options, code, text):
    fixed = (f"--listen=unix:{tmp_path}/executor.sock", "--metrics-listen=", f"--model={model}", "--threads=1")
    fixed += (f"--cache-service=unix:{tmp_path}/nobody.sock", "--register-timeout-s=0.5", "--log-level=error")
    assert main([*fixed, *options]) == code
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("octavo executor: ")
    assert text in lines[0]


@pytest.mark.usefixtures("_logging_as_before")
def test_an_option_out_of_range_is_refused(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--max-rows=0"])
    assert caught.value.code == 2
    assert "--max-rows" in capsys.readouterr().err
