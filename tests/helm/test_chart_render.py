"""Every way of switching the chart: its objects are those expected, and Kubernetes would take each as it stands."""

import json
from typing import Any

import pytest
from helm_python.chart import lint

from tests.helm.chart import (
    FOLDER,
    NEWEST,
    OLDEST,
    OLDEST_WITH_IMAGES,
    Rendered,
    cases,
    load,
    render,
    values_of,
    violations,
    with_model,
)

CASES = [pytest.param(case, id=str(index)) for index, case in enumerate(cases())]
DEFAULT_OBJECTS = {
    ("ConfigMap", "demo-octavo-engine-demo"),
    ("ConfigMap", "demo-octavo-router"),
    ("Deployment", "demo-octavo-router"),
    ("NetworkPolicy", "demo-octavo-engine-demo"),
    ("NetworkPolicy", "demo-octavo-router"),
    ("NetworkPolicy", "demo-octavo-test"),
    ("Pod", "demo-octavo-test"),
    ("PodDisruptionBudget", "demo-octavo-engine-demo"),
    ("PodDisruptionBudget", "demo-octavo-router"),
    ("Service", "demo-octavo-engine-demo"),
    ("Service", "demo-octavo-router"),
    ("Service", "demo-octavo-router-headless"),
    ("ServiceAccount", "demo-octavo"),
    ("StatefulSet", "demo-octavo-engine-demo"),
}


def test_lint_has_nothing_to_say() -> None:
    report = lint(FOLDER, strict=True)
    assert not [message for message in report["messages"] if message["severity"] > 1], report


def test_the_version_is_that_of_the_package() -> None:
    from octavo import __version__

    assert load().metadata["appVersion"] == __version__


def test_objects_of_the_default_values() -> None:
    assert render().names == DEFAULT_OBJECTS


@pytest.mark.parametrize("case", CASES)
def test_kubernetes_takes_every_object(case: dict[str, Any]) -> None:
    oldest = OLDEST_WITH_IMAGES if case["source"] == "image" else OLDEST
    for found in render(values_of(case)).objects:
        for version in (oldest, NEWEST):
            assert not violations(found, version), (version, found["kind"], found["metadata"]["name"])


@pytest.mark.parametrize("case", CASES)
def test_objects_are_those_that_the_switches_say(case: dict[str, Any]) -> None:
    assert render(values_of(case)).names == _expected(case)


@pytest.mark.parametrize("case", CASES)
def test_what_objects_say_of_each_other_is_there(case: dict[str, Any]) -> None:
    release = render(values_of(case))
    for name, spec in release.pod_specs():
        volumes = {volume["name"] for volume in spec.get("volumes", [])}
        volumes |= {claim["metadata"]["name"] for claim in _claims(release, name)}
        mounts = [mount["name"] for container in spec["containers"] for mount in container["volumeMounts"]]
        assert set(mounts) == volumes, name
        for volume in spec.get("volumes", []):
            if "configMap" in volume:
                assert ("ConfigMap", volume["configMap"]["name"]) in release.names
        if case["serviceAccount.create"]:
            assert ("ServiceAccount", spec["serviceAccountName"]) in release.names
    for scaler in (*release.of_kind("HorizontalPodAutoscaler"), *release.of_kind("ScaledObject")):
        target = scaler["spec"]["scaleTargetRef"]
        assert "replicas" not in release.named(target["kind"], target["name"])["spec"], "two would decide"
    for workload in (*release.of_kind("StatefulSet"), *release.of_kind("Deployment")):
        labels = workload["spec"]["template"]["metadata"]["labels"]
        assert workload["spec"]["selector"]["matchLabels"].items() <= labels.items()


def _claims(release: Rendered, name: str) -> list[dict[str, Any]]:
    found = [one for one in release.of_kind("StatefulSet") if one["metadata"]["name"] == name]
    return found[0]["spec"].get("volumeClaimTemplates", []) if found else []


def _expected(case: dict[str, Any]) -> set[tuple[str, str]]:
    full = "demo-octavo"
    names = {("ConfigMap", f"{full}-router"), ("Deployment", f"{full}-router")}
    names |= {("Service", f"{full}-router"), ("Service", f"{full}-router-headless")}
    engines = [f"{full}-engine-first"] + [f"{full}-engine-second"] * case["second model"]
    kinds = ["ConfigMap", "Service", "StatefulSet"]
    kinds += ["NetworkPolicy"] * case["networkPolicy.enabled"]
    kinds += ["PodDisruptionBudget"] * case["engine.defaults.podDisruptionBudget.enabled"]
    kinds += [case["engine.defaults.autoscaling.kind"]] * case["engine.defaults.autoscaling.enabled"]
    names |= {(kind, engine) for kind in kinds for engine in engines}
    switched = {
        ("PodDisruptionBudget", f"{full}-router"): case["router.podDisruptionBudget.enabled"],
        ("GRPCRoute", full): case["router.grpcRoute.enabled"],
        ("ServiceAccount", full): case["serviceAccount.create"],
        ("NetworkPolicy", f"{full}-router"): case["networkPolicy.enabled"],
        ("NetworkPolicy", f"{full}-test"): case["networkPolicy.enabled"] and case["test.enabled"],
        ("Pod", f"{full}-test"): case["test.enabled"],
        ("PodMonitor", f"{full}-router"): case["monitoring.podMonitor.enabled"],
        ("PodMonitor", f"{full}-engine"): case["monitoring.podMonitor.enabled"],
        ("PrometheusRule", full): case["monitoring.rules.enabled"],
    }
    for dashboard in (FOLDER / "files" / "dashboards").glob("*.json"):
        switched["ConfigMap", f"{full}-dashboard-{dashboard.stem}"] = case["monitoring.dashboards.enabled"]
    return names | {name for name, is_on in switched.items() if is_on}


def test_a_changed_option_restarts_what_reads_it_and_nothing_else() -> None:
    def checksums(**values: Any) -> tuple[str, str]:
        release = render(values)
        workloads = ("Deployment", "demo-octavo-router"), ("StatefulSet", "demo-octavo-engine-demo")
        found = (release.named(*workload)["spec"]["template"] for workload in workloads)
        router, engine = (json.dumps(template, sort_keys=True) for template in found)
        return router, engine

    router, engine = checksums()
    changed_router, same_engine = checksums(router={"config": {"max_queued_requests": 5}})
    same_router, changed_engine = checksums(engine={"defaults": {"executor": {"max_rows": 5}}})
    assert (router, engine) == (same_router, same_engine)
    assert router != changed_router
    assert engine != changed_engine


def test_names_fit_however_long_the_release_is() -> None:
    values = with_model(id="a" * 20) | {"fullnameOverride": "x" * 60}
    for found in render(values).objects:
        assert len(found["metadata"]["name"]) <= 63 - len("-1234567890"), "revisions of a StatefulSet add a hash"


def test_a_digest_wins_over_a_tag() -> None:
    digest = "sha256:" + "b" * 64
    image = {"repository": "registry.example/octavo", "tag": "1", "digest": digest}
    pinned = render({"image": image}).named("Deployment", "demo-octavo-router")
    [container] = pinned["spec"]["template"]["spec"]["containers"]
    assert container["image"] == f"registry.example/octavo@{digest}"


def test_an_engine_with_an_image_of_its_own_does_not_get_the_common_digest() -> None:
    values = with_model(image={"tag": "cuda"}) | {"image": {"digest": "sha256:" + "b" * 64}}
    engine = render(values).named("StatefulSet", "demo-octavo-engine-demo")
    [container] = engine["spec"]["template"]["spec"]["containers"]
    assert container["image"] == "octavo:cuda"
