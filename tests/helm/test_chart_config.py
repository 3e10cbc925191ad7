"""What the chart writes for the processes: they take it, and all parts mean the same addresses."""

import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from octavo.launch_config import EngineConfig
from octavo.launch_plan import plan_engine
from octavo.settings import load_settings
from router.config import RouterConfig
from tests.helm.chart import Rendered, cases, render, values_of, with_model

CASES = [pytest.param(case, id=str(index)) for index, case in enumerate(cases())]


def _toml(release: Rendered, name: str) -> dict[str, Any]:
    return tomllib.loads(release.named("ConfigMap", name)["data"]["octavo.toml"])


@pytest.fixture
def read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Reads a rendered file as the process does that is given it."""
    monkeypatch.delenv("OCTAVO_CONFIG", raising=False)

    def read_file(release: Rendered, name: str, model: type, section: str) -> Any:
        file = tmp_path / "octavo.toml"
        file.write_text(release.named("ConfigMap", name)["data"]["octavo.toml"])
        return load_settings(model, section=section, program="test", argv=[f"--config={file}"])

    return read_file


@pytest.mark.parametrize("case", CASES)
def test_engines_take_their_file(case: dict[str, Any], read: Callable[..., Any]) -> None:
    release = render(values_of(case))
    config: EngineConfig = read(release, "demo-octavo-engine-first", EngineConfig, "engine")
    assert config.executors == case["engine.defaults.executors"]
    assert config.executor.model_name == "organisation/llama"
    assert config.executor.device == {"cpu": "cpu", "cuda": "cuda:0"}[case["engine.defaults.device"]]
    assert config.executor.kv_memory_mib == 2048
    assert config.executor.max_rows == case["engine.defaults.executor"].get("max_rows", 64)
    assert config.cache_service.drain_grace_s == case["engine.cacheService"].get("drain_grace_s", 5)
    assert config.executor.register_timeout_s == config.start_timeout_s == 1800
    assert config.executor.otel_traces is config.cache_service.otel_traces is bool(case["tracing.endpoint"])


@pytest.mark.parametrize(("cpus", "executors", "threads"), [(4, 1, 4), (8, 2, 4), (7, 2, 3), (1, 2, 1)])
def test_threads_follow_the_processors_asked_for(cpus: int, executors: int, threads: int) -> None:
    release = render(with_model(cpus=cpus, executors=executors))
    assert _toml(release, "demo-octavo-engine-demo")["executor"]["threads"] == threads


@pytest.mark.parametrize(
    ("source", "model"),
    [
        ({"reference": "demo"}, "demo"),
        ({"reference": "organisation/llama@main"}, "organisation/llama@main"),
        ({"claim": {"name": "weights", "path": "llama/8b"}}, "/models/demo/llama/8b"),
        ({"image": {"reference": "registry/llama:1"}}, "/models/demo"),
    ],
)
def test_the_model_is_where_its_source_says_for_engine_and_router(source: dict[str, Any], model: str) -> None:
    release = render(with_model(source=source))
    assert _toml(release, "demo-octavo-engine-demo")["engine"]["model"] == model
    for name, spec in release.pod_specs():
        mounts = {mount["mountPath"]: mount for container in spec["containers"] for mount in container["volumeMounts"]}
        is_mounted = "reference" not in source and not name.endswith("-test")
        assert ("/models/demo" in mounts) == is_mounted, "a router loads the tokenizer from where the weights are"
        if is_mounted:
            assert mounts["/models/demo"]["readOnly"]


@pytest.mark.parametrize("case", CASES)
def test_the_router_takes_its_file(case: dict[str, Any], read: Callable[..., Any]) -> None:
    config: RouterConfig = read(render(values_of(case)), "demo-octavo-router", RouterConfig, "router")
    for name, value in case["router.config"].items():
        assert getattr(config, name) == value
    assert config.listen == "0.0.0.0:7700"
    names = [engine.name for engine in config.fleet]
    assert len(names) == len(set(names)) >= 1


@pytest.mark.parametrize("case", CASES)
def test_routers_know_every_engine_there_is_or_may_be(case: dict[str, Any]) -> None:
    router = _toml(render(values_of(case)), "demo-octavo-router")["router"]
    assert router.get("otel_traces", False) is bool(case["tracing.endpoint"])
    engines = router["engines"]
    is_scaled = case["engine.defaults.autoscaling.enabled"]
    expected = []
    for model_id, replicas, executors in (
        ("first", case["engine.defaults.replicas"], case["engine.defaults.executors"]),
        *([("second", 1, 1)] if case["second model"] else []),
    ):
        service = f"demo-octavo-engine-{model_id}"
        for pod in range(4 if is_scaled else replicas):
            host = f"{service}-{pod}.{service}.llm.svc.cluster.local"
            for executor in range(executors):
                name = f"{model_id}-{pod}" + (f".{executor}" if executors > 1 else "")
                addresses = {"cache_service": f"{host}:7701", "executor": f"{host}:{7702 + executor}"}
                expected.append({"name": name, **addresses})
    assert engines == expected


def test_spares_listen_where_routers_look_for_them(read: Callable[..., Any]) -> None:
    """What the chart tells the routers is where the launcher puts the executors of a pod."""
    release = render(with_model(executors=2, spareExecutors=2, replicas=1))
    config = read(release, "demo-octavo-engine-demo", EngineConfig, "engine")
    [_, executors] = plan_engine(config, lambda name: f"unix:/{name}")
    pools: dict[str, list[int]] = {}
    for spec in executors:
        [listen] = [argument for argument in spec.argv if argument.startswith("--listen=")]
        pools.setdefault(spec.pool, []).append(int(listen.rpartition(":")[2]))
    found = _toml(release, "demo-octavo-router")["router"]["engines"]
    assert [
        [int(address.rpartition(":")[2]) for address in (engine["executor"], *engine["spare_executors"])]
        for engine in found
    ] == list(pools.values())
    service = release.named("Service", "demo-octavo-engine-demo")["spec"]
    assert {port["port"] for port in service["ports"]} == {7701, *range(7702, 7708)}


@pytest.mark.parametrize("case", CASES)
def test_every_port_that_is_named_is_listened_on(case: dict[str, Any]) -> None:
    """Addresses of the file, ports of container and Service, probes, monitors and policies are of one piece."""
    release = render(values_of(case))
    executors = case["engine.defaults.executors"]
    grpc = {7701, *range(7702, 7702 + executors)}
    health = {7801, *range(7802, 7802 + executors)}
    metrics = {9701, *range(9702, 9702 + executors)}
    engine = release.named("StatefulSet", "demo-octavo-engine-first")
    [container] = engine["spec"]["template"]["spec"]["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert set(ports.values()) == grpc | health | metrics
    file = _toml(release, "demo-octavo-engine-first")
    assert file["cache_service"]["listen"] == "0.0.0.0:7701"
    assert file["cache_service"]["metrics_listen"] == "0.0.0.0:9701"
    assert file["cache_service"]["health_listen"] == "0.0.0.0:7801"
    assert file["executor"]["listen"] == "0.0.0.0:7702"
    assert file["executor"]["health_listen"] == "0.0.0.0:7802"
    assert file["executor"]["metrics_listen"] == "0.0.0.0:9702"
    service = release.named("Service", "demo-octavo-engine-first")["spec"]
    assert {port["port"] for port in service["ports"]} == grpc
    assert service["publishNotReadyAddresses"], "a router has to find a pod that still loads"
    if case["networkPolicy.enabled"]:
        [from_routers, from_monitoring] = release.named("NetworkPolicy", "demo-octavo-engine-first")["spec"]["ingress"]
        assert {port["port"] for port in from_routers["ports"]} == grpc
        assert {port["port"] for port in from_monitoring["ports"]} == metrics
    if case["monitoring.podMonitor.enabled"]:
        endpoints = release.named("PodMonitor", "demo-octavo-engine")["spec"]["podMetricsEndpoints"]
        assert {ports[endpoint["port"]] for endpoint in endpoints} == metrics


@pytest.mark.parametrize("case", CASES)
def test_files_of_secrets_are_where_the_options_say(case: dict[str, Any], read: Callable[..., Any]) -> None:
    release = render(values_of(case))
    router: RouterConfig = read(release, "demo-octavo-router", RouterConfig, "router")
    engine: EngineConfig = read(release, "demo-octavo-engine-first", EngineConfig, "engine")
    for name, sections in (
        ("demo-octavo-router", [router]),
        ("demo-octavo-engine-first", [engine.executor, engine.cache_service]),
    ):
        spec = dict(release.pod_specs())[name]
        mounts = [mount["mountPath"] for mount in spec["containers"][0]["volumeMounts"]]
        for section in sections:
            given = {
                option: value
                for option, value in section.model_dump().items()
                if option.endswith(("_certificate", "_key", "_ca", "_file")) and option != "trace_file" and value
            }
            for option, path in given.items():
                assert path.rpartition("/")[0] in mounts, option
            assert ("internal_tls_key" in given) == bool(case["tls.internalSecretName"])
    assert bool(router.tls_certificate) == bool(case["tls.secretName"])
    assert bool(router.tls_client_ca) == (bool(case["tls.secretName"]) and case["tls.requireClientCertificates"])
    assert bool(router.tenants_file) == bool(case["tenants.secretName"])
    for connects in (router, engine.executor):
        assert connects.internal_tls_server_name == ("octavo-internal" if case["tls.internalSecretName"] else "")


def test_strings_reach_the_file_whole(read: Callable[..., Any]) -> None:
    strange = 'a "b" \\ ü <&> \U0001f600'
    config = read(render(with_model(name=strange)), "demo-octavo-engine-demo", EngineConfig, "engine")
    assert config.executor.model_name == strange
