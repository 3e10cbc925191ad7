"""The dashboards: written from code, laid out without overlap, and all that they ask for is exported."""

import itertools
import json
import re
from typing import Any

import pytest

from docs import metric_tables
from helm.dashboards.files import FOLDER, render
from tests.dashboards.panels import DASHBOARDS, TARGETS, expression_of, panels_of
from tests.exported import TARGET_LABELS, exported_series
from tests.helm.chart import nested
from tests.helm.chart import render as render_chart
from tests.promql import wanted

# Series for which another panel stands, and those that only say what there is.
LEFT_OUT = {
    "octavo_cache_config_info",
    "octavo_executor_info",
    "octavo_executor_rows",
    "octavo_executor_sessions",
    "octavo_registered_executor_info",
    "octavo_request_inference_time_seconds",  # prefill and decode
    "octavo_request_time_per_output_token_seconds",  # the gaps between tokens, averaged over an answer
}


ALL = pytest.mark.parametrize("target", [pytest.param(target, id=where) for where, target in TARGETS])


@pytest.mark.parametrize("name", DASHBOARDS)
def test_files_are_what_the_code_says(name: str) -> None:
    assert (FOLDER / name).read_text("utf-8") == render()[name], "run make chart"


def test_no_file_is_left_of_a_dashboard_that_is_gone() -> None:
    assert {file.name for file in FOLDER.iterdir()} == set(DASHBOARDS)


@ALL
def test_every_series_and_label_is_exported(target: dict[str, Any]) -> None:
    series = exported_series()
    expression = expression_of(target)
    assert "$" not in expression, "a variable that nobody sets"
    for read in wanted(expression):
        assert read.name in series, f"no process exports {read.name}"
        assert read.labels <= series[read.name] | TARGET_LABELS, read


@ALL
def test_legends_name_labels_that_the_series_keep(target: dict[str, Any]) -> None:
    named = set(re.findall(r"{{\s*(\w+)\s*}}", target["legendFormat"]))
    for grouped in re.findall(r"^(?:histogram_quantile\([\d.]+, )?(?:sum|max) by \(([^)]*)\)", target["expr"]):
        assert named <= {label.strip() for label in grouped.split(",")}


def test_the_page_of_metrics_is_what_the_processes_export() -> None:
    assert metric_tables.PAGE.read_text("utf-8") == metric_tables.render(), "run make docs"


def test_variables_are_filled_from_series_that_have_the_label() -> None:
    for dashboard in DASHBOARDS.values():
        queries = [variable["query"] for variable in dashboard["templating"]["list"] if variable["type"] == "query"]
        assert queries
        for query in queries:
            series, label = re.fullmatch(r"label_values\((\w+)(?:{.*})?, (\w+)\)", query).groups()
            assert label in exported_series()[series] | TARGET_LABELS


def test_every_exported_series_can_be_seen() -> None:
    shown = {read.name for _, target in TARGETS for read in wanted(expression_of(target))}
    families = {re.sub(r"_(bucket|sum|count)$", "", name) for name in exported_series()}
    seen = {re.sub(r"_(bucket|sum|count)$", "", name) for name in shown}
    assert families - seen == LEFT_OUT


@pytest.mark.parametrize("name", DASHBOARDS)
def test_panels_lie_beside_each_other(name: str) -> None:
    panels = DASHBOARDS[name]["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        columns, lines = range(place["x"], place["x"] + place["w"]), range(place["y"], place["y"] + place["h"])
        cells = set(itertools.product(columns, lines))
        assert not cells & taken, panel["title"]
        assert max(columns) < 24
        taken |= cells


@pytest.mark.parametrize("name", DASHBOARDS)
def test_panels_have_a_unit_and_one_data_source(name: str) -> None:
    for panel in panels_of(DASHBOARDS[name]):
        assert panel["fieldConfig"]["defaults"]["unit"]
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        references = [target["refId"] for target in panel["targets"]]
        assert len(set(references)) == len(references) > 0


def test_the_chart_carries_the_files() -> None:
    release = render_chart(nested({"monitoring.dashboards": {"enabled": True, "annotations": {"folder": "LLM"}}}))
    for name, dashboard in DASHBOARDS.items():
        found = release.named("ConfigMap", f"demo-octavo-dashboard-{name.removesuffix('.json')}")
        assert found["metadata"]["labels"]["grafana_dashboard"] == "1"
        assert found["metadata"]["annotations"] == {"folder": "LLM"}
        assert {key: json.loads(text) for key, text in found["data"].items()} == {f"octavo-{name}": dashboard}
