"""A crowd of clients that do as clients do: read to the end, leave, cancel, or have no time. For soaks and chaos."""

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import grpc

from octavo.errors import Code
from octavo.rpc import error_of_call, open_channel
from octavo.v1 import cache_pb2, cache_pb2_grpc, inference_pb2_grpc
from octavo.v1 import inference_pb2 as pb
from tests.workloads import read_stream

CANCELLED = pb.FinishReason.FINISH_REASON_CANCELLED
# How a client ends its call, and how many of a hundred do.
BEHAVIOURS = {"reads to the end": 55, "leaves": 15, "leaves at once": 5, "cancels by id": 15, "has a deadline": 10}
# What a deadline or a leaving client may see instead: the answer was there before.
FINE = {Code.DEADLINE_EXCEEDED: {"has a deadline"}, Code.CANCELLED: {"leaves", "leaves at once"}}


class Crowd:
    """Clients of one server, drawn from a seed.

    Attributes:
        endings: how often each behaviour met each end.
    """

    def __init__(self, channel: grpc.aio.Channel, seed: int, *, vocabulary_size: int, max_prompt_tokens: int) -> None:
        self._stub = inference_pb2_grpc.InferenceServiceStub(channel)
        self._rng = random.Random(seed)
        self._seed = seed
        self._vocabulary_size = vocabulary_size
        self._max_prompt_tokens = max_prompt_tokens
        self.endings: Counter[tuple[str, str]] = Counter()

    async def run(self, num_streams: int) -> None:
        """All of them at once, to their ends. Raises AssertionError for an end that nobody asked for."""
        names, shares = list(BEHAVIOURS), list(BEHAVIOURS.values())
        requests = [(self._request(number), self._rng.choices(names, shares)[0]) for number in range(num_streams)]
        await asyncio.gather(*(self._client(request, behaviour) for request, behaviour in requests))

    def _request(self, number: int) -> pb.GenerateStreamRequest:
        rng = self._rng
        prompt = [rng.randrange(5, self._vocabulary_size) for _ in range(rng.randint(1, self._max_prompt_tokens))]
        request = pb.GenerateStreamRequest(request_id=f"{self._seed}-{number}", token_ids=pb.TokenIds(ids=prompt))
        request.stopping.max_tokens = rng.choice([1, 5, 20, 60, 120])
        request.stopping.ignore_eos = True
        request.sampling.temperature = rng.choice([0.0, 1.0])
        request.sampling.n = rng.choice([1, 1, 1, 2, 3])
        request.output.logprobs = rng.random() < 0.2
        request.output.prompt_logprobs = rng.random() < 0.1
        if rng.random() < 0.2:
            request.sampling.frequency_penalty = 0.5
        if rng.random() < 0.1:
            request.stopping.ignore_eos = False
            request.constraint.regex = "[a-z]{3,40}"
        return request

    async def _client(self, request: pb.GenerateStreamRequest, behaviour: str) -> None:
        rng = self._rng
        timeout_s = rng.uniform(0.01, 2.0) if behaviour == "has a deadline" else 600.0
        call = self._stub.GenerateStream(request, timeout=timeout_s)
        num_events = 0 if behaviour == "leaves at once" else rng.randint(1, 12)
        try:
            answer = await read_stream(self._events(call, request, behaviour, num_events))
        except asyncio.CancelledError:
            ending = Code.CANCELLED.name  # by this client itself
            assert behaviour in FINE[Code.CANCELLED], behaviour
        except grpc.aio.AioRpcError as error:
            found = error_of_call(error)
            assert behaviour in FINE.get(found.code, ()), (found, behaviour)
            ending = found.code.name
        else:
            reasons = {shown.reason for shown in answer.choices.values()}
            assert CANCELLED not in reasons or behaviour == "cancels by id", behaviour
            ending = "CANCELLED in order" if CANCELLED in reasons else "OK"
        self.endings[behaviour, ending] += 1

    async def _events(
        self, call: Any, request: pb.GenerateStreamRequest, behaviour: str, num_events: int
    ) -> AsyncIterator[pb.GenerateStreamResponse]:
        """The call's events; after so many the client does what it does."""
        if behaviour == "leaves at once":
            await asyncio.sleep(0)
            call.cancel()
        async for event in call:
            yield event
            num_events -= 1
            if num_events == 0 and behaviour == "leaves":
                call.cancel()
            elif num_events == 0 and behaviour == "cancels by id":
                await self._stub.Cancel(pb.CancelRequest(request_id=request.request_id))


async def assert_settled(address: str, cache_service: str, within_s: float = 30.0) -> None:
    """No request is live at the router, no sequence at the cache service; every block is free or cached."""
    unsettled = "nothing was asked"
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(within_s), open_channel(address) as router, open_channel(cache_service) as cache:
            while unsettled:
                unsettled = await _unsettled(router, cache)
                await asyncio.sleep(0.1 if unsettled else 0)
    assert not unsettled, unsettled


async def _unsettled(router: grpc.aio.Channel, cache: grpc.aio.Channel) -> str:
    load = await inference_pb2_grpc.InferenceServiceStub(router).GetLoad(pb.GetLoadRequest())
    if any(each.running_requests or each.waiting_requests or each.kv_cache_usage_ratio for each in load.models):
        return f"the router is busy: {load}"
    response = await cache_pb2_grpc.BlockManagerServiceStub(cache).GetStats(cache_pb2.GetStatsRequest(self_check=True))
    for arena in response.arenas:
        assert not arena.violations, arena.violations
        is_whole = arena.free_blocks + arena.cached_blocks + arena.reserved_blocks == arena.total_blocks
        if arena.num_sequences or not is_whole:
            return f"the cache service holds something: {arena}"
    return ""
