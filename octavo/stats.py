"""`octavo stats`: one look at a running stack: what is served, how busy it is, where the KV blocks are.

Identity and load come from the router's API, the rest from the metrics of the three processes; a process whose metrics
cannot be read is named and left out. Not here: a view that keeps up with the stack.
"""

import dataclasses
import json
import sys
from collections.abc import Mapping
from typing import Any

from pydantic import Field

from octavo.connection_config import ConnectionConfig, connect
from octavo.errors import OctavoError
from octavo.request_config import describe_refusal
from octavo.samples import BLOCK_STATES, Samples, executor_addresses, scrape, scrape_executors
from octavo.settings import load_settings


class StatsConfig(ConnectionConfig):
    """One look at a running stack: models, load, KV blocks, prefix cache, steps."""

    cache_service_metrics: str = Field(
        "127.0.0.1:9701", description="host:port of the cache service's metrics; empty: none"
    )
    executor_metrics: tuple[str, ...] = Field(
        (),
        description="host:port of an executor's metrics, may be given several times; "
        "none given: of all that the cache service knows",
    )
    timeout_s: float | None = Field(5.0, gt=0, description="seconds until each of them must have answered")
    retry_refused_s: float = Field(0.0, ge=0, description="seconds for which a refused call is sent again")
    json_output: bool = Field(False, description="print one JSON object instead")


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
    addresses = config.executor_metrics
    if config.cache_service_metrics:
        try:
            cache = scrape(config.cache_service_metrics, config.timeout_s)
        except (OSError, ValueError) as error:
            found["unreachable"]["cache service"] = f"http://{config.cache_service_metrics}/metrics: {error}"
        else:
            found["kv_cache"] = kv_cache_of(cache)
            addresses = addresses or executor_addresses(cache, config.cache_service_metrics)
    executors = scrape_executors(addresses, config.timeout_s)
    found["executors"] = {name: _steps(samples) for name, samples in executors.samples.items()}
    for address, why in executors.away.items():
        found["unreachable"][f"executor at {address}"] = f"http://{address}/metrics: {why}"
    return found


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
        "sessions": int(samples.total("octavo_executor_sessions")),
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
    for name, about in found["executors"].items():
        mean = f"mean {1000 * about['mean_step_s']:.1f} ms for {about['mean_step_tokens']:.1f} tokens"
        steps = f"{about['steps']:,} steps, {mean}, {about['failed_steps']} failed"
        lines += [f"executor       {name}: {'serving' if about['sessions'] else 'idle'}, {steps}"]
    lines += [f"not reachable  {part}: {why}" for part, why in found["unreachable"].items()]
    return "\n".join(lines) + "\n"


def _render_kv_cache(cache: Mapping[str, Any]) -> list[str]:
    blocks = ", ".join(f"{count:,} {state}" for state, count in cache["blocks"].items())
    holders = f"{cache['sequences']} sequences, {cache['leases']} leases, {cache['executors']} executors"
    hits = f"{100 * cache['prefix_hit_ratio']:.1f} % of {cache['prefix_queried_tokens']:,} prompt tokens were there"
    return [
        f"blocks         {blocks}; {holders}",
        f"prefix cache   {hits}; {cache['evicted_blocks']:,} blocks evicted",
    ]
