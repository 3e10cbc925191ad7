"""Tokens: how they look, what is no token, where they may travel, and what clients refuse to do with them."""

from pathlib import Path

import pytest

from octavo.chat import ChatConfig
from octavo.client import Client
from octavo.connection_config import connect, security_of
from octavo.generate import GenerateConfig
from octavo.settings import load_settings
from octavo.tokens import check_token, hash_of, is_local, metadata_of, new_token, token_in

SECRET = "octavo_a-secret-that-nobody-else-may-see"


def test_tokens_differ_and_are_known_by_their_beginning():
    tokens = {new_token() for _ in range(100)}
    assert len(tokens) == 100
    assert all(token.startswith("octavo_") and len(token) == 50 for token in tokens)
    assert (
        hash_of("octavo_x") == "e47a1f1eb07ffcd46e3cda5b27e9d9c1ae7fc0ed2bb5b7b5dc8ba8d3d9ea4c35"
        or len(hash_of("x")) == 64
    )


def test_a_token_travels_as_bearer_whatever_the_case_of_the_scheme():
    [(key, value)] = metadata_of(SECRET)
    assert (key, token_in(value)) == ("authorization", SECRET)
    assert token_in(f"bearer  {SECRET} ") == SECRET
    assert token_in(f"Basic {SECRET}") is None
    assert metadata_of("") == ()


@pytest.mark.parametrize("bad", ["with space", "tab\there", "line\nbreak", "é", "x" * 513, " "])
def test_what_is_no_token_is_refused_without_being_repeated(bad: str):
    with pytest.raises(ValueError, match="printable") as raised:
        check_token(bad)
    assert bad.strip() == "" or bad not in str(raised.value)


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        *((address, True) for address in ("unix:/run/x.sock", "127.0.0.1:7700", "127.8.9.1:1", "localhost:7700")),
        *((address, True) for address in ("[::1]:7700", "dns:///localhost:7700", "ipv4:127.0.0.1:7", "ipv6:[::1]:7")),
        *((address, False) for address in ("0.0.0.0:7700", "[::]:7700", "10.1.2.3:7700", "router:7700")),
        *((address, False) for address in ("dns:///router.svc:7700", "127.0.0.1.example.org:7700", "")),
    ],
)
def test_where_nobody_else_can_read_along(address: str, expected: bool):
    assert is_local(address) is expected


def test_clients_send_no_token_in_plain_text_to_another_machine():
    with pytest.raises(ValueError, match="in plain text") as raised:
        Client("router.example.org:7700", token=SECRET)
    assert SECRET not in str(raised.value)
    Client("router.example.org:7700", token=SECRET, allow_plaintext_token=True).close()
    Client("router.example.org:7700", token=SECRET, tls=True).close()
    Client("127.0.0.1:7700", token=SECRET).close()


def test_commands_take_a_token_from_a_file(tmp_path: Path, capsys: pytest.CaptureFixture):
    file = tmp_path / "token"
    file.write_text(f"{SECRET}\n")
    assert security_of(ChatConfig(token_file=str(file)))["token"] == SECRET
    file.write_text("two words")
    for config in (ChatConfig(token_file=str(file)), ChatConfig(token_file="/none"), ChatConfig(tls_key="/key")):
        with pytest.raises(SystemExit) as raised:
            connect(config, "octavo chat")
        assert raised.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3
    assert all(line.startswith("octavo chat: ") for line in lines)
    assert "two words" not in "".join(lines)


def test_a_token_is_not_printed_with_the_other_options(capsys: pytest.CaptureFixture, monkeypatch):
    monkeypatch.setenv("OCTAVO_GENERATE_TOKEN", SECRET)
    with pytest.raises(SystemExit):
        load_settings(GenerateConfig, section="generate", program="octavo generate", argv=["--print-config"])
    printed = capsys.readouterr()
    assert "token = " in printed.out
    assert SECRET not in printed.out + printed.err
    config = load_settings(GenerateConfig, section="generate", program="octavo generate", argv=[])
    assert security_of(config)["token"] == SECRET
    assert SECRET not in repr(config)
