"""All tenants at one moment, and whose a token is. Immutable; the time is an argument.

A token is looked up by a hash that is keyed anew in every process, and compared in constant time: how long a refusal
takes says nothing about the tokens that there are. Not here: the file they come from (`file`, `watch`).
"""

import hashlib
import hmac
import secrets
from collections.abc import Iterable
from dataclasses import dataclass

from octavo.errors import Code, OctavoError
from octavo.tokens import MAX_TOKEN_CHARS
from router.tenants.tenant import Tenant

_NOBODYS = bytes(32)


@dataclass(frozen=True, slots=True)
class Credential:
    """A token of a tenant, as its hash.

    Attributes:
        digest: SHA-256 of the token, 32 bytes.
        expires_unix_s: from when on it is refused; None: never.
    """

    tenant: Tenant
    digest: bytes
    expires_unix_s: float | None = None


class Directory:
    """Tenants by their tokens.

    Args:
        tenants: each name once.
        credentials: each digest once.
    """

    def __init__(self, tenants: Iterable[Tenant], credentials: Iterable[Credential]) -> None:
        self.tenants = tuple(tenants)
        self._key = secrets.token_bytes(32)
        self._credentials = {self._index_of(each.digest): each for each in credentials}

    def authenticate(self, token: str, now_unix_s: float) -> Tenant:
        """Whose token it is.

        Raises:
            OctavoError: UNAUTHENTICATED, the same for a token that is unknown and one that has expired;
                PERMISSION_DENIED for a tenant that is disabled. Neither contains the token.
        """
        digest = hashlib.sha256(token[: MAX_TOKEN_CHARS + 1].encode()).digest()
        found = self._credentials.get(self._index_of(digest))
        is_equal = hmac.compare_digest(digest, found.digest if found else _NOBODYS)
        if found is None or not is_equal:
            raise unauthenticated("TOKEN_INVALID")
        if found.expires_unix_s is not None and found.expires_unix_s <= now_unix_s:
            raise unauthenticated("TOKEN_INVALID")
        if found.tenant.is_disabled:
            raise OctavoError(
                Code.PERMISSION_DENIED, "TENANT_DISABLED", "this caller is known and may call no more; ask the operator"
            )
        return found.tenant

    def _index_of(self, digest: bytes) -> bytes:
        return hmac.digest(self._key, digest, "sha256")


def unauthenticated(reason: str) -> OctavoError:
    """Who calls is not known."""
    messages = {
        "TOKEN_MISSING": "there is no token; send it as metadata, authorization: Bearer TOKEN",
        "TOKEN_INVALID": "the token is not valid: it is unknown, or it has expired",
    }
    return OctavoError(Code.UNAUTHENTICATED, reason, messages[reason])
