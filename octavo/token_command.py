"""`octavo token`: make a token for a tenant, and the line of the tenants file that lets it in. Asks nobody."""

import sys
from datetime import UTC, datetime, timedelta

from pydantic import BaseModel, ConfigDict, Field

from octavo.settings import load_settings
from octavo.tokens import check_token, hash_of, new_token


class TokenConfig(BaseModel):
    """Make a random token, and print it with its line for the tenants file. Only the hash goes into the file."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    tenant: str | None = Field(None, description="print a whole new tenant of this name instead of a line")
    expires_days: float | None = Field(None, gt=0, description="days from now on that it is good for; unset: for ever")
    existing: bool = Field(False, description="read a token that there is from standard input instead of making one")


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns its exit code. The token goes to standard output alone, and nowhere else."""
    config = load_settings(TokenConfig, section="token", program="octavo token", argv=argv)
    try:
        token = check_token(sys.stdin.read()) if config.existing else new_token()
    except ValueError as error:
        sys.stderr.write(f"octavo token: {error}\n")
        return 2
    if not config.existing:
        sys.stdout.write(f"token, shown this once: {token}\n\nfor the tenants file:\n")
    sys.stdout.write(_lines(config, hash_of(token), datetime.now(UTC)))
    return 0


def _lines(config: TokenConfig, sha256: str, now: datetime) -> str:
    expires = ""
    if config.expires_days is not None:
        moment = now + timedelta(days=config.expires_days)
        expires = f", expires = {moment:%Y-%m-%dT%H:%M:%SZ}"
    line = f'{{ sha256 = "{sha256}"{expires} }},\n'
    if config.tenant is None:
        return line
    return f'[[tenants]]\nname = "{config.tenant}"\ntokens = [\n  {line}]\n'
