"""nginx, Envoy and grpcurl against running routers: what they leave as it is, and restarts that lose nothing."""

import json
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

import octavo
from octavo.rpc import PUSHBACK_KEY
from octavo.v1 import inference_pb2, inference_pb2_grpc
from tests.alerts.prometheus import until
from tests.engines import RunningEngine, running_engine
from tests.proxies.calls import asked, calls_without_end
from tests.proxies.proxies import Proxy, RouterProcess, is_healthy, program, running_proxy
from tests.tiny_models import save_tiny_llama

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]
LONG = 400  # tokens


@dataclass
class Front:
    """A proxy, and the router that serves behind it; `other` is stopped."""

    proxy: Proxy
    router: RouterProcess
    other: RouterProcess
    stub: inference_pb2_grpc.InferenceServiceStub


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningEngine]:
    model = save_tiny_llama(tmp_path_factory.mktemp("model"))
    with running_engine(str(model), "--executor.threads=1", "--executor.kv-memory-mib=16") as engine:
        yield engine


@pytest.fixture(scope="module", params=["nginx", "envoy"])
def front(
    request: pytest.FixtureRequest, engine: RunningEngine, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Front]:
    if program(request.param) is None:
        pytest.skip(f"no {request.param}; make proxies-long installs Envoy, and Debian has nginx-light")
    folder = tmp_path_factory.mktemp(request.param)
    options = ("--max-running-requests=8", "--max-queued-requests=0")
    routers = RouterProcess(engine, folder, *options), RouterProcess(engine, folder, *options)
    try:
        routers[0].start()
        with running_proxy(request.param, folder, routers) as proxy, grpc.insecure_channel(proxy.address) as channel:
            yield Front(proxy, *routers, inference_pb2_grpc.InferenceServiceStub(channel))
    finally:
        for router in routers:
            router.put_away()


def test_streams_are_not_buffered(front: Front) -> None:
    began, arrivals = time.monotonic(), []
    for _ in front.stub.GenerateStream(asked(inference_pb2.GenerateStreamRequest, LONG), timeout=120):
        arrivals.append(time.monotonic() - began)
    assert len(arrivals) > 20
    assert arrivals[1] < arrivals[-1] / 2, "the first tokens are here long before the last"


def test_health_is_that_of_the_router(front: Front) -> None:
    assert is_healthy(front.proxy.address)


def test_a_deadline_reaches_the_router(front: Front) -> None:
    def count() -> float:
        return front.router.metric("octavo_grpc_requests_total", grpc_code="DEADLINE_EXCEEDED")

    before = count()
    with pytest.raises(grpc.RpcError) as error:
        front.stub.Generate(asked(inference_pb2.GenerateRequest, 450), timeout=0.3)
    assert error.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    until(lambda: count() == before + 1, 30, "the router saw the deadline itself")
    assert front.router.metric("octavo_num_requests_running") == 0


def test_a_cancellation_reaches_the_router(front: Front) -> None:
    before = front.router.metric("octavo_grpc_requests_total", grpc_code="CANCELLED")
    call = front.stub.GenerateStream(asked(inference_pb2.GenerateStreamRequest, 450), timeout=120)
    next(iter(call))
    assert front.router.metric("octavo_num_requests_running") == 1
    call.cancel()
    until(
        lambda: front.router.metric("octavo_grpc_requests_total", grpc_code="CANCELLED") == before + 1,
        10,
        "the router heard of it",
    )
    assert front.router.metric("octavo_num_requests_running") == 0


def test_a_full_queue_is_told_with_a_time_and_tried_again(front: Front) -> None:
    """The proxies pass RESOURCE_EXHAUSTED on, with the pushback in the trailers; clients wait and come back."""
    calls = [front.stub.Generate.future(asked(inference_pb2.GenerateRequest, 450), timeout=120) for _ in range(8)]
    until(lambda: front.router.metric("octavo_num_requests_running") == 8, 30, "all rows are taken")
    with pytest.raises(grpc.RpcError) as error:
        front.stub.Generate(asked(inference_pb2.GenerateRequest, 1), timeout=30)
    assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert int(dict(error.value.trailing_metadata())[PUSHBACK_KEY]) > 0
    refused = front.router.metric("octavo_grpc_requests_total", grpc_code="RESOURCE_EXHAUSTED")
    answers: list[int] = []

    def patient() -> None:
        with octavo.Client(front.proxy.address, timeout_s=120) as client:
            answers.append(client.generate([1, 20], max_tokens=3, ignore_eos=True).usage.generated_tokens)

    waiting = threading.Thread(target=patient)
    waiting.start()
    until(
        lambda: front.router.metric("octavo_grpc_requests_total", grpc_code="RESOURCE_EXHAUSTED") > refused,
        30,
        "it was refused once",
    )
    for call in calls:
        call.cancel()
    waiting.join()
    assert answers == [3]


def test_a_router_that_is_not_there_is_a_status_of_grpc(front: Front) -> None:
    front.router.end()
    with pytest.raises(grpc.RpcError) as error:
        front.stub.Generate(asked(inference_pb2.GenerateRequest, 1), timeout=30)
    assert error.value.code() is grpc.StatusCode.UNAVAILABLE, error.value.details()
    front.router.start()
    until(lambda: is_healthy(front.proxy.address), 60, "the proxy has found it again")


def test_a_rolling_restart_loses_no_call(front: Front) -> None:
    """Old and new router overlap, each with its own lease and session; no call fails, none is repeated."""
    old, new = front.router, front.other
    with calls_without_end(front.proxy.address) as load:
        for _ in range(4):
            new.start()
            front.proxy.serve_by(new)
            served = load.num_whole
            until(lambda: load.num_whole > served + 20, 60, "calls go on")  # noqa: B023 (it is used here)
            assert old.end() == 0
            until(lambda: new.metric("octavo_num_requests_running") > 0, 60, "the new one has them")  # noqa: B023
            old, new = new, old
    assert load.lost == []
    assert load.num_whole > 100
    new.start()


@pytest.mark.skipif(program("grpcurl") is None, reason="no grpcurl; make proxies-long installs it")
class TestGrpcurl:
    """A client that knows nothing but reflection, through each proxy."""

    @staticmethod
    def ask(front: Front, *arguments: str, method: str = "") -> "subprocess.CompletedProcess[str]":
        command = [program("grpcurl") or "", "-plaintext", *arguments, front.proxy.address, *method.split()]
        return subprocess.run(command, capture_output=True, text=True, timeout=120)

    def test_lists_what_there_is(self, front: Front) -> None:
        found = self.ask(front, method="list").stdout.split()
        assert {"grpc.health.v1.Health", "octavo.v1.InferenceService"} <= set(found)

    def test_gets_an_answer_and_a_stream(self, front: Front) -> None:
        body = json.dumps({"tokenIds": {"ids": [1, 20]}, "stopping": {"maxTokens": 3, "ignoreEos": True}})
        done = self.ask(front, "-d", body, method="octavo.v1.InferenceService/Generate")
        assert json.loads(done.stdout)["usage"]["generated_tokens"] == 3, done
        stream = self.ask(front, "-d", body, method="octavo.v1.InferenceService/GenerateStream").stdout
        assert '"started"' in stream
        assert '"completed"' in stream

    def test_its_deadline_is_kept(self, front: Front) -> None:
        body = json.dumps({"tokenIds": {"ids": [1, 20]}, "stopping": {"maxTokens": 450, "ignoreEos": True}})
        done = self.ask(front, "-max-time", "0.3", "-d", body, method="octavo.v1.InferenceService/Generate")
        assert done.returncode != 0
        assert "DeadlineExceeded" in done.stderr

    def test_its_health_check(self, front: Front) -> None:
        body = '{"service": "octavo.v1.InferenceService"}'
        assert "SERVING" in self.ask(front, "-d", body, method="grpc.health.v1.Health/Check").stdout


def test_what_the_page_shows_is_what_is_tested() -> None:
    page = (Path(__file__).parents[2] / "docs" / "operations" / "proxies.md").read_text()
    for name in ("nginx.conf", "envoy.yaml"):
        assert f"(proxies/{name})" in page
