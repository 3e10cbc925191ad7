"""How the commands that ask a running server reach it: address, TLS, token.

Not here: the options of a request (`octavo.request_config`).
"""

import sys
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, SecretStr

from octavo.client import DEFAULT_ADDRESS, Client
from octavo.client_channel import Security
from octavo.retry import RetryPolicy
from octavo.tokens import check_token


class ConnectionConfig(BaseModel):
    """Where a router is, and how to prove who asks."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    address: str = Field(DEFAULT_ADDRESS, description="router: host:port, dns:///name:port or unix:/path")
    timeout_s: float | None = Field(None, gt=0, description="seconds until the call fails")
    retry_refused_s: float = Field(5.0, ge=0, description="seconds for which a refused call is sent again")
    retry_broken_s: float = Field(300.0, ge=0, description="seconds for which an answer that broke off is resumed")
    tls: bool = Field(False, description="connect by TLS, and trust the CAs that gRPC ships")
    tls_ca: str = Field("", description="connect by TLS, and trust the CA in this PEM file")
    tls_certificate: str = Field(
        "", description="PEM file with a certificate of this client, where the server asks for one"
    )
    tls_key: str = Field("", description="PEM file with the private key of that certificate")
    tls_server_name: str = Field("", description="name that the server's certificate must be for; empty: the host")
    token_file: str = Field("", description="file with the token to send; other users must not be able to read it")
    token: SecretStr | None = Field(
        None, description="the token itself; better in a variable, or in a file: other users can see a command line"
    )
    allow_plaintext_token: bool = Field(False, description="send the token to another machine even without TLS")


def connect(config: ConnectionConfig, program: str) -> Client:
    """The client of a command. Raises SystemExit: 2 with a line on standard error, where options cannot be used."""
    try:
        retry = RetryPolicy(config.retry_refused_s, config.retry_broken_s)
        return Client(config.address, timeout_s=config.timeout_s, retry=retry, **security_of(config))
    except ValueError as error:
        sys.stderr.write(f"{program}: {error}\n")
        raise SystemExit(2) from None


def security_of(config: ConnectionConfig) -> Security:
    """The options as both clients take them.

    Raises:
        ValueError: both ways to give a token, or one that cannot be read or be one; the message does not contain it.
    """
    if config.token is not None and config.token_file:
        raise ValueError("token and token_file are both given; give one of them")
    token = config.token.get_secret_value() if config.token is not None else ""
    if config.token_file:
        try:
            token = check_token(Path(config.token_file).read_text("ascii"))
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or "it holds no token"
            raise ValueError(f"token file {config.token_file}: {reason}") from None
    return Security(
        tls=config.tls,
        tls_ca=config.tls_ca,
        tls_certificate=config.tls_certificate,
        tls_key=config.tls_key,
        tls_server_name=config.tls_server_name,
        token=token,
        allow_plaintext_token=config.allow_plaintext_token,
    )
