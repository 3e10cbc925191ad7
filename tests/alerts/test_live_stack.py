"""Three real processes under a real Prometheus: what it reads agrees with a counted load, every panel has an answer,
and an executor that is killed reaches Alertmanager."""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import octavo
from octavo.errors import OctavoError
from octavo.launch_plan import CACHE_HEALTH, EXECUTOR_HEALTH, ROUTER_HEALTH
from octavo.rpc import is_serving
from octavo.tokens import hash_of
from tests.alerts.prometheus import Monitoring, alertmanager_program, free_port, running_monitoring, until
from tests.dashboards.panels import TARGETS, expression_of
from tests.tiny_models import save_tiny_llama

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        not (shutil.which("prometheus") and alertmanager_program()),
        reason="no Prometheus or no Alertmanager; on Debian: apt-get install prometheus prometheus-alertmanager",
    ),
]

RULES = Path(__file__).parents[2] / "helm" / "octavo" / "files" / "rules"
MODEL, NUM_REQUESTS, MAX_TOKENS = "tiny", 6, 5
PROMPT = "the same forty-eight bytes begin every prompt..."  # three blocks of sixteen tokens
ACME, IDLE = "octavo_token-of-acme", "octavo_token-of-idle"
START_S = 240.0


@dataclass
class LiveStack:
    """The processes, each on its own, so that nobody starts a dead one again."""

    router: str
    metrics: dict[str, str]  # job -> address
    processes: dict[str, "subprocess.Popen[bytes]"]
    monitoring: Monitoring


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveStack]:
    folder = tmp_path_factory.mktemp("live")
    model = save_tiny_llama(folder / "model")
    metrics = {f"octavo-{process}": f"127.0.0.1:{free_port()}" for process in ("cache-service", "executor", "router")}
    sockets = {process: f"unix:{folder}/{process}.sock" for process in ("cache-service", "executor")}
    router = f"127.0.0.1:{free_port()}"
    tenants = folder / "tenants.toml"
    tenants.write_text(
        "".join(
            f'[[tenants]]\nname = "{name}"\ntokens = [{{ sha256 = "{hash_of(token)}" }}]\n{limits}\n'
            for name, token, limits in (("acme", ACME, ""), ("idle", IDLE, "tokens_per_minute = 1"))
        )
    )
    commands = {
        "cache-service": [f"--listen={sockets['cache-service']}"],
        "executor": [
            *(f"--listen={sockets['executor']}", f"--cache-service={sockets['cache-service']}", f"--model={model}"),
            *(f"--model-name={MODEL}", "--kv-memory-mib=16", "--threads=1", "--attention=torch"),
        ],
        "router": [
            *(f"--listen={router}", f"--cache-service={sockets['cache-service']}"),
            *(f"--executor={sockets['executor']}", "--drain-accept-window-s=0", f"--tenants-file={tenants}"),
        ],
    }
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    processes = {}
    try:
        for name, options in commands.items():
            command = [sys.executable, "-m", name.replace("-", "_"), *options]
            command.append(f"--metrics-listen={metrics[f'octavo-{name}']}")
            with (folder / f"{name}.log").open("wb") as log:
                processes[name] = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
        for address, service in (
            (sockets["cache-service"], CACHE_HEALTH),
            (sockets["executor"], EXECUTOR_HEALTH),
            (router, ROUTER_HEALTH),
        ):
            until(lambda a=address, s=service: asyncio.run(is_serving(a, s)), START_S, f"{service} serves")
        with running_monitoring(folder, metrics, sorted(RULES.glob("*.yaml"))) as monitoring:
            yield LiveStack(router, metrics, processes, monitoring)
    finally:
        for process in reversed(processes.values()):
            process.send_signal(signal.SIGTERM)
            process.wait(60)


@pytest.fixture(scope="module")
def loaded(live: LiveStack) -> LiveStack:
    """After a load that is counted."""
    monitoring = live.monitoring
    until(lambda: all(target["health"] == "up" for target in monitoring.targets()), 60, "all are scraped")
    until(lambda: monitoring.value("octavo_num_requests_running") == 0, 60, "the router's gauges are there")
    with octavo.Client(live.router, timeout_s=120, token=ACME) as client:
        for index in range(NUM_REQUESTS):
            client.generate(f"{PROMPT}{index}", max_tokens=MAX_TOKENS, ignore_eos=True)
    until(
        lambda: monitoring.value("sum(octavo_request_success_total)") == NUM_REQUESTS, 60, "the last request is counted"
    )
    return live


def test_prometheus_reads_what_was_done(loaded: LiveStack) -> None:
    prompt_tokens = NUM_REQUESTS * (len(PROMPT) + 1)  # a token for each byte
    of_router = '{engine!=""}'
    for expression, expected in {
        'octavo_request_success_total{finished_reason="max_tokens"}': NUM_REQUESTS,
        'sum(octavo_grpc_requests_total{method=~"Generate.*",grpc_code="OK"})': NUM_REQUESTS,
        "octavo_prompt_tokens_total": prompt_tokens,
        "octavo_generation_tokens_total": NUM_REQUESTS * MAX_TOKENS,
        f"octavo_prefix_cache_queries_total{of_router}": prompt_tokens,
        f"octavo_prefix_cache_hits_total{of_router}": (NUM_REQUESTS - 1) * 48,
        "octavo_time_to_first_token_seconds_count": NUM_REQUESTS,
        "octavo_inter_token_latency_seconds_count": NUM_REQUESTS * (MAX_TOKENS - 1),
        "octavo_e2e_request_latency_seconds_count": NUM_REQUESTS,
        'octavo_request_generation_tokens_bucket{le="5.0"}': NUM_REQUESTS,
        'octavo_request_generation_tokens_bucket{le="2.0"}': 0,
        "octavo_num_requests_running": 0,
        "octavo_num_requests_waiting": 0,
        "octavo_engine_up": 1,
        "octavo_executor_up": 1,
        'sum(octavo_kv_blocks{state=~"used|fenced"})': 0,
        f'vllm:generation_tokens_total{{model_name="{MODEL}"}}': NUM_REQUESTS * MAX_TOKENS,
    }.items():
        until(
            lambda e=expression, v=expected: loaded.monitoring.value(e) == v,
            30,
            f"{expression} is {expected}, not {loaded.monitoring.value(expression)}",
        )


def test_durations_are_seconds(loaded: LiveStack) -> None:
    """An answer of five tokens of a tiny model takes less than a minute, and its parts less than the whole."""
    total_s = loaded.monitoring.value("octavo_e2e_request_latency_seconds_sum")
    parts_s = [
        loaded.monitoring.value(f"octavo_request_{part}_time_seconds_sum") for part in ("queue", "prefill", "decode")
    ]
    assert total_s is not None
    assert 0 < total_s < NUM_REQUESTS * 60
    assert sum(filter(None, parts_s)) <= total_s * 1.01


def test_the_exposition_is_to_promtools_taste(loaded: LiveStack) -> None:
    for address in loaded.metrics.values():
        text = subprocess.run(["curl", "--silent", f"http://{address}/metrics"], capture_output=True, check=True).stdout
        check = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True)
        assert check.returncode == 0, check.stderr.decode()


def test_every_panel_of_the_dashboards_has_an_answer(loaded: LiveStack) -> None:
    """But for refusals and certificates, of which there are none; what else only trouble moves begins at 0."""
    of_everybody = [(where, target) for where, target in TARGETS if not where.startswith("tenants.json")]
    empty = {where for where, target in of_everybody if not loaded.monitoring.query(expression_of(target))}
    assert empty <= {
        "overview.json: Refused before they queued A",
        "overview.json: Certificate files that can be used A",
        "overview.json: Changes of certificate files A",
    }, empty


def test_every_panel_of_tenants_has_an_answer(loaded: LiveStack) -> None:
    """After one was over a limit, and somebody was not let in; but for calls now, as there are none."""
    with octavo.Client(loaded.router, timeout_s=60, token=IDLE, retry=None) as idle:
        idle.tokenize("more than one token")  # it owes from now on
        idle.generate("a", max_tokens=1)
        with pytest.raises(OctavoError, match="tokens_per_minute"):
            idle.generate("a", max_tokens=1)
    with octavo.Client(loaded.router, timeout_s=60, retry=None) as stranger, pytest.raises(OctavoError):
        stranger.generate("a", max_tokens=1)
    of_tenants = {where: expression_of(target) for where, target in TARGETS if where.startswith("tenants.json")}
    for where, expression in of_tenants.items():
        if "reloads" not in expression and "in_flight" not in expression:  # nobody has changed the file
            until(lambda e=expression: loaded.monitoring.query(e), 60, where)
    asked = loaded.monitoring.value('octavo_tenant_tokens_total{tenant="acme",kind="generated"}')
    assert asked == NUM_REQUESTS * MAX_TOKENS


def test_no_alert_fires_on_a_sound_stack(loaded: LiveStack) -> None:
    assert loaded.monitoring.query('ALERTS{alertstate="firing"}') == []


def test_an_executor_that_is_killed_reaches_alertmanager(loaded: LiveStack) -> None:
    """Last of all: nobody starts it again."""
    loaded.processes["executor"].send_signal(signal.SIGKILL)
    loaded.processes["executor"].wait(30)

    def found() -> set[str]:
        return {alert["labels"]["alertname"] for alert in loaded.monitoring.received_alerts()}

    expected = {"OctavoExecutorLost", "OctavoNoExecutor", "OctavoModelUnavailable"}
    until(lambda: expected <= found(), 300, f"{expected} are received")
    [lost] = [a for a in loaded.monitoring.received_alerts() if a["labels"]["alertname"] == "OctavoExecutorLost"]
    assert lost["labels"]["executor"] == "executor-0"
    assert lost["annotations"]["runbook_url"] == "docs/runbooks.md#octavoexecutorlost"
    assert loaded.monitoring.value("octavo_executor_up") == 0
    for series in ('octavo_iteration_tokens_sum{job="octavo-executor"}', "octavo_registered_executor_info"):
        assert loaded.monitoring.query(series) == [], "no series of the dead"
