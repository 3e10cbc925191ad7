"""The dashboards as their tests see them: panels, and what each asks Prometheus for."""

import json
from typing import Any

from helm.dashboards.files import render

DASHBOARDS: dict[str, dict[str, Any]] = {name: json.loads(text) for name, text in render().items()}


def panels_of(dashboard: dict[str, Any]) -> list[dict[str, Any]]:
    """Those that show something."""
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


def expression_of(target: dict[str, Any]) -> str:
    """As Grafana sends it to Prometheus, with everything chosen."""
    chosen = {"$__rate_interval": "5m", "$namespace": ".*", "$model": ".*", "$tenant": ".*"}
    expression = target["expr"]
    for variable, value in chosen.items():
        expression = expression.replace(variable, value)
    return expression


# Every query, by where it is.
TARGETS: list[tuple[str, dict[str, Any]]] = [
    (f"{name}: {panel['title']} {target['refId']}", target)
    for name, dashboard in DASHBOARDS.items()
    for panel in panels_of(dashboard)
    for target in panel["targets"]
]
