"""From options to processes: command lines, wiring, order, and what may not be set."""

import pytest
from pydantic import ValidationError

from octavo.child import RestartPolicy
from octavo.launch_config import EngineConfig, ServeConfig
from octavo.launch_plan import arguments_of, connect_address, offset_address, plan_engine, plan_serve
from octavo.launcher import child_environment
from octavo.settings import load_settings
from octavo.supervisor import RestartHistory
from router.config import EngineAddress, RouterConfig


def socket_of(name: str) -> str:
    return f"unix:/run/{name}.sock"


def serve(**values) -> list:
    return plan_serve(ServeConfig.model_validate(values), socket_of)


def test_serve_is_three_stages_joined_by_private_sockets():
    [[cache], [executor, reserve], [router]] = serve()
    assert cache.argv[1:3] == ("-m", "cache_service")
    assert "--listen=unix:/run/cache-service.sock" in cache.argv
    assert "--cache-service=unix:/run/cache-service.sock" in executor.argv
    assert "--executor=unix:/run/executor-0.sock" in router.argv
    assert '--spare-executors=["unix:/run/executor-1.sock"]' in router.argv
    assert (executor.name, executor.is_reserve, reserve.name, reserve.is_reserve) == (
        *("executor", False),
        *("executor-1", True),
    )
    assert not any(argument.startswith("--listen") for argument in router.argv)  # its default is the public address
    assert (router.address, router.health_service) == ("127.0.0.1:7700", "octavo.v1.InferenceService")


def test_whatever_dies_is_restarted():
    options = {"max_restarts": 7, "max_restart_pause_s": 3.0}
    stages = [*serve(**options), *plan_engine(EngineConfig(**options), socket_of)]
    assert [child.restart for stage in stages for child in stage] == [RestartPolicy(7, max_delay_s=3.0)] * 7


def test_grace_before_sigkill_is_longer_than_the_processs_own():
    [_, _, [router]] = serve(router={"drain_accept_window_s": 3, "drain_grace_s": 50})
    assert router.stop_grace_s > 53


def test_what_is_said_once_reaches_every_section_that_says_nothing():
    config = ServeConfig.model_validate({"model": "m", "log_level": "debug", "router": {"log_level": "error"}})
    assert config.executor.model == "m"
    assert (config.cache_service.log_level, config.router.log_level) == ("debug", "error")


def test_a_trace_is_the_routers():
    [_, _, [router]] = serve(trace="/tmp/steps.json")
    assert "--trace-file=/tmp/steps.json" in router.argv


def test_address_that_was_chosen_is_used_and_connected_to():
    [[cache], [executor, _], _] = serve(cache_service={"listen": "0.0.0.0:7801"})
    assert "--listen=0.0.0.0:7801" in cache.argv
    assert "--cache-service=127.0.0.1:7801" in executor.argv


@pytest.mark.parametrize(
    ("section", "name"),
    [
        ("executor", "cache_service"),
        ("executor", "executor_id"),
        ("router", "cache_service"),
        ("router", "executor"),
        ("router", "spare_executors"),
        ("router", "wanted_spares"),
    ],
)
def test_where_processes_connect_cannot_be_set(section, name):
    with pytest.raises(ValidationError, match=f"{section}.{name} cannot be set here"):
        ServeConfig.model_validate({section: {name: "x:1"}})


def test_port_that_nobody_could_know_is_refused():
    with pytest.raises(ValueError, match="choose one"):
        serve(router={"listen": "127.0.0.1:0"})


def test_engine_numbers_its_executors():
    [[cache], executors] = plan_engine(EngineConfig.model_validate({"executors": 2, "model": "m"}), socket_of)
    assert cache.address == "127.0.0.1:7701"
    assert [spec.name for spec in executors if not spec.is_reserve] == ["executor-0", "executor-1"]
    assert [spec.address for spec in executors if not spec.is_reserve] == ["127.0.0.1:7702", "127.0.0.1:7703"]
    assert [(spec.name, spec.pool) for spec in executors if spec.is_reserve] == [
        *(("executor-2", "engine-0"), ("executor-3", "engine-1")),
    ]
    assert {"--listen=127.0.0.1:7703", "--metrics-listen=127.0.0.1:9703", "--executor-id=executor-1"} <= set(
        executors[1].argv
    )
    assert all("--model=m" in spec.argv for spec in executors)


def test_spares_are_executors_that_the_router_knows_of():
    [_, executors, [router]] = serve(spare_executors=2, executor={"listen": "127.0.0.1:7710"})
    assert [(spec.name, spec.is_reserve) for spec in executors] == [(f"executor-{place}", False) for place in range(3)]
    assert "--executor=127.0.0.1:7710" in router.argv
    assert '--spare-executors=["127.0.0.1:7711", "127.0.0.1:7712"]' in router.argv
    assert "--wanted-spares=2" in router.argv
    assert {"--metrics-listen=127.0.0.1:9704", "--executor-id=executor-2"} <= set(executors[2].argv)


def test_a_place_for_roll_outs_is_no_spare():
    [_, _, [router]] = serve(executor={"listen": "127.0.0.1:7710"})
    assert {'--spare-executors=["127.0.0.1:7711"]', "--wanted-spares=0"} <= set(router.argv)


def test_spares_of_engines_listen_behind_all_that_serve_at_first():
    [_, executors] = plan_engine(EngineConfig(executors=2, spare_executors=1), socket_of)
    assert [(spec.address[-4:], spec.pool) for spec in executors] == [
        *(("7702", "engine-0"), ("7703", "engine-1"), ("7704", "engine-0"), ("7705", "engine-1")),
    ]
    assert not any(spec.is_reserve for spec in executors)


def test_command_line_says_the_same_as_the_options():
    options = RouterConfig(reflection=False, max_queued_requests=3, router_id="r with spaces", drain_grace_s=1.5)
    arguments = arguments_of(options, {"executor": "x:1"})
    read = load_settings(RouterConfig, section="router", program="octavo router", argv=arguments)
    assert read == options.model_copy(update={"executor": "x:1"})
    assert len(arguments) == 5


def test_a_router_of_several_engines_is_told_of_them_on_its_command_line():
    engines = tuple(EngineAddress(name=name, cache_service=f"{name}:1", executor=f"{name}:2") for name in "ab")
    arguments = arguments_of(RouterConfig(engines=engines), {})
    read = load_settings(RouterConfig, section="router", program="octavo router", argv=arguments)
    assert read.engines == engines
    with pytest.raises(ValidationError, match=r"router\.engines cannot be set here"):
        ServeConfig.model_validate({"router": {"engines": [engines[0].model_dump()]}})


def test_engines_have_names_and_executors_of_their_own():
    """One engine is a fleet of one; a name left out is its place."""
    [only] = RouterConfig(cache_service="c:1", executor="e:1").fleet
    assert only == EngineAddress(name="engine-0", cache_service="c:1", executor="e:1")
    tables = [{"cache_service": "c:1", "executor": "e:1"}, {"name": "b", "cache_service": "c:1", "executor": "e:2"}]
    assert [engine.name for engine in RouterConfig.model_validate({"engines": tables}).fleet] == ["engine-0", "b"]
    for changed, expected in (
        ({"executor": "e:1"}, "two have the executor e:1"),
        ({"name": "engine-0"}, "two have the name engine-0"),
    ):
        with pytest.raises(ValidationError, match=expected):
            RouterConfig.model_validate({"engines": [tables[0], tables[1] | changed]})
    with pytest.raises(ValidationError, match="give the one or the others"):
        RouterConfig.model_validate({"engines": tables, "executor": "e:3"})


def test_children_get_options_from_their_command_lines_alone():
    environ = {"OCTAVO_ROUTER_LISTEN": "x", "OCTAVO_CONFIG": "f", "OCTAVO_SERVE_MODEL": "m", "HOME": "/h"}
    assert child_environment(environ) == {"HOME": "/h", "OCTAVO_LOG_PREFIXED": "1", "PYTHONUNBUFFERED": "1"}


@pytest.mark.parametrize(
    ("listen", "address"),
    [
        ("0.0.0.0:1", "127.0.0.1:1"),
        ("[::]:1", "[::1]:1"),
        ("localhost:1", "localhost:1"),
        ("unix:/run/a.sock", "unix:/run/a.sock"),
    ],
)
def test_where_to_reach_who_listens(listen, address):
    assert connect_address(listen) == address


@pytest.mark.parametrize(
    ("listen", "moved"),
    [("a:10", "a:12"), ("a:0", "a:0"), ("unix:/run/e.sock", "unix:/run/e.sock.2"), ("", "")],
)
def test_address_of_a_later_executor(listen, moved):
    assert offset_address(listen, 2) == moved


def test_restarts_wait_longer_each_time_and_end():
    policy = RestartPolicy(max_restarts=4, window_s=100, first_delay_s=1, max_delay_s=3)
    history = RestartHistory(policy)
    assert [history.next_delay_s(now_s) for now_s in (0, 1, 2, 3)] == [1, 2, 3, 3]
    assert history.next_delay_s(50) is None
    assert history.next_delay_s(100.5) == 3  # the first is forgotten


def test_processes_that_speak_tls_are_asked_for_health_on_a_private_socket():
    files = {f"internal_tls_{name}": f"/tls/{name}.pem" for name in ("certificate", "key", "ca")}
    config = {"executors": 2, "cache_service": files, "executor": files}
    [[cache], [first, second, *_]] = plan_engine(EngineConfig.model_validate(config), socket_of)
    assert (cache.address, first.address, second.address) == tuple(
        f"unix:/run/{name}.sock" for name in ("cache-health", "executor-health-0", "executor-health-1")
    )
    assert "--health-listen=unix:/run/executor-health-1.sock" in second.argv
    assert "--internal-tls-key=/tls/key.pem" in second.argv
    [_, [executor, _], [router]] = serve(router={"tls_certificate": "/tls/c.pem", "tls_key": "/tls/k.pem"})
    assert router.address == "unix:/run/router-health.sock"
    assert executor.address == "unix:/run/executor-0.sock"


def test_where_health_is_answered_by_choice_it_is_asked():
    [_, _, [router]] = serve(router={"health_listen": "0.0.0.0:7790"})
    assert router.address == "127.0.0.1:7790"
    assert "--health-listen=0.0.0.0:7790" in router.argv
    config = EngineConfig.model_validate({"executors": 2, "executor": {"health_listen": "127.0.0.1:7790"}})
    [_, [first, second, *_]] = plan_engine(config, socket_of)
    assert (first.address, second.address) == ("127.0.0.1:7790", "127.0.0.1:7791")
