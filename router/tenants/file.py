"""The file of tenants: TOML with a table for each, checked whole. Not here: when it is read (`watch`)."""

import tomllib
from collections import Counter
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from router.tenants.directory import Credential, Directory
from router.tenants.tenant import Tenant

MAX_FILE_BYTES = 4 * 1024 * 1024
NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
_STRICT = ConfigDict(frozen=True, extra="forbid", strict=True)


class _Token(BaseModel):
    model_config = _STRICT

    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    expires: datetime | date | None = None

    @property
    def expires_unix_s(self) -> float | None:
        """A day alone is its beginning; without a zone it is UTC."""
        if self.expires is None:
            return None
        moment = self.expires
        if not isinstance(moment, datetime):
            moment = datetime(moment.year, moment.month, moment.day)
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


class _Tenant(BaseModel):
    model_config = _STRICT

    name: str = Field(pattern=NAME_PATTERN)
    tokens: tuple[_Token, ...] = Field(strict=False)
    prefix_group: str = Field("", pattern=rf"^$|{NAME_PATTERN}")
    models: frozenset[str] | None = Field(None, strict=False)
    disabled: bool = False
    max_requests_in_flight: int = Field(0, ge=0)
    tokens_per_minute: int = Field(0, ge=0)
    max_queue_share: float = Field(1.0, gt=0, le=1, strict=False)
    max_kv_share: float = Field(1.0, gt=0, le=1, strict=False)


class _File(BaseModel):
    model_config = _STRICT

    tenants: tuple[_Tenant, ...] = Field(strict=False, min_length=1)

    @field_validator("tenants")
    @classmethod
    def _check_unique(cls, tenants: tuple[_Tenant, ...]) -> tuple[_Tenant, ...]:
        names = Counter(tenant.name for tenant in tenants)
        tokens = Counter(token.sha256 for tenant in tenants for token in tenant.tokens)
        for what, counts in (("tenants have the name", names), ("tokens have the hash", tokens)):
            twice = [value for value, count in counts.items() if count > 1]
            if twice:
                raise ValueError(f"two {what} {twice[0][:64]}")
        return tenants


def read_directory(path: str) -> Directory:
    """All tenants of a file.

    Raises:
        ValueError: it cannot be read, or what is wrong first, in one line.
    """
    try:
        with Path(path).open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
        if len(content) > MAX_FILE_BYTES:
            raise ValueError(f"it is longer than {MAX_FILE_BYTES} bytes")
        found = _File.model_validate(tomllib.loads(content.decode()))
    except ValidationError as error:
        raise ValueError(f"tenants file {path}: {_first_of(error)}") from error
    except (OSError, ValueError) as error:  # of which those of UTF-8 and TOML are kinds
        raise ValueError(f"tenants file {path}: {getattr(error, 'strerror', None) or error}") from error
    entries = [(entry, _tenant_of(entry)) for entry in found.tenants]
    credentials = [
        Credential(tenant, bytes.fromhex(token.sha256), token.expires_unix_s)
        for entry, tenant in entries
        for token in entry.tokens
    ]
    return Directory([tenant for _, tenant in entries], credentials)


def _tenant_of(entry: _Tenant) -> Tenant:
    return Tenant(
        name=entry.name,
        prefix_group=entry.prefix_group,
        models=entry.models,
        is_disabled=entry.disabled,
        max_requests_in_flight=entry.max_requests_in_flight,
        tokens_per_minute=entry.tokens_per_minute,
        max_queue_share=entry.max_queue_share,
        max_kv_share=entry.max_kv_share,
    )


def _first_of(error: ValidationError) -> str:
    """Where and what, without the value: somebody may have written a token in place of its hash."""
    problem: Any = error.errors(include_url=False, include_input=False, include_context=False)[0]
    place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in problem["loc"]).lstrip(".")
    message = problem["msg"].removeprefix("Value error, ")
    return f"{place}: {message[:1].lower()}{message[1:]}"
