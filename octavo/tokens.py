"""Bearer tokens: how they are made, carried, hashed, and where they may travel.

A token is 32 random bytes, so one round of SHA-256 keeps it secret: there is nothing to guess. Not here: who a token
belongs to (the router's tenants).
"""

import hashlib
import ipaddress
import re
import secrets

PREFIX = "octavo_"  # so that scanners for leaked secrets, and people, know one when they see it
METADATA_KEY = "authorization"
MAX_TOKEN_CHARS = 512
_SCHEME = "bearer "
_TOKEN = re.compile(r"[\x21-\x7e]+")


def new_token() -> str:
    """A fresh token with 256 random bits."""
    return PREFIX + secrets.token_urlsafe(32)


def hash_of(token: str) -> str:
    """SHA-256 in hexadecimal, as the file of tenants has it."""
    return hashlib.sha256(token.encode()).hexdigest()


def check_token(token: str) -> str:
    """The token itself, without the white space around it.

    Raises:
        ValueError: it cannot be one; the message does not contain it.
    """
    token = token.strip()
    if len(token) > MAX_TOKEN_CHARS or not _TOKEN.fullmatch(token):
        raise ValueError(f"a token has 1 to {MAX_TOKEN_CHARS} printable ASCII characters without spaces; this has not")
    return token


def metadata_of(token: str) -> tuple[tuple[str, str], ...]:
    """What a call carries; nothing for an empty token."""
    return ((METADATA_KEY, f"Bearer {check_token(token)}"),) if token else ()


def token_in(value: str) -> str | None:
    """The token of an `authorization` value; None: it is of another kind."""
    if value[: len(_SCHEME)].lower() != _SCHEME:
        return None
    return value[len(_SCHEME) :].strip()


def is_local(address: str) -> bool:
    """Whether nobody outside of this machine can read along: a Unix socket, or the loopback interface.

    Args:
        address: `host:port`, `unix:/path`, or a target of gRPC such as `dns:///host:port`.
    """
    if address.startswith("unix:"):
        return True
    host = re.sub(r"^(dns|ipv4|ipv6):(//[^/]*/)?", "", address).rpartition(":")[0].strip("[]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
