"""How a client connects: name resolution, balancing, health, TLS, its token, and which calls are sent again.

gRPC does all of it from a service config, for both clients alike. A stream is only sent again before its first event.
"""

import contextlib
import json
from collections.abc import Iterator
from typing import Any, TypedDict

import grpc

from octavo.messages import with_target
from octavo.rpc import CHANNEL_OPTIONS, error_of_call, is_unix
from octavo.secure_channel import channel_credentials
from octavo.tls import TlsFiles, TlsSource
from octavo.tokens import is_local, metadata_of

SERVICE = "octavo.v1.InferenceService"
MAX_RETRIES = 4  # gRPC makes at most five attempts


class Security(TypedDict, total=False):
    """How a client proves who it is and checks who answers, named once for both clients. Files are PEM files.

    tls: connect by TLS. Any of the next four says so too.
    tls_ca: file with the CA that the server's certificate must come from; left out: those that gRPC ships.
    tls_certificate, tls_key: files with this client's own certificate and its key, where the server asks for one.
    tls_server_name: what the server's certificate must be for, where that is not the host of the address.
    token: sent with every call.
    allow_plaintext_token: send it although there is no TLS and the server is on another machine.
    """

    tls: bool
    tls_ca: str
    tls_certificate: str
    tls_key: str
    tls_server_name: str
    token: str
    allow_plaintext_token: bool


class Connection:
    """The security of a client, checked.

    Raises:
        ValueError: options that do not go together, files that cannot be used, a token that would travel unprotected.
    """

    def __init__(self, address: str, security: Security) -> None:
        self.target = target_of(address)
        self.credentials = None if is_unix(self.target) else _credentials(security)
        self.metadata = metadata_of(security.get("token", ""))
        self._server_name = security.get("tls_server_name", "")
        is_protected = self.credentials is not None or is_local(self.target)
        if self.metadata and not (is_protected or security.get("allow_plaintext_token")):
            raise ValueError(
                f"a token would travel to {address} in plain text, where others can read it; "
                "use TLS (tls_ca), or say allow_plaintext_token if something else protects it"
            )

    def options(self, retries: int) -> list[tuple[str, Any]]:
        """Of the channel. Raises ValueError as `channel_options`."""
        override = [("grpc.ssl_target_name_override", self._server_name)] if self._server_name else []
        return [*channel_options(retries), *override]


def _credentials(security: Security) -> grpc.ChannelCredentials | None:
    certificate, key = security.get("tls_certificate", ""), security.get("tls_key", "")
    if bool(certificate) != bool(key):
        raise ValueError("tls_certificate and tls_key go together: one of them is missing")
    names = ("tls", "tls_ca", "tls_certificate", "tls_server_name")
    if not any(security.get(name) for name in names):
        return None
    return channel_credentials(TlsSource(TlsFiles(certificate, key, security.get("tls_ca", ""))).latest())


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
