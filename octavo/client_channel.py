"""How a client connects: name resolution, balancing, health, and which calls are sent again.

gRPC does all of it from a service config, for both clients alike. A stream is only sent again before its first event.
"""

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import grpc

from octavo.messages import with_target
from octavo.rpc import CHANNEL_OPTIONS, error_of_call

SERVICE = "octavo.v1.InferenceService"
MAX_RETRIES = 4  # gRPC makes at most five attempts


def target_of(address: str) -> str:
    """What gRPC connects to: a bare `host:port` is looked up again whenever connections are lost."""
    return (
        address if ":/" in address or address.startswith(("unix:", "dns:", "ipv4:", "ipv6:")) else f"dns:///{address}"
    )


def channel_options(retries: int) -> list[tuple[str, Any]]:
    """Options of a channel that retries a refused call up to `retries` times.

    UNAVAILABLE and RESOURCE_EXHAUSTED are retried, after the time that the server asks for where it asks for one
    (`grpc-retry-pushback-ms`), else with exponential backoff.

    Raises:
        ValueError: retries not in [0, 4].
    """
    if not 0 <= retries <= MAX_RETRIES:
        raise ValueError(f"retries={retries}: choose 0 to {MAX_RETRIES}")
    return [
        *CHANNEL_OPTIONS,
        ("grpc.enable_retries", 1 if retries else 0),
        ("grpc.service_config", json.dumps(_service_config(retries))),
    ]


def _service_config(retries: int) -> dict[str, Any]:
    method: dict[str, Any] = {"name": [{"service": SERVICE}]}
    if retries:
        method["retryPolicy"] = {
            "maxAttempts": retries + 1,
            "initialBackoff": "0.2s",
            "maxBackoff": "5s",
            "backoffMultiplier": 2,
            "retryableStatusCodes": ["UNAVAILABLE", "RESOURCE_EXHAUSTED"],
        }
    return {
        "loadBalancingConfig": [{"round_robin": {}}],
        "healthCheckConfig": {"serviceName": SERVICE},
        "methodConfig": [method],
    }


@contextlib.contextmanager
def translated(target: str) -> Iterator[None]:
    """Turns the error of a failed call into the OctavoError that the server raised."""
    try:
        yield
    except grpc.RpcError as error:
        raise with_target(error_of_call(error), target) from error
