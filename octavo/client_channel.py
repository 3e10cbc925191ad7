"""How a client connects: name resolution, balancing, health, TLS, and its token, for both clients alike.

gRPC does the first three from a service config. Not here: which calls are sent again (`octavo.retry`).
"""

import json
from typing import Any, TypedDict

import grpc

from octavo.errors import Code, OctavoError
from octavo.messages import with_target
from octavo.rpc import CHANNEL_OPTIONS, error_of_call, is_unix
from octavo.secure_channel import channel_credentials
from octavo.tls import TlsFiles, TlsSource
from octavo.tokens import is_local, metadata_of

SERVICE = "octavo.v1.InferenceService"
# gRPC sends again by itself only what no server saw. All else is for the client, which knows what of a stream came.
_SERVICE_CONFIG = {"loadBalancingConfig": [{"round_robin": {}}], "healthCheckConfig": {"serviceName": SERVICE}}


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

    @property
    def options(self) -> list[tuple[str, Any]]:
        """Of the channel."""
        override = [("grpc.ssl_target_name_override", self._server_name)] if self._server_name else []
        return [*CHANNEL_OPTIONS, ("grpc.service_config", json.dumps(_SERVICE_CONFIG)), *override]


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


def error_from(target: str, error: grpc.RpcError) -> OctavoError:
    """The OctavoError that the server raised; of a call that no server answered, with where it went."""
    return with_target(error_of_call(error), target)


def cancelled(what: str) -> OctavoError:
    """A call that its own caller ended."""
    return OctavoError(Code.CANCELLED, "CANCELLED", what)
