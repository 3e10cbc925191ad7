"""The rules files: Prometheus takes them, each alert fires when it should and only then, and each has a runbook."""

import os
import re
import shutil
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.exported import OF_PROMETHEUS, TARGET_LABELS, exported_series
from tests.helm.chart import nested, render
from tests.promql import wanted

ROOT = Path(__file__).parents[2]
RULES = ROOT / "helm" / "octavo" / "files" / "rules"
UNIT_TESTS = sorted(Path(__file__).parent.glob("*.rules.test.yaml"))
RUNBOOKS = ROOT / "docs" / "runbooks.md"


def _groups(name: str) -> list[dict[str, Any]]:
    return yaml.safe_load((RULES / name).read_text())["groups"]


def _rules(name: str) -> list[dict[str, Any]]:
    return [rule for group in _groups(name) for rule in group["rules"]]


OCTAVO, VLLM = _rules("octavo.rules.yaml"), _rules("vllm.rules.yaml")
ALERTS = {rule["alert"]: rule for rule in OCTAVO if "alert" in rule}
RECORDED = {rule["record"] for rule in OCTAVO + VLLM if "record" in rule}


def _promtool(*arguments: str | Path) -> None:
    tool = shutil.which("promtool")
    if tool is None:
        assert "CI" not in os.environ, "CI must not pass over these: .ci/run installs promtool"
        pytest.skip("promtool is not installed; on Debian: apt-get install prometheus")
    run = subprocess.run([tool, *arguments], capture_output=True, text=True, timeout=240)
    assert run.returncode == 0, run.stdout + run.stderr


def test_prometheus_takes_the_files() -> None:
    _promtool("check", "rules", *sorted(RULES.glob("*.yaml")))


@pytest.mark.parametrize("file", UNIT_TESTS, ids=lambda file: file.stem)
def test_alerts_fire_when_they_should_and_only_then(file: Path) -> None:
    _promtool("test", "rules", file)


def test_each_alert_is_tested_to_fire_and_not_to_fire() -> None:
    fires, keeps_quiet = Counter[str](), Counter[str]()
    for file in UNIT_TESTS:
        for test in yaml.safe_load(file.read_text())["tests"]:
            for asked in test.get("alert_rule_test", []):
                (fires if asked["exp_alerts"] else keeps_quiet)[asked["alertname"]] += 1
    assert set(fires) == set(keeps_quiet) == set(ALERTS)


@pytest.mark.parametrize("rule", OCTAVO + VLLM, ids=lambda rule: rule.get("alert") or rule["record"])
def test_rules_read_only_what_is_exported(rule: dict[str, Any]) -> None:
    series = exported_series() | OF_PROMETHEUS
    for read in wanted(rule["expr"]):
        if read.name not in RECORDED:
            assert read.name in series, f"no process exports {read.name}"
            assert read.labels <= series[read.name] | TARGET_LABELS, read


@pytest.mark.parametrize("alert", ALERTS.values(), ids=list(ALERTS))
def test_an_alert_says_how_bad_it_is_and_what_it_is_about(alert: dict[str, Any]) -> None:
    assert alert["labels"]["severity"] in ("critical", "warning", "info")
    assert set(alert["annotations"]) == {"summary", "description", "runbook_url"}
    assert alert["annotations"]["runbook_url"] == f"docs/runbooks.md#{alert['alert'].lower()}"


def test_every_alert_has_a_runbook_and_every_runbook_an_alert() -> None:
    sections = re.findall(r"^## (Octavo\w+)$", RUNBOOKS.read_text("utf-8"), re.MULTILINE)
    assert sections == list(ALERTS), "in the order of the rules"


def test_series_for_vllm_dashboards_are_called_as_theirs() -> None:
    assert all(rule["record"].startswith("vllm:") for rule in VLLM)
    assert len({rule["record"] for rule in VLLM}) == len(VLLM)


def test_every_histogram_of_a_router_is_recorded_whole() -> None:
    """Quantiles need the buckets, means the sum and the count."""
    parts = Counter(
        rule["record"].rpartition("_")[0] for rule in VLLM if rule["record"].endswith(("_bucket", "_sum", "_count"))
    )
    assert parts
    assert set(parts.values()) == {3}


# ------------------------------------------------------------------------------------------------------ in the chart


def _chart_groups(**rules: Any) -> list[dict[str, Any]]:
    [found] = render(nested({"monitoring.rules": {"enabled": True, **rules}})).of_kind("PrometheusRule")
    return found["spec"]["groups"]


def test_the_chart_has_the_rules_of_the_files() -> None:
    assert _chart_groups() == _groups("octavo.rules.yaml")
    with_vllm = _chart_groups(vllm=True)
    assert [group["name"] for group in with_vllm][-1] == "octavo-as-vllm"
    assert with_vllm[-1]["rules"] == VLLM


def test_an_alert_can_be_left_out_labelled_and_linked() -> None:
    groups = _chart_groups(
        disabled=["OctavoLeaseLeak"], alertLabels={"team": "serving"}, runbookUrl="https://wiki.example/octavo"
    )
    found = {rule["alert"]: rule for group in groups for rule in group["rules"] if "alert" in rule}
    assert set(ALERTS) - set(found) == {"OctavoLeaseLeak"}
    assert all(rule["labels"]["team"] == "serving" for rule in found.values())
    assert found["OctavoStalled"]["labels"]["severity"] == "critical"
    assert found["OctavoStalled"]["annotations"]["runbook_url"] == "https://wiki.example/octavo#octavostalled"
