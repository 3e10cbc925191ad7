"""What is wrong with TLS or tenants ends each process at once: one line on standard error, exit code 2."""

from pathlib import Path

import pytest

import cache_service.__main__
import executor.__main__
import octavo.launcher
import router.__main__

PROCESSES = {
    "octavo cache-service": (cache_service.__main__, "main"),
    "octavo executor": (executor.__main__, "main"),
    "octavo router": (router.__main__, "main"),
    "octavo serve": (octavo.launcher, "serve"),
    "octavo engine": (octavo.launcher, "engine"),
}


@pytest.fixture(autouse=True)
def _logging_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, _ in PROCESSES.values():
        if hasattr(module, "configure_logging"):
            monkeypatch.setattr(module, "configure_logging", lambda *args, **options: None)


def end_of(program: str, capsys: pytest.CaptureFixture, *arguments: str) -> str:
    module, function = PROCESSES[program]
    assert getattr(module, function)(list(arguments)) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    [line] = captured.err.splitlines()
    assert line.startswith(f"{program}: ")
    return line.removeprefix(f"{program}: ")


@pytest.mark.parametrize("program", ["octavo cache-service", "octavo executor", "octavo router"])
def test_internal_tls(program: str, capsys: pytest.CaptureFixture, tmp_path: Path):
    file = tmp_path / "nothing.pem"
    line = end_of(program, capsys, "--internal-tls-key", str(file))
    assert line.startswith("--internal-tls-certificate and --internal-tls-ca missing")
    every = [f"--internal-tls-{name}={file}" for name in ("certificate", "key", "ca")]
    assert end_of(program, capsys, *every) == f"TLS file {file} cannot be read: No such file or directory"


def test_public_tls_and_tenants(capsys: pytest.CaptureFixture, tmp_path: Path):
    assert "go together" in end_of("octavo router", capsys, "--tls-certificate", "/some.pem")
    file = tmp_path / "tenants.toml"
    assert "No such file" in end_of("octavo router", capsys, "--tenants-file", str(file))
    file.write_text("[[tenants]]\nname = 1\n")
    assert "tenants[0].name" in end_of("octavo router", capsys, "--tenants-file", str(file))
    assert "plain text" in end_of("octavo router", capsys, "--tenants-file", str(file), "--listen", "0.0.0.0:7700")


def test_commands_that_start_several_say_it_before_they_start_any(capsys: pytest.CaptureFixture):
    assert "go together" in end_of("octavo serve", capsys, "--router.tls-key", "/some.pem")
    assert "missing" in end_of("octavo engine", capsys, "--executor.internal-tls-ca", "/some.pem")
