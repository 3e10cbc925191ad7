"""Calls without end through a channel, none of them repeated, and what came of them."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc

from octavo.v1 import inference_pb2, inference_pb2_grpc

CALL_S = 120.0


def asked(kind: Any, max_tokens: int, first: int = 20, **fields: Any) -> Any:
    """A request whose answer has exactly as many tokens."""
    return kind(token_ids={"ids": [1, first]}, stopping={"max_tokens": max_tokens, "ignore_eos": True}, **fields)


@dataclass
class Load:
    """Counts of many threads."""

    num_whole: int = 0
    lost: list[str] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def count(self, problem: str | None) -> None:
        with self._lock:
            self.num_whole += problem is None
            self.lost += [problem] if problem is not None else []


@contextmanager
def calls_without_end(address: str, num_callers: int = 6) -> Iterator[Load]:
    """Half of the callers stream. Each has a connection of its own; all have ended when the context has."""
    load, is_over = Load(), threading.Event()
    callers = [threading.Thread(target=_call, args=(address, index, load, is_over)) for index in range(num_callers)]
    for caller in callers:
        caller.start()
    try:
        yield load
    finally:
        is_over.set()
        for caller in callers:
            caller.join()


def _call(address: str, index: int, load: Load, is_over: threading.Event) -> None:
    # No retries: neither the client's policy nor gRPC's own may hide a loss.
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0)]
    with grpc.insecure_channel(address, options=options) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        num_calls = 0
        while not is_over.is_set():
            num_calls += 1
            try:
                load.count(_one_call(stub, index, 10 + num_calls % 60))
            except grpc.RpcError as error:
                load.count(f"{error.code().name}: {error.details()}")  # type: ignore[attr-defined]


def _one_call(stub: Any, index: int, num_tokens: int) -> str | None:
    if index % 2:
        answer = stub.Generate(asked(inference_pb2.GenerateRequest, num_tokens, 20 + index), timeout=CALL_S)
        found = answer.usage.generated_tokens
    else:
        events = list(stub.GenerateStream(asked(inference_pb2.GenerateStreamRequest, num_tokens), timeout=CALL_S))
        if events[-1].WhichOneof("event") != "completed":
            return f"a stream ended with {events[-1].WhichOneof('event')}"
        found = sum(len(event.delta.token_ids) for event in events)
    return None if found == num_tokens else f"{found} tokens instead of {num_tokens}"
