"""Certificates as files: options that go together, what is said of files that cannot be used, and changes."""

import logging
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from octavo.tls import TlsFiles, TlsSource, internal_tls, public_tls
from octavo.tls_metrics import TlsCollector
from router.config import RouterConfig
from tests.certificates import Authority


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "tls")


def test_no_file_is_no_tls():
    assert public_tls(RouterConfig()) is None
    assert internal_tls(RouterConfig()) is None


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"tls_key"}, "--tls-key is given without --tls-certificate"),
        ({"tls_certificate"}, "--tls-certificate is given without --tls-key"),
        ({"tls_client_ca"}, "--tls-client-ca is given without --tls-certificate"),
        ({"internal_tls_ca"}, "--internal-tls-certificate and --internal-tls-key missing"),
        ({"internal_tls_certificate", "internal_tls_key"}, "--internal-tls-ca missing"),
    ],
)
def test_options_that_need_each_other(given: set[str], said: str):
    config = RouterConfig(**dict.fromkeys(given, "/some/file.pem"))
    with pytest.raises(ValueError, match=said) as raised:
        public_tls(config), internal_tls(config)
    assert "\n" not in str(raised.value)


def test_files_that_cannot_be_used_are_named_in_one_line(authority: Authority, tmp_path: Path):
    good, other = authority.issue("good"), authority.issue("other")
    text = tmp_path / "text.pem"
    text.write_text("no certificate")
    for files, named in (
        (TlsFiles(str(tmp_path / "none.pem"), good.key), "none.pem cannot be read: No such file"),
        (TlsFiles(str(text), good.key), f"{text} and {good.key} are no certificate and its unencrypted key"),
        (TlsFiles(good.certificate, other.key), f"{other.key} are no certificate and its unencrypted key"),
        (TlsFiles(good.certificate, good.key, str(text)), f"{text} has no CA certificate"),
        (TlsFiles(str(tmp_path), good.key), "cannot be read: Is a directory"),
    ):
        with pytest.raises(ValueError, match="TLS file") as raised:
            TlsSource(files)
        assert named in str(raised.value)
        assert "\n" not in str(raised.value)
        assert "PRIVATE" not in str(raised.value)


def test_a_changed_certificate_is_seen_by_all_who_look(authority: Authority):
    files = authority.issue("server")
    source = TlsSource(TlsFiles(files.certificate, files.key))
    before = source.latest()
    assert source.latest() is before
    authority.issue("server")
    renewed = source.latest()
    assert renewed.certificate == Path(files.certificate).read_bytes() != before.certificate
    assert source.latest() is renewed


def test_a_certificate_without_its_key_yet_waits_for_the_key(authority: Authority, caplog: pytest.LogCaptureFixture):
    files, later = authority.issue("server"), authority.issue("later")
    source = TlsSource(TlsFiles(files.certificate, files.key))
    before = source.latest()
    Path(files.certificate).write_bytes(Path(later.certificate).read_bytes())
    with caplog.at_level(logging.DEBUG):
        assert all(source.latest() is before for _ in range(3))
    assert [record.levelname for record in caplog.records] == ["ERROR"]  # once for all three
    Path(files.key).write_bytes(Path(later.key).read_bytes())
    assert source.latest().key == Path(later.key).read_bytes()
    assert "PRIVATE" not in caplog.text + repr(source.latest())


def test_a_file_that_goes_away_leaves_what_there_was(authority: Authority, caplog: pytest.LogCaptureFixture):
    files = authority.issue("server")
    source = TlsSource(TlsFiles(files.certificate, files.key))
    before = source.latest()
    Path(files.key).unlink()
    assert all(source.latest() is before for _ in range(2))
    assert caplog.text.count("cannot be read") == 1


def test_a_key_that_everybody_can_read_is_warned_of(authority: Authority, caplog: pytest.LogCaptureFixture):
    files = authority.issue("server")
    Path(files.key).chmod(0o644)
    TlsSource(TlsFiles(files.certificate, files.key))
    assert f"{files.key} can be read by every user" in caplog.text


def test_what_cannot_be_used_is_a_metric_until_it_is_mended(authority: Authority):
    files, other = authority.issue("server"), authority.issue("other")
    source = TlsSource(TlsFiles(files.certificate, files.key))
    key = Path(files.key).read_bytes()
    registry = CollectorRegistry()
    registry.register(TlsCollector({"public": source, "internal": None}))

    def read(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(name, {"use": "public", **labels})

    assert read("octavo_tls_files_good") == 1
    assert registry.get_sample_value("octavo_tls_files_good", {"use": "internal"}) is None
    Path(files.key).write_bytes(Path(other.key).read_bytes())
    assert read("octavo_tls_files_good") == 0
    assert read("octavo_tls_reloads_total", outcome="failed") == 1, "once, however often it is scraped"
    Path(files.key).write_bytes(key)
    assert read("octavo_tls_files_good") == 1
    assert read("octavo_tls_reloads_total", outcome="ok") == 1
    Path(files.key).unlink()
    assert read("octavo_tls_files_good") == 0
    assert read("octavo_tls_reloads_total", outcome="failed") == 2
