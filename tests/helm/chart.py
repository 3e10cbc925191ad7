"""The chart, rendered without a cluster, as objects; and the cases that its tests go through."""

import copy
import functools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema
import yaml
from helm_python.chart import Chart
from kubernetes_validate.utils import schema_contents
from referencing import Registry, Resource

from tests.kernels.pairwise import pairwise

FOLDER = Path(__file__).parents[2] / "helm" / "octavo"
RELEASE, NAMESPACE = "demo", "llm"
# The oldest that the chart takes, and the oldest that mounts images; the newest whose schemas there are.
OLDEST, OLDEST_WITH_IMAGES, NEWEST = "1.30.0", "1.33.0", "1.37.0"
CUSTOM_GROUPS = ("monitoring.coreos.com", "keda.sh", "gateway.networking.k8s.io")

Object = dict[str, Any]

MODEL: Object = {"id": "demo", "name": "SmolLM2-135M-Instruct", "source": {"reference": "demo"}}

SOURCES: dict[str, Object] = {
    "demo": {"reference": "demo"},
    "hub": {"reference": "organisation/llama@main"},
    "claim": {"claim": {"name": "weights", "path": "llama/8b"}},
    "image": {"image": {"reference": "registry.example/models/llama:1"}},
}

# Every way that the chart can be switched. Of each two, every combination is rendered in some case.
FACTORS: dict[str, tuple[Any, ...]] = {
    "router.replicas": (1, 3),
    "router.preStopSleepS": (0, 15),
    "router.grpcRoute.enabled": (False, True),
    "router.podDisruptionBudget.enabled": (False, True),
    "router.topologySpread": (False, True),
    "router.config": ({}, {"max_queued_requests": 1000, "drain_grace_s": 120.5, "reflection": False}),
    "router.service.type": ("ClusterIP", "LoadBalancer"),
    "router.service.port": (7700, 80),
    "engine.cacheService": ({}, {"drain_grace_s": 20, "log_level": "debug"}),
    "engine.defaults.replicas": (1, 2),
    "engine.defaults.executors": (1, 2),
    "engine.defaults.device": ("cpu", "cuda"),
    "engine.defaults.executor": ({}, {"block_size": 32, "max_rows": 8, "threads": 3}),
    "engine.defaults.preStopSleepS": (0, 5),
    "engine.defaults.cache.persistent": (False, True),
    "engine.defaults.podDisruptionBudget.enabled": (False, True),
    "engine.defaults.autoscaling.enabled": (False, True),
    "engine.defaults.autoscaling.kind": ("HorizontalPodAutoscaler", "ScaledObject"),
    "engine.defaults.topologySpread": (False, True),
    "placement": (False, True),
    "source": tuple(SOURCES),
    "second model": (False, True),
    "serviceAccount.create": (False, True),
    "networkPolicy.enabled": (False, True),
    "monitoring.podMonitor.enabled": (False, True),
    "monitoring.rules.enabled": (False, True),
    "monitoring.rules.vllm": (False, True),
    "monitoring.dashboards.enabled": (False, True),
    "tracing.endpoint": ("", "http://collector.monitoring:4317"),
    "test.enabled": (False, True),
    "image.digest": ("", "sha256:" + "a" * 64),
    "hub.tokenSecret.name": ("", "hub-token"),
    "tls.secretName": ("", "public-tls"),
    "tls.requireClientCertificates": (False, True),
    "tls.internalSecretName": ("", "internal-tls"),
    "tenants.secretName": ("", "tenants"),
}
_PLACEMENT = {
    "nodeSelector": {"pool": "fast"},
    "tolerations": [{"key": "gpu", "operator": "Exists", "effect": "NoSchedule"}],
    "affinity": {
        "nodeAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": {
                "nodeSelectorTerms": [{"matchExpressions": [{"key": "disk", "operator": "In", "values": ["fast"]}]}]
            }
        }
    },
    "priorityClassName": "serving",
    "podLabels": {"team": "a"},
    "podAnnotations": {"note": "b"},
}


class _UniqueKeyLoader(yaml.CSafeLoader):
    """YAML as Kubernetes' strict reading has it: a key that stands twice is a mistake."""


def _mapping(loader: _UniqueKeyLoader, node: yaml.MappingNode) -> Object:
    keys = [loader.construct_object(key) for key, _ in node.value]
    twice = {key for key in keys if keys.count(key) > 1}
    assert not twice, f"line {node.start_mark.line}: {twice} stands twice"
    loader.flatten_mapping(node)
    return dict(loader.construct_pairs(node))


_UniqueKeyLoader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)


@dataclass(frozen=True)
class Rendered:
    """All objects of a release."""

    objects: list[Object]

    def of_kind(self, kind: str) -> list[Object]:
        return [found for found in self.objects if found["kind"] == kind]

    def named(self, kind: str, name: str) -> Object:
        [found] = [found for found in self.of_kind(kind) if found["metadata"]["name"] == name]
        return found

    @property
    def names(self) -> set[tuple[str, str]]:
        return {(found["kind"], found["metadata"]["name"]) for found in self.objects}

    def pod_specs(self) -> Iterator[tuple[str, Object]]:
        for found in self.objects:
            if found["kind"] == "Pod":
                yield found["metadata"]["name"], found["spec"]
            elif "template" in found.get("spec", {}):
                yield found["metadata"]["name"], found["spec"]["template"]["spec"]


@functools.cache
def load() -> Chart:
    return Chart.load(FOLDER)


def render(values: Mapping[str, Any] | None = None) -> Rendered:
    """The objects that `helm install` would create with these values.

    Raises:
        helm_python.errors.HelmError: the values are refused, by the schema or by a template.
    """
    return Rendered(copy.deepcopy(_render(json.dumps(values or {}))))


@functools.cache
def _render(values_json: str) -> list[Object]:
    chart, values = load(), json.loads(values_json)
    chart.validate_schema(values)  # as install does before it renders
    texts = chart.render(values, name=RELEASE, namespace=NAMESPACE)
    documents = [
        document
        for path, text in sorted(texts.items())
        if path.endswith(".yaml")
        for document in yaml.load_all(text, _UniqueKeyLoader)
    ]
    return [document for document in documents if document]


def nested(paths: Mapping[str, Any]) -> Object:
    """`{"a.b": 1}` as `{"a": {"b": 1}}`."""
    values: Object = {}
    for path, value in paths.items():
        *parents, last = path.split(".")
        inner = values
        for parent in parents:
            inner = inner.setdefault(parent, {})
        inner[last] = value
    return values


def with_model(**values: Any) -> Object:
    """Values with one model that says this for itself."""
    return {"engine": {"models": [MODEL | values]}}


def cases() -> list[dict[str, Any]]:
    """Factors of cases that hold every combination of every two."""
    return pairwise(FACTORS, candidates=20)


def values_of(case: Mapping[str, Any]) -> Object:
    """The values that a case stands for."""
    special = ("placement", "source", "second model", "router.grpcRoute.enabled")
    values = nested({path: value for path, value in case.items() if path not in special})
    if case["placement"]:
        values["router"] |= _PLACEMENT
        values["engine"]["defaults"] |= _PLACEMENT | {"runtimeClassName": "nvidia"}
    if case["router.grpcRoute.enabled"]:
        values["router"]["grpcRoute"] = {"enabled": True, "parentRefs": [{"name": "gateway"}], "hostnames": ["a.b"]}
    values["tenants"]["allowPlaintextTokens"] = not case["tls.secretName"]
    values["test"] |= {"tlsSecretName": "client-tls", "tokenSecret": {"name": "test-token"}}
    models = [{"id": "first", "name": "organisation/llama", "source": SOURCES[case["source"]]}]
    if case["second model"]:
        models.append({"id": "second", "name": "b", "source": {"reference": "demo"}, "replicas": 1, "executors": 1})
    values["engine"]["models"] = models
    return values


def violations(found: Object, version: str) -> list[str]:
    """What of an object Kubernetes of that version would refuse or drop; nothing for kinds that are not its own."""
    group = found["apiVersion"].rpartition("/")[0]
    if group in CUSTOM_GROUPS:
        return []
    validator = _validator(found["kind"].lower(), found["apiVersion"], version)
    return [f"{error.json_path}: {error.message}" for error in validator.iter_errors(found)]


@functools.cache
def _validator(kind: str, api_version: str, version: str) -> jsonschema.Draft202012Validator:
    group, _, number = api_version.rpartition("/")
    stem = f"{kind}-{group.partition('.')[0]}-{number}" if group else f"{kind}-{number}"
    schema = schema_contents(f"{_schema_folder(version)}/{stem}.json", version)
    return jsonschema.Draft202012Validator(schema, registry=_definitions(version))


@functools.cache
def _definitions(version: str) -> Registry:
    contents = schema_contents(f"{_schema_folder(version)}/_definitions.json", version)
    return Registry().with_resource(contents["$id"], Resource.from_contents(contents))


def _schema_folder(version: str) -> str:
    return f"kubernetes-json-schema/v{version}-local-strict"
