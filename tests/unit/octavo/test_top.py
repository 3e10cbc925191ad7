"""`octavo top`: what follows from two readings, what is drawn, and processes that do not answer."""

import io
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge
from rich.console import Console

from octavo.metrics import start_metrics_server
from octavo.samples import Samples
from octavo.top import Picture, Reading, TopConfig, main, read
from octavo.top_screen import BAR_CELLS, bar, draw, spark


def reading(at_s: float, **samples: str) -> Reading:
    names = {"router": "router", "cache": "cache service", "executor": "executor"}
    return Reading(at_s, {names[name]: Samples(text) for name, text in samples.items()})


def tokens(count: int) -> str:
    return f"# TYPE octavo_generation_tokens counter\noctavo_generation_tokens_total {count}\n"


def text_of(picture: Picture) -> str:
    console = Console(file=io.StringIO(), width=120)
    console.print(draw(picture, [1.0]))
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_rates_are_over_the_last_interval():
    picture = Picture(reading(12.0, router=tokens(300)), reading(10.0, router=tokens(100)))
    assert picture.rate("router", "octavo_generation_tokens_total") == 100.0


def test_a_process_that_began_anew_counts_from_nothing():
    picture = Picture(reading(12.0, router=tokens(30)), reading(10.0, router=tokens(100)))
    assert picture.rate("router", "octavo_generation_tokens_total") == 15.0


@pytest.mark.parametrize(
    "picture",
    [
        Picture(reading(12.0, router=tokens(30)), None),
        Picture(reading(12.0), reading(10.0, router=tokens(30))),
        Picture(reading(12.0, router=tokens(30)), reading(10.0)),
    ],
    ids=["the first", "gone", "back"],
)
def test_without_two_readings_there_is_no_rate(picture: Picture):
    assert picture.rate("router", "octavo_generation_tokens_total") is None
    assert "?" in text_of(picture)


def test_tenants_come_by_their_blocks_with_their_tokens():
    cache = "\n".join(
        f'octavo_kv_tenant_blocks{{arena="cpu",tenant="{tenant}",state="{state}"}} {count}'
        for tenant, state, count in (("a", "cached", 1), ("a", "in_use", 2), ("", "cached", 9), ("", "in_use", 0))
    )
    line = '# TYPE octavo_tenant_tokens counter\noctavo_tenant_tokens_total{tenant="a",kind="generated"} '
    picture = Picture(
        reading(11.0, cache=cache + "\n", router=f"{line}50\n"), reading(10.0, cache=cache + "\n", router=f"{line}8\n")
    )
    assert list(picture.tenants()) == ["", "a"]
    assert picture.tenants()["a"] == {"cached": 1.0, "in_use": 2.0, "tokens_per_s": 42.0}
    assert "(none)" in text_of(picture)


def test_a_state_with_few_blocks_is_still_seen():
    drawn = bar({"used": 1, "cached": 0, "free": 99_999, "fenced": 0, "reserved": 1}).plain
    assert BAR_CELLS <= len(drawn) <= BAR_CELLS + 2


def test_the_highest_value_is_full():
    assert spark([0.0, 1.0, 2.0]) == "▁▅█"  # round half to even
    assert spark([0.0, 0.0]) == "▁▁"
    assert spark([]) == ""


def test_pictures_of_processes_one_of_which_is_away():
    registry = CollectorRegistry()
    Gauge("octavo_num_requests_running", "now", registry=registry).set(7)
    Counter("octavo_generation_tokens", "ever", registry=registry).inc(10)
    server = start_metrics_server(registry, "127.0.0.1:0")
    out = io.StringIO()
    arguments = ["--cache-service-metrics=127.0.0.1:1", "--interval-s=0.1", "--frames=2"]
    try:
        done = main([f"--router-metrics=127.0.0.1:{server.port}", *arguments], Console(file=out, width=120))
    finally:
        server.close()
    assert done == 0
    assert "running 7" in out.getvalue()
    assert "the cache service does not answer: http://127.0.0.1:1/metrics" in out.getvalue()


class Executors:
    """Two that serve their metrics, and the cache service that knows them."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        cache = CollectorRegistry()
        self._known = Gauge("octavo_registered_executor_info", "which", ["executor", "metrics_address"], registry=cache)
        self.addresses = [self._serve(self._executor(name, sessions)) for name, sessions in (("a", 1), ("b", 0))]
        for name, host, address in (("a", "127.0.0.1", self.addresses[0]), ("b", "0.0.0.0", self.addresses[1])):
            self._known.labels(name, f"{host}:{address.rpartition(':')[2]}").set(1)
        self._known.labels("without metrics", "").set(1)
        self.cache_service = self._serve(cache)

    def _serve(self, registry: CollectorRegistry) -> str:
        server = start_metrics_server(registry, "127.0.0.1:0")
        self._stack.callback(server.close)
        return f"127.0.0.1:{server.port}"

    def _executor(self, name: str, sessions: int) -> CollectorRegistry:
        registry = CollectorRegistry()
        Gauge("octavo_executor_info", "who", ["executor"], registry=registry).labels(name).set(1)
        Gauge("octavo_executor_sessions", "now", registry=registry).set(sessions)
        return registry


@pytest.fixture(scope="module")
def executors() -> Iterator[Executors]:
    with ExitStack() as stack:
        yield Executors(stack)


def test_every_executor_that_the_cache_service_knows_is_shown(executors: Executors):
    found = read(TopConfig(router_metrics="", cache_service_metrics=executors.cache_service))
    assert (found.executors, dict(found.away)) == (["a", "b"], {})
    lines = [line.split()[1:3] for line in text_of(Picture(found, None)).splitlines()]
    assert ["a", "serving"] in lines
    assert ["b", "idle"] in lines


def test_executors_are_still_asked_while_the_cache_service_is_away(executors: Executors):
    before = read(TopConfig(router_metrics="", cache_service_metrics=executors.cache_service))
    found = read(TopConfig(router_metrics="", cache_service_metrics="127.0.0.1:1"), before)
    assert found.executors == ["a", "b"]
    assert list(found.away) == ["cache service"]


def test_addresses_that_are_given_are_asked_and_no_others(executors: Executors):
    given = (executors.addresses[1], "127.0.0.1:1")
    config = TopConfig(router_metrics="", cache_service_metrics=executors.cache_service, executor_metrics=given)
    found = read(config)
    assert (found.executors, list(found.away)) == (["b"], ["executor at 127.0.0.1:1"])


def test_nobody_answers(capsys: pytest.CaptureFixture[str]):
    nobody = [f"--{name}-metrics=127.0.0.1:1" for name in ("router", "cache-service")]
    assert main(nobody) == 1
    assert "octavo top: the cache service: http://127.0.0.1:1/metrics" in capsys.readouterr().err
