"""Renders the chart into a folder for linters, with everything switched on: `python -m helm.lint.render FOLDER`."""

import sys
from pathlib import Path
from typing import Any

from helm_python.chart import Chart

CHART = Path(__file__).parents[1] / "octavo"
VALUES: dict[str, Any] = {
    "image": {"repository": "registry.example/octavo", "digest": "sha256:" + "0" * 64},
    "router": {"grpcRoute": {"enabled": True, "parentRefs": [{"name": "gateway"}], "hostnames": ["llm.example"]}},
    "engine": {
        "models": [
            {
                "id": "cpu",
                "name": "small",
                "source": {"reference": "organisation/small"},
                "executors": 2,
                "autoscaling": {"enabled": True, "kind": "HorizontalPodAutoscaler"},
            },
            {
                "id": "gpu",
                "name": "large",
                "source": {"claim": {"name": "weights", "path": "large"}},
                "device": "cuda",
                "runtimeClassName": "nvidia",
                "cache": {"persistent": True},
                "autoscaling": {"enabled": True, "kind": "ScaledObject"},
            },
        ]
    },
    "tls": {"secretName": "public-tls", "internalSecretName": "internal-tls"},
    "tenants": {"secretName": "tenants"},
    "tracing": {"endpoint": "http://collector.monitoring:4317"},
    "extraEnv": [{"name": "OTEL_EXPORTER_OTLP_TIMEOUT", "value": "5"}],
    "test": {"tokenSecret": {"name": "test-token"}},
    "monitoring": {
        "podMonitor": {"enabled": True},
        "rules": {"enabled": True, "vllm": True},
        "dashboards": {"enabled": True},
    },
}


def main(folder: Path) -> None:
    """Write one file for each template that gives something."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in folder.glob("*.yaml"):
        file.unlink()
    with Chart.load(CHART) as chart:
        chart.validate_schema(VALUES)
        texts = chart.render(VALUES, name="octavo", namespace="llm")
    for path, text in texts.items():
        if path.endswith(".yaml") and text.strip():
            (folder / path.rpartition("/")[2]).write_text(text, "utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
