"""The values' schema: written from the configs, closed at every level, and in step with values.yaml."""

import importlib.util
import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from helm_python.errors import HelmError

from tests.helm.chart import FOLDER, Object, load, nested, render, with_model


def test_the_schema_is_what_the_configs_say() -> None:
    spec = importlib.util.spec_from_file_location("values_schema", FOLDER.parent / "values_schema.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.FILE.read_text("utf-8") == module.render(), "run make docs"


def _objects(schema: Object, path: str = "") -> Iterator[tuple[str, Object]]:
    if "properties" in schema:
        yield path, schema
    for name, inner in schema.get("properties", {}).items():
        yield from _objects(inner, f"{path}.{name}".lstrip("."))


def _known() -> Object:
    schema = load().schema
    assert schema is not None
    return schema


CLOSED = [path for path, _ in _objects(_known())]


@pytest.mark.parametrize("path", CLOSED)
def test_unknown_keys_are_refused(path: str) -> None:
    with pytest.raises(HelmError, match="unknownKey"):
        render(nested({f"{path}.unknownKey".lstrip("."): 1}))


@pytest.mark.parametrize("path", ["", "source", "executor", "autoscaling"])
def test_unknown_keys_of_a_model_are_refused(path: str) -> None:
    with pytest.raises(HelmError, match="unknownKey"):
        render(with_model(**nested({f"{path}.unknownKey".lstrip("."): 1})))


def test_every_value_has_a_default_and_every_default_a_schema() -> None:
    """But for options of the processes, which have their own defaults, and what is a list."""
    options = {"router.config", "engine.cacheService", "engine.defaults.executor"}
    given = dict(_leaves(load().values))
    for path, schema in _objects(_known()):
        for name, about in schema["properties"].items():
            whole = f"{path}.{name}".lstrip(".")
            if path not in options and whole not in options and "properties" not in about and whole != "global":
                assert whole in given or _is_in(load().values, whole), f"{whole} is not in values.yaml"


def _leaves(values: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(values, dict) and values:
        for name, value in values.items():
            yield from _leaves(value, f"{path}.{name}".lstrip("."))
    else:
        yield path, values


def _is_in(values: Any, path: str) -> bool:
    for name in path.split("."):
        if not isinstance(values, dict) or name not in values:
            return False
        values = values[name]
    return True


@pytest.mark.parametrize(
    ("paths", "what"),
    [
        ({"router.replicas": 0}, "replicas"),
        ({"router.config": {"max_steps_in_flight": 3}}, "max_steps_in_flight"),
        ({"router.config": {"listen": "0.0.0.0:1"}}, "listen"),
        ({"router.config": {"engines": []}}, "engines"),
        ({"router.config": {"tls_key": "/key"}}, "tls_key"),
        ({"engine.defaults.executor": {"health_listen": "0.0.0.0:1"}}, "health_listen"),
        ({"engine.defaults.executor": {"block_size": 0}}, "block_size"),
        ({"engine.defaults.executor": {"model": "other"}}, "model"),
        ({"engine.defaults.executor": {"kv_memory_mib": 1}}, "kv_memory_mib"),
        ({"engine.defaults.device": "tpu"}, "device"),
        ({"engine.defaults.kvMemoryMib": "2Gi"}, "kvMemoryMib"),
        ({"engine.defaults.cache": {"size": "much"}}, "size"),
        ({"engine.cacheService": {"shared_memory_dir": "/tmp"}}, "shared_memory_dir"),
        ({"image": {"digest": "latest"}}, "digest"),
        ({"monitoring.podMonitor.interval": "often"}, "interval"),
        ({"engine.models": []}, "models"),
        ({"tracing.endpoint": "collector:4317"}, "endpoint"),
        ({"tracing.endpoint": "http://collector"}, "endpoint"),
        ({"tracing.samplingRatio": 1.5}, "samplingRatio"),
        ({"extraEnv": [{"value": "nameless"}]}, "name"),
        ({"extraEnv": [{"name": "A", "values": "b"}]}, "values"),
    ],
)
def test_values_out_of_range_are_refused_with_their_name(paths: dict[str, Any], what: str) -> None:
    with pytest.raises(HelmError, match=what):
        render(nested(paths))


@pytest.mark.parametrize(
    ("model", "what"),
    [
        ({"id": "Upper"}, "id"),
        ({"id": "a" * 21}, "id"),
        ({"name": ""}, "name"),
        ({"source": {}}, "source"),
        ({"source": {"reference": "demo", "claim": {"name": "a"}}}, "source"),
        ({"source": {"reference": "/folder"}}, "reference"),
        ({"source": {"claim": {"name": "a", "path": "/absolute"}}}, "path"),
        ({"source": {"image": {}}}, "reference"),
        ({"executors": 65}, "executors"),
    ],
)
def test_models_that_cannot_be_are_refused(model: dict[str, Any], what: str) -> None:
    with pytest.raises(HelmError, match=what):
        render(with_model(**model))


def test_two_models_of_one_id_are_refused() -> None:
    model = {"id": "a", "name": "b", "source": {"reference": "demo"}}
    with pytest.raises(HelmError, match="two have the id a"):
        render({"engine": {"models": [model, model]}})


def test_one_model_may_run_on_two_kinds_of_machine() -> None:
    models = [
        {"id": "gpu", "name": "llama", "source": {"reference": "a/llama"}, "device": "cuda"},
        {"id": "cpu", "name": "llama", "source": {"reference": "a/llama"}, "replicas": 2},
    ]
    release = render({"engine": {"models": models}})
    assert len(release.of_kind("StatefulSet")) == 2
    [pod] = release.of_kind("Pod")
    assert len(pod["spec"]["containers"]) == 1, "the test asks each name once"


def test_a_model_says_only_what_differs_from_the_defaults() -> None:
    values = nested({"engine.defaults": {"kvMemoryMib": 100, "autoscaling": {"enabled": True}}})
    values["engine"]["models"] = [
        {"id": "a", "name": "a", "source": {"reference": "demo"}},
        {
            "id": "b",
            "name": "b",
            "source": {"reference": "demo"},
            "autoscaling": {"maxReplicas": 9},
            "kvMemoryMib": 200,
        },
    ]
    release = render(values)
    limits = {
        one["metadata"]["name"][-1]: one["spec"]["maxReplicas"] for one in release.of_kind("HorizontalPodAutoscaler")
    }
    assert limits == {"a": 4, "b": 9}
    for name, pool_mib in (("a", 100), ("b", 200)):
        spec = release.named("StatefulSet", f"demo-octavo-engine-{name}")["spec"]["template"]["spec"]
        [shm] = [volume for volume in spec["volumes"] if volume["name"] == "shm"]
        assert shm["emptyDir"]["sizeLimit"] == f"{pool_mib + 64}Mi"


def test_fewer_pods_at_most_than_at_least_is_refused() -> None:
    with pytest.raises(HelmError, match="minReplicas is more than maxReplicas"):
        render(nested({"engine.defaults.autoscaling": {"enabled": True, "minReplicas": 5}}))


def test_the_example_of_the_readme_is_taken() -> None:
    [example] = re.findall(r"```yaml\n(.*?)```", (FOLDER / "README.md").read_text("utf-8"), re.DOTALL)
    release = render(yaml.safe_load(example))
    assert {found["metadata"]["name"] for found in release.of_kind("StatefulSet")} == {
        "demo-octavo-engine-llama",
        "demo-octavo-engine-qwen",
    }
