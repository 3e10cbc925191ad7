"""Clients whose connection breaks after any message: the answer is that of an unbroken call, event for event.

Between client and router stands a relay that loses the connection as often as the test says; the router is real. What a
client does with errors, pauses and deadlines is in `tests/contract/octavo/test_clients.py`.
"""

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from itertools import chain, repeat
from typing import Any

import grpc
import pytest

import octavo
from octavo.errors import Code, OctavoError
from octavo.results import Completed, Delta, Event, PromptLogprobs
from octavo.rpc import error_of_call, start_server
from octavo.v1 import inference_pb2, inference_pb2_grpc
from tests.fakes import saying
from tests.stacks import Stack, running_stack

TEXT = "a\N{GRINNING FACE}END it"
RETRY = octavo.RetryPolicy(first_pause_s=0.001, max_pause_s=0.001)
LOST = OctavoError(Code.UNAVAILABLE, "LOST", "the connection is lost")


class Relay(inference_pb2_grpc.InferenceServiceServicer):
    """Hands calls on to the router, and loses each after as many messages as `cuts` says next.

    Where it `abandons`, the router is told that the caller left; else it takes it for there until it is superseded.
    """

    def __init__(self, stub: inference_pb2_grpc.InferenceServiceStub) -> None:
        self.cuts: Iterator[int] = repeat(1 << 30)
        self.abandons = True
        self.num_cut = 0
        self._stub = stub
        self._kept: list[Any] = []

    async def GenerateStream(self, request: Any, context: Any) -> AsyncIterator[Any]:
        num_left = next(self.cuts)
        call = self._stub.GenerateStream(request, timeout=60)
        try:
            async for response in call:
                if not num_left:
                    break
                num_left -= 1
                yield response
            else:
                return
        except grpc.aio.AioRpcError as error:
            raise error_of_call(error) from error
        self.num_cut += 1
        self._kept.append(call)
        if self.abandons:
            call.cancel()
        raise LOST


@asynccontextmanager
async def relaying(stack: Stack) -> AsyncIterator[tuple[Relay, octavo.AsyncClient]]:
    relay = Relay(stack.stub)

    def add(server: Any) -> None:
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(relay, server)

    name = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"].full_name
    parts = await start_server("127.0.0.1:0", [(name, add)])
    await parts.set_serving(True)
    try:
        async with octavo.AsyncClient(f"127.0.0.1:{parts.port}", retry=RETRY, timeout_s=60) as client:
            yield relay, client
    finally:
        await parts.stop(None)


def joined(events: Sequence[Event]) -> list[Any]:
    """Neighbours of a kind as one, since how many come together is a matter of time; without times."""
    found: list[Any] = []
    for event in events:
        last = found[-1] if found else None
        if isinstance(event, Completed):
            found.append(event.usage)
        elif isinstance(event, Delta):
            place = [i for i, other in enumerate(found) if isinstance(other, Delta) and other.index == event.index]
            if place:
                found[place[0]] = plus(found[place[0]], event)
            else:
                found.append(event)
        elif isinstance(event, PromptLogprobs) and isinstance(last, PromptLogprobs):
            assert event.token_offset == last.token_offset + len(last.logprobs)
            found[-1] = PromptLogprobs(last.token_offset, last.logprobs + event.logprobs)
        else:
            found.append(event)
    return sorted(found, key=repr)


def plus(first: Delta, second: Delta) -> Delta:
    assert not (first.token_ids and second.token_ids) or second.token_offset == len(first.token_ids)
    return Delta(
        first.index,
        first.token_offset,
        first.text + second.text,
        first.token_ids + second.token_ids,
        first.logprobs + second.logprobs,
    )


REQUESTS: dict[str, dict[str, Any]] = {
    "stop string over the seam": {"stop": ["D it", "END of"], "logprobs": True},
    "ends inside a character": {"max_tokens": 4},
    "no token ids": {"token_ids": False, "stop": ["END of"]},
    "three answers, no seed": {"n": 3, "temperature": 1.0, "max_tokens": 6, "logprobs": True, "top_logprobs": 2},
    "echo and scores of the prompt": {
        "n": 2,
        "temperature": 1.0,
        "echo": True,
        "prompt_logprobs": True,
        "max_tokens": 6,
    },
    "the best of three": {"n": 2, "best_of": 3, "temperature": 1.0, "max_tokens": 6},
    "a constraint": {"regex": "a.{4} it"},
}


@pytest.mark.parametrize("options", REQUESTS.values(), ids=REQUESTS)
async def test_a_break_after_any_message_shows_nowhere(source: str, options: dict[str, Any]) -> None:
    """Once after each message, and then, with the caller still there for the router, after every few."""
    draws = bool(options.get("temperature"))
    async with running_stack(source, saying(TEXT), draws=draws, config={"max_tokens_per_step": 5}) as stack:
        async with relaying(stack) as (relay, client):

            async def ask() -> list[Event]:
                return [event async for event in client.stream("go on?", request_id="r", bypass_cache=True, **options)]

            whole = joined(await ask())
            num_messages = 0
            while await cut_once(relay, num_messages, ask, whole):
                num_messages += 1
            assert num_messages > 3
            # With several answers more comes before the first new token: echoes, scores, ends of those that had ended.
            relay.cuts, relay.abandons, before = repeat(8 if "n" in options else 3), False, relay.num_cut
            if "best_of" not in options:  # of that nothing is resumed: three messages never are enough
                assert joined(await ask()) == whole
                assert relay.num_cut > before + 1
        await stack.settle()


async def cut_once(relay: Relay, count: int, ask: Any, whole: list[Any]) -> bool:
    """Whether there was a message more to lose."""
    relay.cuts, before = chain([count], repeat(1 << 30)), relay.num_cut
    assert joined(await ask()) == whole, count
    return relay.num_cut > before
