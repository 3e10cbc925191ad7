"""Random and broken requests through all three processes: only the statuses of the API's table, and the engine lives.

`make fuzz` sends 100,000; the same in small is part of `make test`. The variables FUZZ_REQUESTS and FUZZ_SEED choose
another number and another series, FUZZ_REPORT a file for the counts.
"""

import asyncio
import json
import math
import os
import threading
import time
from collections import Counter
from collections.abc import Coroutine, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import grpc
import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from octavo.errors import Code, OctavoError
from octavo.rpc import PUSHBACK_KEY, error_of_call, open_channel
from octavo.v1 import inference_pb2 as pb
from octavo.v1 import inference_pb2_grpc
from tests.engines import RunningEngine, router_in_front_of, running_engine
from tests.fuzz_requests import METHODS, MODEL_NAME, Call, calls
from tests.tiny_models import VOCABULARY_SIZE, save_tiny_llama
from tests.workloads import Answer, answer_of, read_stream

BATCH = 64  # requests at once
QUEUE = 24  # places for those that wait, so that some find none
CONTEXT_TOKENS = 40  # what an answer without max_tokens may take
PART = 3_200  # requests of one run of hypothesis
FEW = 320
MANY = 100_000
STATUSES = {
    (Code.INVALID_ARGUMENT, "INVALID_FIELD"),
    (Code.INVALID_ARGUMENT, "INVALID_MESSAGE"),
    (Code.NOT_FOUND, "MODEL_NOT_FOUND"),
    (Code.ALREADY_EXISTS, "REQUEST_ID_LIVE"),
    (Code.ABORTED, "SUPERSEDED"),
    (Code.RESOURCE_EXHAUSTED, "QUEUE_FULL"),
    (Code.FAILED_PRECONDITION, "NEVER_FITS"),
}

T = TypeVar("T")


@dataclass
class Target:
    """A router on a loop of its own, so that it lives while requests are made up."""

    loop: asyncio.AbstractEventLoop
    address: str = ""
    counts: Counter[str] = field(default_factory=Counter)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result()

    async def send(self, batch: list[Call]) -> None:
        """All at once, and every answer checked."""
        async with open_channel(self.address) as channel:
            outcomes = await asyncio.gather(*(_send(channel, call) for call in batch))
        for call, outcome in zip(batch, outcomes, strict=True):
            is_answer = isinstance(outcome, Answer)
            self.counts["OK" if is_answer else f"{outcome.code.name} {outcome.reason}"] += 1
            if is_answer and call.message is not None:
                check_answer(outcome, call.message)

    async def check_alive(self) -> None:
        """Nothing is left of all the requests, and a plain one is answered."""
        async with open_channel(self.address) as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            async with asyncio.timeout(30):
                while _is_busy(await stub.GetLoad(pb.GetLoadRequest())):  # noqa: ASYNC110 (no event says it)
                    await asyncio.sleep(0.05)
            stopping = pb.Stopping(max_tokens=5, ignore_eos=True)
            response = await stub.Generate(pb.GenerateRequest(text="hi", stopping=stopping), timeout=30)
            assert response.usage.generated_tokens == 5


def _is_busy(response: pb.GetLoadResponse) -> bool:
    return any(load.running_requests or load.waiting_requests or load.kv_cache_usage_ratio for load in response.models)


async def _send(channel: grpc.aio.Channel, call: Call) -> Answer | OctavoError:
    path = f"/octavo.v1.InferenceService/{call.method}"
    try:
        if call.method == "Generate":
            unary = channel.unary_unary(path, bytes, pb.GenerateResponse.FromString)
            return answer_of(await unary(call.body, timeout=120))
        stream = channel.unary_stream(path, bytes, pb.GenerateStreamResponse.FromString)
        return await read_stream(stream(call.body, timeout=120))
    except grpc.aio.AioRpcError as error:
        return check_refusal(error, call)


def check_refusal(call_error: grpc.aio.AioRpcError, call: Call) -> OctavoError:
    """A status of the table, with the details that the table promises, and nothing of the prompt."""
    error = error_of_call(call_error)
    assert (error.code, error.reason) in STATUSES, (error, call)
    assert error.message
    if error.reason == "INVALID_FIELD":
        assert error.violations
        assert all(violation.field and violation.description for violation in error.violations)
    elif error.reason == "QUEUE_FULL":
        assert error.retry_after_s
        assert PUSHBACK_KEY in dict(tuple(call_error.trailing_metadata()))
        assert {"queued", "max_queued_requests"} <= error.metadata.keys()
    else:
        wanted = {"MODEL_NOT_FOUND": "served", "REQUEST_ID_LIVE": "request_id", "SUPERSEDED": "request_id"}
        assert wanted.get(error.reason, "") in {"", *error.metadata}
    return error


def check_answer(answer: Answer, message: Any) -> None:
    """As many answers as were asked for, none longer than asked for, of ids that there are. A search may find fewer."""
    num_found = len(answer.choices) if message.sampling.HasField("beam") and answer.choices else message.sampling.n or 1
    assert num_found <= (message.sampling.n or 1)
    assert sorted(answer.choices) == list(range(num_found))
    assert not message.sampling.HasField("seed") or answer.seed == message.sampling.seed
    num_echoed = answer.usage.prompt_tokens if message.output.echo else 0
    for shown in answer.choices.values():
        assert all(0 <= token_id < VOCABULARY_SIZE for token_id in shown.token_ids)
        if message.stopping.HasField("max_tokens"):
            assert len(shown.token_ids) - num_echoed <= message.stopping.max_tokens


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningEngine]:
    folder = save_tiny_llama(tmp_path_factory.mktemp("model"), max_position_embeddings=CONTEXT_TOKENS)
    options = ("--executor.threads=1", "--executor.kv-memory-mib=1", f"--executor.model-name={MODEL_NAME}")
    with running_engine(str(folder), *options) as engine:
        yield engine


@pytest.fixture
def target(engine: RunningEngine) -> Iterator[Target]:
    """Closed afterwards, when all blocks are free or cached and nobody holds a sequence."""
    target = Target(asyncio.new_event_loop())
    thread = threading.Thread(target=target.loop.run_forever)
    thread.start()
    resources = AsyncExitStack()
    try:
        router = target.run(
            resources.enter_async_context(
                router_in_front_of(engine, max_queued_requests=QUEUE, max_running_requests=32, lease_ttl_s=60)
            )
        )
        target.address = f"127.0.0.1:{router.port}"
        yield target
        target.run(resources.aclose())
    finally:
        target.loop.call_soon_threadsafe(target.loop.stop)
        thread.join()
        target.loop.close()


def fuzz(target: Target, num_requests: int, series: int) -> None:
    """Requests in batches, until there are as many; the batch that breaks a rule is shown."""
    began, cpu_began = time.monotonic(), time.process_time()
    part = 0
    while target.counts.total() < num_requests:
        _send_some(target, min(PART, num_requests - target.counts.total()), f"{series}.{part}")
        part += 1
    target.run(target.check_alive())
    report = {
        "requests": target.counts.total(),
        "seed": series,
        "wall_s": round(time.monotonic() - began),
        "cpu_s_client_and_router": round(time.process_time() - cpu_began),
        "statuses": dict(target.counts.most_common()),
    }
    print(json.dumps(report, indent=1))
    if path := os.environ.get("FUZZ_REPORT"):
        Path(path).write_text(json.dumps(report, indent=1) + "\n")


def _send_some(target: Target, num_requests: int, series: str) -> None:
    """Hypothesis remembers all that it draws, so a long run is made of many short ones."""

    @seed(series)
    @settings(
        max_examples=math.ceil(num_requests / BATCH),
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],
        report_multiple_bugs=False,
    )
    @given(st.lists(calls(), min_size=BATCH, max_size=BATCH))
    def send(batch: list[Call]) -> None:
        target.run(target.send(batch))

    send()


def test_a_few_random_requests(target: Target) -> None:
    """Everything that the table of statuses promises is met, and answers beside it."""
    fuzz(target, FEW, series=1)
    assert {name.partition(" ")[0] for name in target.counts} >= {"OK", "INVALID_ARGUMENT", "FAILED_PRECONDITION"}
    assert METHODS.keys() == {"Generate", "GenerateStream"}


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_many_random_requests(target: Target) -> None:
    fuzz(target, int(os.environ.get("FUZZ_REQUESTS", MANY)), int(os.environ.get("FUZZ_SEED", "1")))
