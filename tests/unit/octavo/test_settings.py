"""One mechanism for options: precedence, refusal of unknown names, and errors of one line."""

import pytest
from pydantic import BaseModel, ConfigDict, Field

from octavo.settings import load_settings

PROGRAM = "octavo router"


class EngineLike(BaseModel):
    """A table in a list."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    name: str = Field("", pattern="^[a-z]*$")
    port: int


class RouterLike(BaseModel):
    """Serve."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    listen: str = Field("127.0.0.1:7700", description="address")
    reflection: bool = Field(True, description="serve reflection")
    max_queued_requests: int = Field(256, ge=1, description="requests that may wait")
    executors: tuple[str, ...] = Field((), description="addresses")
    engines: tuple[EngineLike, ...] = Field((), description="tables")
    note: str | None = Field(None, description="free text")


class ServeLike(BaseModel):
    """Serve everything."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    model: str = Field(description="what to serve")
    router: RouterLike = Field(default_factory=RouterLike)


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch):
    for name in ("OCTAVO_CONFIG", "OCTAVO_ROUTER_LISTEN"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def config_file(tmp_path):
    def write(text: str) -> str:
        path = tmp_path / "octavo.toml"
        path.write_text(text)
        return str(path)

    return write


def load_router(*argv: str) -> RouterLike:
    return load_settings(RouterLike, section="router", program=PROGRAM, argv=list(argv))


def load_serve(*argv: str) -> ServeLike:
    return load_settings(ServeLike, section="serve", program="octavo serve", argv=list(argv))


def refusal(capsys, load, *argv: str) -> str:
    """What a refused start prints: exactly one line on standard error, exit code 2."""
    with pytest.raises(SystemExit) as stopped:
        load(*argv)
    assert stopped.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    return captured.err


def test_defaults():
    assert load_router() == RouterLike()


def test_each_source_wins_over_the_next(config_file, monkeypatch):
    path = config_file("[router]\nlisten = 'file:1'\nmax_queued_requests = 1\nnote = 'file'\n")
    monkeypatch.setenv("OCTAVO_ROUTER_LISTEN", "variable:1")
    monkeypatch.setenv("OCTAVO_ROUTER_MAX_QUEUED_REQUESTS", "2")
    settings = load_router("--config", path, "--listen", "line:1")
    assert (settings.listen, settings.max_queued_requests, settings.note) == ("line:1", 2, "file")


def test_file_from_the_variable(config_file, monkeypatch):
    monkeypatch.setenv("OCTAVO_CONFIG", config_file("[router]\nreflection = false\n"))
    assert load_router().reflection is False


def test_sections_of_one_command(config_file, monkeypatch):
    path = config_file("[serve]\nmodel = 'm'\n[router]\nlisten = 'file:1'\nnote = 'file'\n[executor]\nany = 1\n")
    monkeypatch.setenv("OCTAVO_ROUTER_LISTEN", "variable:1")
    settings = load_serve("--config", path, "--router.max-queued-requests", "3", "--no-router.reflection")
    assert settings.model == "m"
    assert settings.router == RouterLike(listen="variable:1", note="file", max_queued_requests=3, reflection=False)


@pytest.mark.parametrize(
    ("argv", "variable"),
    [
        (("--executors", "a:1", "--executors", "b:1"), None),
        (("--executors", "a:1,b:1"), None),
        (("--executors", '["a:1", "b:1"]'), None),
        ((), "a:1, b:1"),
        ((), '["a:1", "b:1"]'),
    ],
)
def test_lists_may_be_written_as_one_thinks(argv, variable, monkeypatch):
    if variable is not None:
        monkeypatch.setenv("OCTAVO_ROUTER_EXECUTORS", variable)
    assert load_router(*argv).executors == ("a:1", "b:1")


ENGINES = (EngineLike(name="a", port=1), EngineLike(port=2))


@pytest.mark.parametrize(
    "argv",
    [
        ("--engines", '[{"name": "a", "port": 1}, {"port": 2}]'),
        ("--engines", '{"name": "a", "port": 1}', "--engines", '{"port": 2}'),
    ],
)
def test_lists_of_tables_on_the_command_line(argv):
    assert load_router(*argv).engines == ENGINES


def test_lists_of_tables_elsewhere_and_printed(config_file, monkeypatch, capsys):
    """What is printed is a file that says the same."""
    path = config_file("[[router.engines]]\nname = 'a'\nport = 1\n\n[[router.engines]]\nport = 2\n")
    assert load_router("--config", path).engines == ENGINES
    with pytest.raises(SystemExit):
        load_router("--config", path, "--print-config")
    printed = capsys.readouterr().out
    assert 'engines = [{ name = "a", port = 1 }, { name = "", port = 2 }]' in printed
    assert load_router("--config", config_file(printed)).engines == ENGINES
    monkeypatch.setenv("OCTAVO_ROUTER_ENGINES", '[{"name": "a", "port": 1}, {"port": 2}]')
    assert load_router().engines == ENGINES


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        ('{"name": "a"}', "--engines: [0].port: field required"),
        ('{"port": 1, "prot": 2}', "--engines: [0].prot: extra inputs are not permitted"),
        ('{"port": 1, "name": "A"}', "--engines: [0].name: string should match pattern"),
    ],
)
def test_what_is_wrong_in_a_table_of_a_list_is_said(capsys, table, expected):
    assert expected in refusal(capsys, load_router, "--engines", table)


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--max-queued-request", "1"], "unknown argument --max-queued-request; did you mean --max-queued-requests?"),
        (["--max-queued-requests", "0"], "--max-queued-requests: should be greater than or equal to 1, got '0'"),
        (["--max-queued-requests", "many"], "should be a valid integer"),
        (["--listen"], "--listen: expected one argument"),
        (["surplus"], "unknown argument surplus"),
        (["--config", "/nowhere.toml"], "configuration file /nowhere.toml: No such file"),
    ],
)
def test_bad_command_line_is_one_line(capsys, argv, expected):
    line = refusal(capsys, load_router, *argv)
    assert line.startswith(f"{PROGRAM}: ")
    assert expected in line


def test_required_option_says_the_three_places(capsys):
    line = refusal(capsys, load_serve)
    assert "--model is required (or OCTAVO_SERVE_MODEL, or model in table [serve] of the file)" in line


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[router]\nlisten_on = 'x'\n", "unknown key 'listen_on' in [router]; did you mean listen?"),
        ("[ruoter]\n", "'ruoter' is no table of Octavo's"),
        ("listen = 'x'\n", "'listen' is no table"),
        ("[router\n", "configuration file"),
        ("[router]\nmax_queued_requests = -1\n", "--max-queued-requests: should be greater than or equal to 1, got -1"),
    ],
)
def test_bad_file_is_one_line(capsys, config_file, text, expected):
    assert expected in refusal(capsys, load_router, "--config", config_file(text))


def test_unknown_variable_is_refused(capsys, monkeypatch):
    monkeypatch.setenv("OCTAVO_ROUTER_MAX_QUEUE_REQUESTS", "3")
    line = refusal(capsys, load_router)
    assert "OCTAVO_ROUTER_MAX_QUEUE_REQUESTS; did you mean OCTAVO_ROUTER_MAX_QUEUED_REQUESTS?" in line


def test_bad_variable_is_named(capsys, monkeypatch):
    monkeypatch.setenv("OCTAVO_ROUTER_MAX_QUEUED_REQUESTS", "-3")
    assert "got '-3' from OCTAVO_ROUTER_MAX_QUEUED_REQUESTS" in refusal(capsys, load_router)


def test_variables_that_kubernetes_injects_are_no_options(monkeypatch):
    monkeypatch.setenv("OCTAVO_ROUTER_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setenv("OCTAVO_ROUTER_SERVICE_PORT_GRPC", "7700")
    monkeypatch.setenv("OCTAVO_ROUTER_PORT", "tcp://10.0.0.1:7700")
    monkeypatch.setenv("OCTAVO_ROUTER_PORT_7700_TCP_ADDR", "10.0.0.1")
    assert load_router() == RouterLike()


def test_printed_config_names_sources_and_can_be_read_again(capsys, config_file, monkeypatch):
    monkeypatch.setenv("OCTAVO_ROUTER_NOTE", 'a "quoted" \\ note')
    argv = ["--model", "m", "--router.executors", "a,b"]
    with pytest.raises(SystemExit) as stopped:
        load_serve(*argv, "--print-config")
    printed = capsys.readouterr().out
    assert stopped.value.code == 0
    assert 'model = "m"  # command line' in printed
    assert "OCTAVO_ROUTER_NOTE" in printed
    assert "max_queued_requests = 256  # default" in printed
    expected = load_serve(*argv)
    monkeypatch.delenv("OCTAVO_ROUTER_NOTE")
    assert load_serve("--config", config_file(printed)) == expected


def test_help_has_one_line_per_option_with_its_default(capsys):
    with pytest.raises(SystemExit) as stopped:
        load_serve("--help")
    assert stopped.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.split() == ["--model", "str", "what", "to", "serve", "(required)"] for line in lines)
    queued = "--router.max-queued-requests int requests that may wait (default: 256)"
    assert any(line.split() == queued.split() for line in lines)
