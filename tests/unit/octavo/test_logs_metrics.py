"""The form of a log line, and a metrics server that nothing stops."""

import io
import json
import logging
import os
import sys
import urllib.error
import urllib.request

import pytest
from prometheus_client import CollectorRegistry, Counter

from octavo.logs import MAX_MESSAGE_CHARS, JsonFormatter, LineFormatter, configure_logging, fields
from octavo.metrics import ITERATION_TOKENS, start_metrics_server, token_count_buckets
from octavo.prefixed_log import PrefixedLog


def line_of(message: str) -> str:
    record = logging.LogRecord("router.engine", logging.INFO, "file", 1, message, (), None)
    return LineFormatter("router").format(record)


def test_line_says_when_who_and_what(monkeypatch):
    monkeypatch.delenv("OCTAVO_LOG_PREFIXED", raising=False)
    assert line_of("hello").endswith("Z INFO router router.engine: hello")
    monkeypatch.setenv("OCTAVO_LOG_PREFIXED", "1")
    assert line_of("hello").endswith("Z INFO router.engine: hello")


def test_prompt_of_a_million_ids_does_not_become_a_log_line():
    """Field failure 36: an error that would contain the prompt."""
    line = line_of("begin " + "7, " * 1_500_000 + "end")
    assert len(line) < MAX_MESSAGE_CHARS + 200
    assert "begin" in line
    assert line.endswith("end")


def test_what_a_client_chose_cannot_begin_a_line_or_steer_a_terminal():
    line = line_of("request a\nb\x1b[2J\r\x85é\t: done")
    assert line.endswith("request a\\x0ab\\x1b[2J\\x0d\\x85é\t: done")


def test_a_json_line_is_one_object_with_the_fields_of_its_record():
    log = logging.getLogger("test.json")
    record = log.makeRecord(
        "router.reports", logging.WARNING, "file", 1, "request %s: eos", ("a\nb",), None, extra=fields(tokens=3)
    )
    line = JsonFormatter("router").format(record)
    assert "\n" not in line
    said = json.loads(line)
    assert said.pop("time").endswith("Z")
    assert said.pop("pid") == os.getpid()
    about = {"level": "warning", "process": "router", "logger": "router.reports", "message": "request a\nb: eos"}
    assert said == {**about, "tokens": 3}


def test_a_json_line_has_the_traceback_of_an_exception_and_no_long_message():
    try:
        raise ValueError("this one")
    except ValueError:
        record = logging.LogRecord("a", logging.ERROR, "file", 1, "7, " * 1_500_000, (), sys.exc_info())
    said = json.loads(JsonFormatter("router").format(record))
    assert said["exception"].endswith("ValueError: this one")
    assert len(said["message"]) < MAX_MESSAGE_CHARS + 200


def test_the_launcher_lets_json_lines_through_and_makes_objects_of_all_others():
    stream = io.StringIO()
    log = PrefixedLog(["octavo", "router"], stream, is_json=True)
    log.write("router", '{"level": "info", "message": "hello"}')
    log.write("router", "a library says {this}")
    first, second = map(json.loads, stream.getvalue().splitlines())
    assert first == {"level": "info", "message": "hello"}
    assert (second["process"], second["message"]) == ("router", "a library says {this}")


def test_unknown_format_is_refused():
    with pytest.raises(ValueError, match="choose one of console, json"):
        configure_logging("router", "info", "yaml")


def test_unknown_level_is_refused():
    with pytest.raises(ValueError, match="choose one of debug, info"):
        configure_logging("router", "loud")


def fetch(port: int, path: str = "/metrics", **headers: str):
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", headers=headers)
    return urllib.request.urlopen(request, timeout=5)


@pytest.fixture
def registry():
    return CollectorRegistry()


@pytest.fixture
def server(registry):
    server = start_metrics_server(registry, "127.0.0.1:0")
    yield server
    server.close()


def test_scrape_is_the_plain_text_format_whatever_is_accepted(server, registry):
    Counter("octavo_things", "Things.", registry=registry).inc()
    with fetch(server.port, Accept="application/openmetrics-text; version=1.0.0") as response:
        assert response.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        assert b"octavo_things_total 1.0" in response.read()


def test_metric_that_fails_stops_neither_process_nor_server(server, registry):
    class Broken:
        def collect(self):
            raise RuntimeError("state is gone")

        def describe(self):
            return []

    broken = Broken()
    registry.register(broken)
    with pytest.raises(urllib.error.HTTPError) as failed:
        fetch(server.port)
    assert failed.value.code == 500
    registry.unregister(broken)
    assert fetch(server.port).status == 200


def test_other_paths_point_to_the_metrics(server):
    with pytest.raises(urllib.error.HTTPError) as failed:
        fetch(server.port, "/")
    assert failed.value.code == 404


def test_taken_address_is_named(server, registry):
    with pytest.raises(OSError, match=f"127.0.0.1:{server.port}"):
        start_metrics_server(registry, f"127.0.0.1:{server.port}")


@pytest.mark.parametrize("listen", ["9700", "localhost", "localhost:http", ""])
def test_address_without_a_port_is_refused(registry, listen):
    with pytest.raises(ValueError, match="host:port"):
        start_metrics_server(registry, listen)


def test_buckets_of_counts():
    assert token_count_buckets(30) == (1, 2, 5, 10, 20, 30)
    assert token_count_buckets(50) == (1, 2, 5, 10, 20, 50)
    assert ITERATION_TOKENS[:3] == (1, 8, 16)
    assert ITERATION_TOKENS[-1] == 16384
