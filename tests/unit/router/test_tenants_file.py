"""The file of tenants: what it says, what is wrong with it in one line, and how changes are followed."""

import hmac
import logging
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from octavo.errors import Code, OctavoError
from octavo.token_command import main as token_command
from octavo.tokens import hash_of
from router.config import RouterConfig
from router.tenants.file import MAX_FILE_BYTES, read_directory
from router.tenants.gate import Gate
from router.tenants.watch import TenantsFile

TOKEN = "octavo_the-token-of-acme"


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def tenant(name: str = "acme", token: str = TOKEN, more: str = "", of_token: str = "") -> str:
    return f'[[tenants]]\nname = "{name}"\ntokens = [{{ sha256 = "{hash_of(token)}"{of_token} }}]\n{more}\n'


def refusal_of(path: str, token: str, now: float = 0.0) -> OctavoError:
    with pytest.raises(OctavoError) as raised:
        read_directory(path).authenticate(token, now)
    assert token not in str(raised.value) + repr(raised.value)
    return raised.value


def test_a_tenant_with_all_that_can_be_said(tmp_path: Path):
    more = (
        'prefix_group = "partners"\nmodels = ["small"]\nmax_requests_in_flight = 4\n'
        "tokens_per_minute = 1000\nmax_queue_share = 0.5\n"
    )
    path = write(tmp_path / "tenants.toml", tenant(more=more) + tenant("other", "octavo_other"))
    found = read_directory(path).authenticate(TOKEN, time.time())
    assert (found.name, found.cache_tenant, found.max_queue_share) == ("acme", "group:partners", 0.5)
    assert found.may_use("small")
    assert not found.may_use("large")
    assert read_directory(path).authenticate("octavo_other", 0).cache_tenant == "other"


def test_the_name_of_a_group_never_passes_for_a_tenant(tmp_path: Path):
    path = write(tmp_path / "t", tenant("a", more='prefix_group = "b"') + tenant("b", "octavo_b"))
    directory = read_directory(path)
    assert directory.authenticate(TOKEN, 0).cache_tenant != directory.authenticate("octavo_b", 0).cache_tenant


def test_unknown_and_expired_tokens_are_refused_alike(tmp_path: Path):
    path = write(tmp_path / "tenants.toml", tenant(of_token=", expires = 2026-01-01"))
    read_directory(path).authenticate(TOKEN, 1767225599.0)
    expired, unknown = refusal_of(path, TOKEN, 1767225600.0), refusal_of(path, "octavo_wrong", 0)
    assert expired.code is unknown.code is Code.UNAUTHENTICATED
    assert (expired.reason, expired.message) == (unknown.reason, unknown.message)
    for odd in ("", "x" * 100_000, hash_of(TOKEN), TOKEN + " ", TOKEN.upper(), "\N{SNOWMAN}"):
        assert odd == "" or refusal_of(path, odd).reason == "TOKEN_INVALID"


def test_a_token_is_compared_as_a_keyed_hash_whoever_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """What takes time does not depend on the tokens that there are: one lookup by a hash that nobody can foresee, one
    comparison of 32 bytes in constant time, for a token that is known, unknown, expired or of a disabled tenant."""
    several = tenant() + tenant("late", "octavo_late", of_token=", expires = 2020-01-01")
    path = write(tmp_path / "t", several + tenant("gone", "octavo_gone", more="disabled = true"))
    keys, compared = set(), []

    def keyed(key: bytes, message: bytes, kind: str, digest: Any = hmac.digest) -> bytes:
        keys.add(key)
        assert (len(key), len(message), kind) == (32, 32, "sha256"), "a hash is looked up, no token"
        return digest(key, message, kind)

    def compare(left: bytes, right: bytes, is_equal: Any = hmac.compare_digest) -> bool:
        compared.append((len(left), len(right)))
        return is_equal(left, right)

    monkeypatch.setattr(hmac, "digest", keyed)
    monkeypatch.setattr(hmac, "compare_digest", compare)
    directory = read_directory(path)
    for token in (TOKEN, "octavo_late", "octavo_gone", "octavo_wrong", TOKEN[:-1], "x" * 100_000):
        with suppress(OctavoError):
            directory.authenticate(token, time.time())
        assert compared == [(32, 32)]
        compared.clear()
    assert len(keys) == 1
    read_directory(path)
    assert len(keys) == 2, "each directory has a key of its own"


def test_a_disabled_tenant_is_told_so(tmp_path: Path):
    path = write(tmp_path / "tenants.toml", tenant(more="disabled = true"))
    assert refusal_of(path, TOKEN).code is Code.PERMISSION_DENIED


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "tenants: field required"),
        ("tenants = []", "tenants: "),
        ("no toml", "Expected"),
        (tenant() + tenant(token="octavo_x"), "two tenants have the name acme"),
        (tenant() + tenant("b"), "two tokens have the hash"),
        (tenant(more="max_queue_share = 0"), r"tenants\[0\].max_queue_share: "),
        (tenant(more="max_requests = 3"), r"tenants\[0\].max_requests: extra"),
        (tenant(more='tokens_per_minute = "1"'), r"tenants\[0\].tokens_per_minute: "),
        (tenant("a b"), r"tenants\[0\].name: "),
        (f'[[tenants]]\nname = "a"\ntokens = [{{ sha256 = "{TOKEN}" }}]', r"tenants\[0\].tokens\[0\].sha256: "),
        (f'[[tenants]]\nname = "a"\ntokens = ["{TOKEN}"]', r"tenants\[0\].tokens\[0\]: "),
        ("#" * (MAX_FILE_BYTES + 1), "it is longer than"),
    ],
)
def test_what_is_wrong_is_one_line_without_what_stands_there(text: str, said: str, tmp_path: Path):
    path = write(tmp_path / "tenants.toml", text)
    with pytest.raises(ValueError, match=said) as raised:
        read_directory(path)
    assert str(raised.value).startswith(f"tenants file {path}: ")
    assert "\n" not in str(raised.value)
    assert TOKEN not in str(raised.value)


def test_a_file_that_is_not_there_is_said(tmp_path: Path):
    with pytest.raises(ValueError, match="No such file"):
        read_directory(str(tmp_path / "none"))


class Reloads(list):
    def on_reload(self, is_good: bool) -> None:
        self.append(is_good)


async def test_changes_are_followed_and_a_broken_file_changes_nothing(tmp_path: Path, caplog):
    path, reloads = tmp_path / "tenants.toml", Reloads()
    file = TenantsFile(write(path, tenant()), reloads)
    await file.look()
    assert reloads == []
    with caplog.at_level(logging.DEBUG):
        write(path, "broken = ")
        await file.look()
        await file.look()
        path.unlink()
        await file.look()
    assert file.directory.authenticate(TOKEN, 0).name == "acme"
    assert (reloads, file.is_good) == ([False, False], False)
    assert [record.levelname for record in caplog.records] == ["ERROR", "ERROR"]
    fresh = tmp_path / "fresh"
    write(fresh, tenant("acme", "octavo_new"))
    fresh.rename(path)  # as a mounted Secret is replaced
    await file.look()
    assert file.is_good
    assert file.directory.authenticate("octavo_new", 0).name == "acme"
    with pytest.raises(OctavoError):
        file.directory.authenticate(TOKEN, 0)


def test_what_the_command_prints_lets_its_token_in(tmp_path: Path, capsys, monkeypatch):
    assert token_command(["--tenant", "acme", "--expires-days", "1"]) == 0
    printed = capsys.readouterr()
    token = next(line for line in printed.out.splitlines() if line.startswith("token"))
    secret, table = token.split()[-1], printed.out.partition("file:\n")[2]
    assert secret not in table + printed.err
    directory = read_directory(write(tmp_path / "tenants.toml", table))
    assert directory.authenticate(secret, time.time()).name == "acme"
    with pytest.raises(OctavoError):
        directory.authenticate(secret, time.time() + 2 * 86400)
    assert token_command([]) == 0
    assert capsys.readouterr().out.rstrip().endswith("},")


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"listen": "0.0.0.0:7700"}, "tokens would travel in plain text"),
        ({"listen": "10.0.0.1:7700"}, "--allow-plaintext-tokens"),
        ({"default_tenant": "a"}, "--default-tenant is given beside --tenants-file"),
    ],
)
def test_tokens_never_travel_in_plain_text_unless_it_is_said(config: dict, said: str, tmp_path: Path):
    path = write(tmp_path / "tenants.toml", tenant())
    with pytest.raises(ValueError, match=said):
        Gate(RouterConfig(tenants_file=path, **config), CollectorRegistry())
    for good in ({"allow_plaintext_tokens": True}, {"tls_certificate": "c", "tls_key": "k"}):
        Gate(RouterConfig(tenants_file=path, listen="0.0.0.0:7700", **good), CollectorRegistry())
    Gate(RouterConfig(tenants_file=path, listen="unix:/run/octavo.sock"), CollectorRegistry())
