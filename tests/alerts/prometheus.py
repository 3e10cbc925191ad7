"""A real Prometheus and a real Alertmanager for tests, on ports of their own, gone afterwards with all they wrote."""

import json
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ALERTMANAGER_NAMES = ("prometheus-alertmanager", "alertmanager")  # Debian's, and everybody else's
START_S = 60.0


def alertmanager_program() -> str | None:
    """Its path; None where there is none."""
    return next(filter(None, map(shutil.which, ALERTMANAGER_NAMES)), None)


def free_port() -> int:
    """A port of the loopback interface that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def until(condition: Callable[[], Any], within_s: float, what: str) -> Any:
    """The first true value of the condition. Raises AssertionError that says what did not come."""
    deadline = time.monotonic() + within_s
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < deadline, f"not within {within_s:g} s: {what}"
        time.sleep(0.5)


@dataclass(frozen=True)
class Monitoring:
    """Both, running.

    Attributes:
        prometheus, alertmanager: where their APIs are.
    """

    prometheus: str
    alertmanager: str

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The samples of an instant query. Raises AssertionError where Prometheus refuses it."""
        question = urllib.parse.urlencode({"query": expression})
        answer = _get(f"{self.prometheus}/api/v1/query?{question}")
        assert answer["status"] == "success", (expression, answer)
        return answer["data"]["result"]

    def value(self, expression: str) -> float | None:
        """Of the only sample; None where there is none."""
        samples = self.query(expression)
        assert len(samples) <= 1, samples
        return float(samples[0]["value"][1]) if samples else None

    def targets(self) -> list[dict[str, Any]]:
        """What is scraped, with its health and last error."""
        return _get(f"{self.prometheus}/api/v1/targets")["data"]["activeTargets"]

    def received_alerts(self) -> list[dict[str, Any]]:
        """What has reached Alertmanager and is not over."""
        return _get(f"{self.alertmanager}/api/v2/alerts?active=true")


def _get(url: str) -> Any:
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        return json.load(error)


@contextmanager
def running_monitoring(folder: Path, jobs: Mapping[str, str], rules: list[Path]) -> Iterator[Monitoring]:
    """Scrape these jobs (address by name) every second, evaluate these rules as often, send alerts on.

    Args:
        folder: for configuration and data.
    """
    prometheus, alertmanager = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(file) for file in rules],
        "alerting": {"alertmanagers": [{"static_configs": [{"targets": [alertmanager]}]}]},
        "scrape_configs": [
            {"job_name": name, "static_configs": [{"targets": [address]}]} for name, address in jobs.items()
        ],
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    (folder / "alertmanager.yml").write_text(
        yaml.safe_dump({"route": {"receiver": "all"}, "receivers": [{"name": "all"}]})
    )
    program = alertmanager_program()
    assert program is not None
    commands = [
        [
            "prometheus",
            f"--config.file={folder}/prometheus.yml",
            f"--storage.tsdb.path={folder}/prometheus",
            f"--web.listen-address={prometheus}",
        ],
        [
            program,
            f"--config.file={folder}/alertmanager.yml",
            f"--storage.path={folder}/alertmanager",
            f"--web.listen-address={alertmanager}",
            "--cluster.listen-address=",
        ],
    ]
    with (folder / "monitoring.log").open("wb") as log:
        processes = [subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT) for command in commands]
    try:
        for address in (prometheus, alertmanager):
            until(lambda address=address: _is_ready(f"http://{address}/-/ready"), START_S, f"{address} is ready")
        yield Monitoring(f"http://{prometheus}", f"http://{alertmanager}")
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait(30)


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False
