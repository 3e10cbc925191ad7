"""`octavo stats`: one look at a running stack: what is served, how busy it is, where the KV blocks are.

Identity and load come from the router's API, the rest from the metrics of the three processes; a process whose metrics
cannot be read is named and left out. Not here: a view that keeps up with the stack.
"""

import dataclasses
import json
import sys
import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from prometheus_client.parser import text_string_to_metric_families
from pydantic import Field

from octavo.connection_config import ConnectionConfig, connect
from octavo.errors import OctavoError
from octavo.request_config import describe_refusal
from octavo.settings import load_settings

BLOCK_STATES = ("free", "cached", "used", "fenced", "reserved")


class StatsConfig(ConnectionConfig):
    """One look at a running stack: models, load, KV blocks, prefix cache, steps."""

    executor_metrics: str = Field("127.0.0.1:9702", description="host:port of the executor's metrics; empty: none")
    cache_service_metrics: str = Field(
        "127.0.0.1:9701", description="host:port of the cache service's metrics; empty: none"
    )
    timeout_s: float | None = Field(5.0, gt=0, description="seconds until each of them must have answered")
    retry_refused_s: float = Field(0.0, ge=0, description="seconds for which a refused call is sent again")
    json_output: bool = Field(False, description="print one JSON object instead")


class Samples:
    """One scrape: sums over the series of a name."""

    def __init__(self, text: str) -> None:
        self._samples: dict[str, list[tuple[Mapping[str, str], float]]] = defaultdict(list)
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                self._samples[sample.name].append((sample.labels, sample.value))

    def total(self, name: str, **labels: str) -> float:
        """The sum of the series with these labels; 0 where there is none."""
        return sum(value for has, value in self._samples[name] if labels.items() <= has.items())

    def values(self, name: str, label: str) -> list[str]:
        """What a label of this name is, each once, in the order of the scrape."""
        return list(dict.fromkeys(has[label] for has, _ in self._samples[name] if label in has))


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns its exit code: 1 when the router does not answer, 2 for bad usage."""
    config = load_settings(StatsConfig, section="stats", program="octavo stats", argv=argv)
    try:
        found = look(config)
    except OctavoError as error:
        sys.stderr.write(f"octavo stats: {describe_refusal(error)}\n")
        return 1
    sys.stdout.write(json.dumps(found, indent=2) + "\n" if config.json_output else render(found))
    return 0


def look(config: StatsConfig) -> dict[str, Any]:
    """Everything there is to say, as plain values: ratios in [0, 1], seconds, counts.

    Raises:
        OctavoError: the router does not answer.
    """
    with connect(config, "octavo stats") as client:
        server, models = client.server_info(), client.models()
        load = {one.name: dataclasses.asdict(one) for one in client.load()}
    found: dict[str, Any] = {
        "router": {"version": server.version, "id": server.router_id, "address": config.address},
        "engines": [dataclasses.asdict(engine) for engine in server.engines],
        "models": [dataclasses.asdict(model) | load.get(model.name, {}) for model in models],
        "unreachable": {},
    }
    for part, address, read in (
        ("kv_cache", config.cache_service_metrics, kv_cache_of),
        ("steps", config.executor_metrics, _steps),
    ):
        if address:
            try:
                found[part] = read(scrape(address, config.timeout_s))
            except (OSError, ValueError) as error:
                found["unreachable"][part] = f"http://{address}/metrics: {error}"
    return found


def scrape(address: str, timeout_s: float | None) -> Samples:
    """The metrics served there. Raises OSError where nobody serves any, ValueError where something else is served."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=timeout_s) as response:
        return Samples(response.read().decode("utf-8"))


def kv_cache_of(samples: Samples) -> dict[str, Any]:
    """Blocks, holders and prefix hits, from a scrape of the cache service."""
    queried = samples.total("octavo_prefix_cache_queries_total")
    return {
        "blocks": {state: int(samples.total("octavo_kv_blocks", state=state)) for state in BLOCK_STATES},
        "sequences": int(samples.total("octavo_kv_sequences")),
        "leases": int(samples.total("octavo_kv_leases")),
        "executors": int(samples.total("octavo_kv_executors")),
        "evicted_blocks": int(samples.total("octavo_kv_blocks_evicted_total")),
        "prefix_queried_tokens": int(queried),
        "prefix_hit_ratio": samples.total("octavo_prefix_cache_hits_total") / queried if queried else 0.0,
    }


def _steps(samples: Samples) -> dict[str, Any]:
    count = samples.total("octavo_step_time_seconds_count")
    return {
        "steps": int(count),
        "failed_steps": int(samples.total("octavo_steps_failed_total")),
        "mean_step_s": samples.total("octavo_step_time_seconds_sum") / count if count else 0.0,
        "mean_step_tokens": samples.total("octavo_iteration_tokens_sum") / count if count else 0.0,
    }


def render(found: Mapping[str, Any]) -> str:
    """A screenful for people."""
    router = found["router"]
    lines = [f"router         {router['id']}, version {router['version']}, at {router['address']}"]
    for engine in found["engines"]:
        lines += [f"engine         {engine['name']}: {engine['state']}, {engine['model'] or 'not reached yet'}"]
    for model in found["models"]:
        busy = f"{model.get('running_requests', 0)} running, {model.get('waiting_requests', 0)} waiting"
        used = f"{100 * model.get('kv_cache_usage_ratio', 0.0):.1f} % of {model['num_blocks']} blocks in use"
        lines += [f"model          {model['name']}: {busy}, {used}"]
        lines += [
            f"               {model['device']}, attention {model['attention']}, weights {model['weights_dtype']}, KV "
            f"{model['kv_dtype']}, context {model['max_context_tokens']} tokens"
        ]
    if "kv_cache" in found:
        lines += _render_kv_cache(found["kv_cache"])
    if "steps" in found:
        steps = found["steps"]
        mean = f"mean {1000 * steps['mean_step_s']:.1f} ms for {steps['mean_step_tokens']:.1f} tokens"
        lines += [f"steps          {steps['steps']:,}, {mean}, {steps['failed_steps']} failed"]
    lines += [f"{part:<15}not reachable: {why}" for part, why in found["unreachable"].items()]
    return "\n".join(lines) + "\n"


def _render_kv_cache(cache: Mapping[str, Any]) -> list[str]:
    blocks = ", ".join(f"{count:,} {state}" for state, count in cache["blocks"].items())
    holders = f"{cache['sequences']} sequences, {cache['leases']} leases, {cache['executors']} executors"
    hits = f"{100 * cache['prefix_hit_ratio']:.1f} % of {cache['prefix_queried_tokens']:,} prompt tokens were there"
    return [
        f"blocks         {blocks}; {holders}",
        f"prefix cache   {hits}; {cache['evicted_blocks']:,} blocks evicted",
    ]
