"""What every pod of the chart has to hold: security, memory, health and a drain that is waited for."""

import math
from typing import Any

import pytest
from helm_python.errors import HelmError

from cache_service.config import CacheServiceConfig
from executor.config import ExecutorConfig
from octavo import launch_plan
from octavo.rpc import LIVENESS
from router.config import RouterConfig
from tests.helm.chart import NEWEST, Object, cases, nested, render, values_of, violations, with_model

CASES = [pytest.param(case, id=str(index)) for index, case in enumerate(cases())]
UNITS = {"Mi": 1, "Gi": 1024}


def _mib(quantity: str) -> int:
    return int(quantity[:-2]) * UNITS[quantity[-2:]]


def _volume(spec: Object, name: str) -> Object:
    [volume] = [volume for volume in spec["volumes"] if volume["name"] == name]
    return volume


def _engine(values: Object | None = None, model_id: str = "demo") -> Object:
    return render(values).named("StatefulSet", f"demo-octavo-engine-{model_id}")["spec"]["template"]["spec"]


def _router(values: Object | None = None) -> Object:
    return render(values).named("Deployment", "demo-octavo-router")["spec"]["template"]["spec"]


# ----------------------------------------------------------------------------------------------------------- security


@pytest.mark.parametrize("case", CASES)
def test_pods_keep_to_the_restricted_standard(case: dict[str, Any]) -> None:
    """The Pod Security Standard `restricted`, and beyond it a root file system that nothing can write."""
    for name, spec in render(values_of(case)).pod_specs():
        assert spec["securityContext"]["runAsNonRoot"], name
        assert spec["securityContext"]["runAsUser"] > 10_000, "no user of a node has it"
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not spec["automountServiceAccountToken"]
        assert not spec["enableServiceLinks"]
        assert not {"hostNetwork", "hostPID", "hostIPC", "shareProcessNamespace"} & spec.keys()
        assert not any("hostPath" in volume for volume in spec["volumes"])
        for container in spec["containers"]:
            context = container["securityContext"]
            assert context["capabilities"] == {"drop": ["ALL"]}
            assert not context["allowPrivilegeEscalation"]
            assert context["readOnlyRootFilesystem"]
            assert context["runAsNonRoot"]
            assert "memory" in container["resources"]["limits"], "a leak ends the container, not the node"


@pytest.mark.parametrize("case", CASES)
def test_what_is_written_lies_in_volumes_of_bounded_size(case: dict[str, Any]) -> None:
    for _, spec in render(values_of(case)).pod_specs():
        for volume in spec["volumes"]:
            if "emptyDir" in volume:
                assert "sizeLimit" in volume["emptyDir"], volume
        for container in spec["containers"]:
            variables = {variable["name"]: variable.get("value") for variable in container["env"]}
            mounts = {mount["mountPath"] for mount in container["volumeMounts"] if not mount.get("readOnly")}
            assert variables["HOME"] in mounts
            if "/var/cache/octavo" in mounts:
                assert variables["XDG_CACHE_HOME"] in mounts


def test_keys_are_read_by_their_group_alone_and_go_nowhere_else() -> None:
    values = {
        "tls": {"secretName": "public", "internalSecretName": "internal"},
        "tenants": {"secretName": "tenants"},
        "test": {"tokenSecret": {"name": "token"}},
    }
    secrets = {
        name: {volume["secret"]["secretName"]: volume["secret"] for volume in spec["volumes"] if "secret" in volume}
        for name, spec in render(values).pod_specs()
    }
    assert {name: set(found) for name, found in secrets.items()} == {
        "demo-octavo-router": {"public", "internal", "tenants"},
        "demo-octavo-engine-demo": {"internal"},
        "demo-octavo-test": {"public", "token"},
    }
    assert secrets["demo-octavo-test"]["public"]["items"] == [{"key": "ca.crt", "path": "ca.crt"}], "not the key"
    assert all(secret["defaultMode"] == 0o440 for found in secrets.values() for secret in found.values())


@pytest.mark.parametrize(
    ("values", "what"),
    [
        ({"tenants": {"secretName": "a"}, "test": {"enabled": False}}, "tokens would cross the network in plain text"),
        ({"tenants": {"secretName": "a"}, "tls": {"secretName": "b"}}, "the test has no token"),
        ({"tls": {"secretName": "b", "requireClientCertificates": True}}, "the test has none"),
    ],
)
def test_what_would_not_start_or_not_answer_is_refused(values: Object, what: str) -> None:
    with pytest.raises(HelmError, match=what):
        render(values)


def test_a_token_of_the_hub_goes_only_to_pods_that_use_the_hub() -> None:
    models = [
        {"id": "hub", "name": "a", "source": {"reference": "organisation/a"}},
        {"id": "own", "name": "b", "source": {"claim": {"name": "weights"}}},
    ]
    release = render({"engine": {"models": models}, "hub": {"tokenSecret": {"name": "hub-token"}}})
    tokens = {
        name: any(variable["name"] == "HF_TOKEN" for variable in spec["containers"][0]["env"])
        for name, spec in release.pod_specs()
    }
    assert tokens == {
        "demo-octavo-engine-hub": True,
        "demo-octavo-engine-own": False,
        "demo-octavo-router": True,
        "demo-octavo-test": False,
    }


def test_only_pods_that_use_the_hub_reach_beyond_the_cluster() -> None:
    def egress(values: Object) -> dict[str, bool]:
        policies = render(values).of_kind("NetworkPolicy")
        return {
            policy["metadata"]["name"].removeprefix("demo-octavo-"): any(
                {"port": 443, "protocol": "TCP"} in rule["ports"] for rule in policy["spec"]["egress"]
            )
            for policy in policies
        }

    closed = {"engine-demo": False, "router": False, "test": False}
    assert egress({}) == closed
    assert egress(with_model(source={"reference": "a/b"})) == closed | {"engine-demo": True, "router": True}


TRACED = {"tracing": {"endpoint": "http://collector.monitoring:4317", "samplingRatio": 0.05}}


def test_traces_go_to_the_collector_and_nothing_else_does() -> None:
    release = render(TRACED)
    peers = [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}]
    rule = {"to": peers, "ports": [{"port": 4317, "protocol": "TCP"}]}
    dns = [{"port": 53, "protocol": protocol} for protocol in ("UDP", "TCP")]
    assert release.named("NetworkPolicy", "demo-octavo-engine-demo")["spec"]["egress"] == [{"ports": dns}, rule]
    assert rule in release.named("NetworkPolicy", "demo-octavo-router")["spec"]["egress"]
    assert rule not in release.named("NetworkPolicy", "demo-octavo-test")["spec"]["egress"]
    nobody = render({**TRACED, "networkPolicy": {"collector": []}})
    assert nobody.named("NetworkPolicy", "demo-octavo-engine-demo")["spec"]["egress"] == []
    asked = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector.monitoring:4317",
        "OTEL_TRACES_SAMPLER": "parentbased_traceidratio",
        "OTEL_TRACES_SAMPLER_ARG": "0.05",
    }
    for found, wanted in ((release, asked), (render(), {})):
        for name, spec in found.pod_specs():
            environment = {entry["name"]: entry.get("value") for entry in spec["containers"][0]["env"]}
            told = {key: value for key, value in environment.items() if key.startswith("OTEL_")}
            assert told == ({} if name == "demo-octavo-test" else wanted), name


def test_routers_and_engines_take_variables_of_the_values() -> None:
    secret = {"secretKeyRef": {"name": "collector", "key": "headers"}}
    more = [{"name": "OTEL_EXPORTER_OTLP_HEADERS", "valueFrom": secret}, {"name": "A", "value": "1"}]
    for values in ({"extraEnv": more}, {**TRACED, "extraEnv": more}):
        release = render(values)
        for found in release.objects:
            assert not violations(found, NEWEST)
        for name, spec in release.pod_specs():
            has_them = spec["containers"][0]["env"][-2:] == more
            assert has_them is (name != "demo-octavo-test"), name


def test_engines_hear_routers_and_monitoring_alone() -> None:
    policy = render().named("NetworkPolicy", "demo-octavo-engine-demo")["spec"]
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    [routers, monitoring] = policy["ingress"]
    [peer] = routers["from"]
    assert peer["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == "router"
    assert "namespaceSelector" not in peer
    assert monitoring["from"] == [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}]


def test_nobody_named_is_nobody_let_in() -> None:
    """An empty list of peers in a policy would mean everybody."""
    values = {"networkPolicy": {"clients": [], "monitoring": []}, "test": {"enabled": False}}
    for policy in render(values).of_kind("NetworkPolicy"):
        for rule in policy["spec"].get("ingress") or []:
            assert rule["from"], policy["metadata"]["name"]


# ------------------------------------------------------------------------------------------------------------- memory


@pytest.mark.parametrize("case", CASES)
def test_shared_memory_holds_the_pool_and_counts_in_the_limit(case: dict[str, Any]) -> None:
    """Field failure 38: too little /dev/shm. 64 MiB, what a container has of its own, holds no pool."""
    spec = _engine(values_of(case), "first")
    shm = _volume(spec, "shm")["emptyDir"]
    [container] = spec["containers"]
    assert shm["medium"] == "Memory"
    assert {"name": "shm", "mountPath": "/dev/shm"} in container["volumeMounts"]
    pool_mib = 2048 if case["engine.defaults.device"] == "cpu" else 0
    shm_mib, limit_mib = _mib(shm["sizeLimit"]), _mib(container["resources"]["limits"]["memory"])
    assert shm_mib >= pool_mib + 32, "blocks, and their ledger"
    assert limit_mib == 4096 + shm_mib
    assert container["resources"]["requests"]["memory"] == container["resources"]["limits"]["memory"]


def test_a_large_pool_has_room_for_its_ledger() -> None:
    """640 bytes for each block, and blocks are 20 kB at least for any model that is worth serving."""
    pool_mib = 64 * 1024
    shm = _volume(_engine(with_model(kvMemoryMib=pool_mib)), "shm")["emptyDir"]
    assert _mib(shm["sizeLimit"]) >= pool_mib + pool_mib * 640 / 20_480


def test_gpus_are_asked_for_where_the_device_is_one() -> None:
    on_gpu = _engine(with_model(device="cuda", gpuResource="nvidia.com/mig-1g.10gb"))
    assert on_gpu["containers"][0]["resources"]["limits"]["nvidia.com/mig-1g.10gb"] == 1
    on_cpu = _engine()
    assert set(on_cpu["containers"][0]["resources"]["limits"]) == {"memory"}


# ------------------------------------------------------------------------------------------------------------- health


def test_a_router_lives_without_an_engine() -> None:
    """Restarting it would help nobody: it is not ready, and that is all."""
    [container] = _router()["containers"]
    assert (
        container["startupProbe"]["grpc"] == container["livenessProbe"]["grpc"] == {"port": 7800, "service": LIVENESS}
    )
    assert container["readinessProbe"]["grpc"] == {"port": 7800, "service": launch_plan.ROUTER_HEALTH}


def test_an_engine_is_given_the_time_that_loading_takes() -> None:
    [container] = _engine(with_model(startTimeoutS=1000))["containers"]
    probe = container["startupProbe"]
    assert probe["grpc"] == {"port": 7802, "service": launch_plan.EXECUTOR_HEALTH}
    assert probe["periodSeconds"] * probe["failureThreshold"] > 1000, "the launcher says why, if it is let"
    assert container["readinessProbe"]["grpc"] == probe["grpc"]
    assert container["livenessProbe"]["grpc"] == {"port": 7801, "service": LIVENESS}


# -------------------------------------------------------------------------------------------------------------- drain


@pytest.mark.parametrize("case", CASES)
def test_nothing_is_killed_that_still_drains(case: dict[str, Any]) -> None:
    values = values_of(case)
    router, engine = _router(values), _engine(values, "first")
    router_options = RouterConfig(**case["router.config"])
    drain_s = router_options.drain_accept_window_s + router_options.drain_grace_s
    assert router["terminationGracePeriodSeconds"] > case["router.preStopSleepS"] + drain_s
    executor = ExecutorConfig(**case["engine.defaults.executor"])
    cache_service = CacheServiceConfig(**case["engine.cacheService"])
    drain_s = sum(
        options.drain_accept_window_s + options.drain_grace_s + launch_plan._STOP_MARGIN_S
        for options in (executor, cache_service)
    )
    assert engine["terminationGracePeriodSeconds"] > math.ceil(case["engine.defaults.preStopSleepS"] + drain_s)
    for spec, sleep_s in ((router, case["router.preStopSleepS"]), (engine, case["engine.defaults.preStopSleepS"])):
        hook = spec["containers"][0].get("lifecycle")
        assert hook == ({"preStop": {"sleep": {"seconds": sleep_s}}} if sleep_s else None)


@pytest.mark.parametrize(
    ("paths", "what"),
    [
        ({"router.terminationGraceS": 42}, "router: terminationGraceS is 42: preStop and drain take up to 42 s"),
        (
            {"router.terminationGraceS": 60, "router.config": {"drain_grace_s": 300}},
            "router: terminationGraceS is 60: preStop and drain take up to 312 s",
        ),
        ({"engine.defaults.terminationGraceS": 30}, "engine.models, demo: terminationGraceS is 30"),
    ],
)
def test_a_grace_that_is_too_short_is_refused(paths: dict[str, Any], what: str) -> None:
    with pytest.raises(HelmError, match=what):
        render(nested(paths))


def test_a_grace_that_is_long_enough_is_kept() -> None:
    assert _router({"router": {"terminationGraceS": 43}})["terminationGracePeriodSeconds"] == 43


def test_rolling_out_routers_loses_none_and_engines_need_no_second_gpu() -> None:
    release = render()
    strategy = release.named("Deployment", "demo-octavo-router")["spec"]["strategy"]
    assert strategy["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}
    # A StatefulSet replaces one pod at a time, and never runs two of one name.
    engine = release.named("StatefulSet", "demo-octavo-engine-demo")["spec"]
    assert engine["updateStrategy"] == {"type": "RollingUpdate"}
