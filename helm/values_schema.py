"""Writes helm/octavo/values.schema.json; `make docs` runs it.

The options of the processes come from their configs, with their ranges, so that a mistake in a value is said by Helm
and not by a pod that does not start. What the chart sets itself is left out, and so refused.
"""

import json
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from cache_service.config import CacheServiceConfig
from executor.config import ExecutorConfig
from router.config import RouterConfig

FILE = Path(__file__).parent / "octavo" / "values.schema.json"

Schema = dict[str, Any]

# Options that the chart sets.
INTERNAL_TLS = (
    "internal_tls_certificate",
    "internal_tls_key",
    "internal_tls_ca",
    "internal_tls_server_name",
)
COMMON_WIRED = ("listen", "metrics_listen", "health_listen", *INTERNAL_TLS)
ROUTER_WIRED = (
    *COMMON_WIRED,
    *("cache_service", "executor", "spare_executors", "wanted_spares", "engines", "router_id"),
    *("tls_certificate", "tls_key", "tls_client_ca", "tenants_file", "allow_plaintext_tokens"),
)
CACHE_SERVICE_WIRED = (*COMMON_WIRED, "shared_memory_dir")
EXECUTOR_WIRED = (
    *COMMON_WIRED,
    *("executor_id", "cache_service", "register_timeout_s"),
    *("model", "model_name", "device", "kv_memory_mib"),
)

STRING_MAP: Schema = {"type": "object", "additionalProperties": {"type": "string"}}
SIZE: Schema = {"type": "string", "pattern": "^[0-9]+(\\.[0-9]+)?(Ki|Mi|Gi|Ti|k|M|G|T)?$"}
NAME: Schema = {"type": "string", "pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"}
DIGEST: Schema = {"type": "string", "pattern": "^$|^sha256:[0-9a-f]{64}$"}


def render() -> str:
    """The schema as the text of its file."""
    return json.dumps(_schema(), indent=2) + "\n"


# ------------------------------------------------------------------------------------------------------------- pieces


def _text(description: str = "", **more: Any) -> Schema:
    return {"type": "string", **_described(description), **more}


def _flag(description: str = "") -> Schema:
    return {"type": "boolean", **_described(description)}


def _count(minimum: int, description: str = "", **more: Any) -> Schema:
    return {"type": "integer", "minimum": minimum, **_described(description), **more}


def _list(items: Schema, description: str = "") -> Schema:
    return {"type": "array", "items": items, **_described(description)}


def _described(description: str) -> Schema:
    return {"description": description} if description else {}


def _object(properties: Schema, description: str = "", required: tuple[str, ...] = ()) -> Schema:
    """An object of these properties and no others."""
    schema = {"type": "object", "additionalProperties": False, **_described(description), "properties": properties}
    return {**schema, "required": list(required)} if required else schema


def _options(config: type[BaseModel], wired: tuple[str, ...], table: str) -> Schema:
    """The options of a process but for those that the chart sets."""
    known = config.model_json_schema()["properties"]
    dropped = {"title", "default"}
    kept = {
        name: {key: value for key, value in about.items() if key not in dropped}
        for name, about in known.items()
        if name not in wired
    }
    return _object(kept, f"options of table [{table}]; those that the chart sets itself are refused")


# --------------------------------------------------------------------------------------------------------- components


def _image(description: str) -> Schema:
    return _object({"repository": _text(), "tag": _text(), "digest": DIGEST}, description)


def _placement() -> Schema:
    any_object: Schema = {"type": "object"}
    return {
        "podLabels": STRING_MAP,
        "podAnnotations": STRING_MAP,
        "nodeSelector": STRING_MAP,
        "tolerations": _list(any_object),
        "affinity": any_object,
        "topologySpread": _flag("spread the pods over nodes"),
        "priorityClassName": _text(),
    }


def _disruption_budget() -> Schema:
    number_or_share = {"type": ["integer", "string"], "minimum": 0, "pattern": "^[0-9]+%$"}
    return _object({"enabled": _flag(), "maxUnavailable": number_or_share})


def _router() -> Schema:
    service = {
        "type": _text(enum=["ClusterIP", "NodePort", "LoadBalancer"]),
        "port": _count(1, maximum=65535),
        "annotations": STRING_MAP,
    }
    route = {"enabled": _flag(), "parentRefs": _list({"type": "object"}), "hostnames": _list(_text())}
    quantities = {"type": "object", "additionalProperties": {"type": ["string", "number"]}}
    return _object(
        {
            "replicas": _count(1),
            "config": _options(RouterConfig, ROUTER_WIRED, "router"),
            "resources": _object({"requests": quantities, "limits": quantities}),
            **_drain(),
            "service": _object(service),
            "grpcRoute": _object(route, "a GRPCRoute of the Gateway API"),
            "podDisruptionBudget": _disruption_budget(),
            **_placement(),
        }
    )


def _drain() -> Schema:
    return {
        "preStopSleepS": _count(0, "seconds before the process is told to end"),
        "terminationGraceS": _count(0, "seconds from deletion to SIGKILL; 0: as long as preStop and drain take"),
    }


def _autoscaling() -> Schema:
    return _object(
        {
            "enabled": _flag(),
            "kind": _text(enum=["HorizontalPodAutoscaler", "ScaledObject"]),
            "minReplicas": _count(1),
            "maxReplicas": _count(1),
            "targetWaiting": _count(1, "waiting requests per pod"),
            "targetKvUsage": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
            "scaleDownStabilizationS": _count(0),
            "prometheusUrl": _text("asked by KEDA", format="uri"),
        }
    )


def _engine_values() -> Schema:
    cache = {"persistent": _flag("a volume of its own for each pod"), "size": SIZE, "storageClass": _text()}
    return {
        "replicas": _count(1, "pods; where autoscaling is on, it decides"),
        "executors": _count(1, "executors of a pod; they share its KV blocks", maximum=64),
        "spareExecutors": _count(
            0, "spares of each executor, attached and loaded; each has the weights too", maximum=16
        ),
        "device": _text(enum=["cpu", "cuda"]),
        "gpuResource": _text("of which a pod on cuda asks for one"),
        "kvMemoryMib": _count(1, "MiB of KV blocks of a pod"),
        "processMemoryMib": _count(256, "MiB of all else in the pod: weights, activations, processes"),
        "cpus": _count(1),
        "executor": _options(ExecutorConfig, EXECUTOR_WIRED, "executor"),
        "startTimeoutS": _count(10, "seconds that loading a model may take"),
        **_drain(),
        "cache": _object(cache, "what is downloaded or converted"),
        "podDisruptionBudget": _disruption_budget(),
        "autoscaling": _autoscaling(),
        **_placement(),
        "runtimeClassName": _text(),
        "image": _image("instead of the common image"),
    }


def _source() -> Schema:
    path = _text("inside the volume", pattern="^[^/].*$")
    reference = _text("demo, or organisation/name[@revision] of the hub", pattern="^(demo|[^/]+/[^/]+)$")
    claim = _object({"name": _text(minLength=1), "path": path}, "a PersistentVolumeClaim", required=("name",))
    image = _object(
        {"reference": _text(minLength=1), "path": path, "pullPolicy": _text(enum=["Always", "IfNotPresent", "Never"])},
        "an image that is mounted as a volume",
        required=("reference",),
    )
    whole = _object(
        {"reference": reference, "claim": claim, "image": image}, "where the model comes from: one of these"
    )
    return {**whole, "minProperties": 1, "maxProperties": 1}


def _engine() -> Schema:
    own = {
        "id": {**NAME, "maxLength": 20, "description": "names the model's objects and engines"},
        "name": _text("what clients ask for; two may have the same", minLength=1),
        "source": _source(),
    }
    values = _engine_values()
    models = _list(_object({**own, **values}, required=tuple(own)), "the models that are served")
    return _object(
        {
            "cacheService": _options(CacheServiceConfig, CACHE_SERVICE_WIRED, "cache_service"),
            "defaults": _object(values, "what holds for a model that says nothing else"),
            "models": {**models, "minItems": 1},
        }
    )


def _tls() -> Schema:
    return _object(
        {
            "secretName": _text("Secret with tls.crt and tls.key of the public API; empty: no TLS"),
            "requireClientCertificates": _flag("of the CA in that Secret's ca.crt"),
            "internalSecretName": _text(
                "Secret with tls.crt, tls.key and ca.crt, for routers and engines; empty: no TLS"
            ),
            "internalServerName": _text("the name that certificate is for", minLength=1),
        }
    )


def _tenants() -> Schema:
    return _object(
        {
            "secretName": _text("Secret with the tenants file; empty: everybody may call"),
            "key": _text("of the file in the Secret", minLength=1),
            "allowPlaintextTokens": _flag("take tokens without TLS, where something else protects them"),
        }
    )


def _test() -> Schema:
    return _object(
        {
            "enabled": _flag(),
            "prompt": _text(minLength=1),
            "tlsSecretName": _text("Secret with a client certificate: tls.crt, tls.key"),
            "tokenSecret": _object({"name": _text("empty: no token"), "key": _text(minLength=1)}),
        }
    )


def _monitoring() -> Schema:
    monitor = {"enabled": _flag(), "interval": _text(pattern="^[0-9]+(ms|s|m)$"), "labels": STRING_MAP}
    rules = {
        "enabled": _flag(),
        "labels": STRING_MAP,
        "alertLabels": STRING_MAP,
        "disabled": _list(_text(), "names of alerts"),
        "runbookUrl": _text("page that runbook links lead to"),
        "vllm": _flag("also record vllm:* series"),
    }
    dashboards = {"enabled": _flag(), "labels": STRING_MAP, "annotations": STRING_MAP}
    return _object({"podMonitor": _object(monitor), "rules": _object(rules), "dashboards": _object(dashboards)})


def _tracing() -> Schema:
    return _object(
        {
            "endpoint": _text(
                "of an OpenTelemetry collector, with its port: http://host:4317; empty: no traces",
                pattern="^$|^https?://[^/:]+:[0-9]+$",
            ),
            "samplingRatio": {"type": "number", "minimum": 0, "maximum": 1},
        }
    )


def _variable() -> Schema:
    variable = {"name": _text(pattern="^[A-Za-z_][A-Za-z0-9_]*$"), "value": _text(), "valueFrom": {"type": "object"}}
    return _object(variable, "an EnvVar", required=("name",))


def _schema() -> Schema:
    peers = _list({"type": "object"}, "entries of NetworkPolicyPeer; none: nobody")
    policy = {
        "enabled": _flag(),
        "clients": peers,
        "monitoring": peers,
        "collector": peers,
        "dnsPort": _count(1, maximum=65535),
    }
    image = _image("of every container")
    image["properties"]["pullPolicy"] = _text(enum=["Always", "IfNotPresent", "Never"])
    secret = _object({"name": _text("empty: no token"), "key": _text(minLength=1)})
    values = {
        "nameOverride": _text(),
        "fullnameOverride": _text(),
        "clusterDomain": _text(minLength=1),
        "image": image,
        "imagePullSecrets": _list(_object({"name": _text(minLength=1)}, required=("name",))),
        "hub": _object({"tokenSecret": secret, "endpoint": _text()}),
        "tls": _tls(),
        "tenants": _tenants(),
        "router": _router(),
        "engine": _engine(),
        "serviceAccount": _object({"create": _flag(), "name": _text(), "annotations": STRING_MAP}),
        "networkPolicy": _object(policy),
        "tracing": _tracing(),
        "extraEnv": _list(_variable(), "environment of routers and engines besides"),
        "monitoring": _monitoring(),
        "test": _test(),
        "global": {"type": "object"},  # given to every chart by Helm
    }
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "Values of the Octavo chart"} | _object(
        values
    )


if __name__ == "__main__":
    FILE.write_text(render(), "utf-8")
