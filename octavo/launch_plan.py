"""From options to the processes to start: pure functions, no process is touched here.

Every option that differs from its default goes onto the child's command line, so that `ps` shows what runs.
"""

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from pydantic import BaseModel

from octavo.child import ChildSpec, RestartPolicy
from octavo.launch_config import EngineConfig, ServeConfig
from octavo.settings_sources import option_of

Stages = list[list[ChildSpec]]

CACHE_HEALTH = "octavo.v1.BlockManagerService"
EXECUTOR_HEALTH = "octavo.v1.ExecutorService"
ROUTER_HEALTH = "octavo.v1.InferenceService"

# Between the end of a process's own grace and SIGKILL.
_STOP_MARGIN_S = 10.0


def plan_serve(config: ServeConfig, socket_of: Callable[[str], str]) -> Stages:
    """Cache service, executors, router: each needs those before it.

    Args:
        config: all options.
        socket_of: the address of a private socket by its name; for what has no address of its own in `config`.

    Raises:
        ValueError: an address that others could not connect to.
    """
    cache_listen = _listen_or(config.cache_service, 0, socket_of("cache-service"))
    cache_wiring = {"listen": cache_listen, **_health(config.cache_service, socket_of("cache-health"))}
    restart = RestartPolicy(config.max_restarts, max_delay_s=config.max_restart_pause_s)
    cache = _child("cache-service", config.cache_service, CACHE_HEALTH, cache_wiring, restart, config)
    listens = [
        _listen_or(config.executor, place, socket_of(f"executor-{place}")) for place in range(_num_places(config))
    ]
    executors = [
        _executor(config, _Place(place, place), listen, connect_address(cache_listen), socket_of)
        for place, listen in enumerate(listens)
    ]
    if not config.spare_executors:
        executors[0] = replace(executors[0], name="executor")
    executor, *spares = map(connect_address, listens)
    router_wiring: dict[str, Any] = {"cache_service": connect_address(cache_listen), "executor": executor}
    router_wiring |= {"spare_executors": tuple(spares), "wanted_spares": config.spare_executors}
    router_wiring |= _health(config.router, socket_of("router-health"))
    router = _child("router", config.router, ROUTER_HEALTH, router_wiring, restart, config)
    return [[cache], executors, [router]]


def plan_engine(config: EngineConfig, socket_of: Callable[[str], str]) -> Stages:
    """Cache service, and all executors, which need it. As `plan_serve`."""
    wiring = _health(config.cache_service, socket_of("cache-health"))
    restart = RestartPolicy(config.max_restarts, max_delay_s=config.max_restart_pause_s)
    cache = _child("cache-service", config.cache_service, CACHE_HEALTH, wiring, restart, config)
    cache_address = connect_address(config.cache_service.listen)
    num_others = _num_places(config) - 1  # of each engine; they come behind the executors that serve at first
    places = [_Place(index, 0, engine=index) for index in range(config.executors)]
    places += [
        _Place(config.executors + engine * num_others + other, other + 1, engine)
        for engine in range(config.executors)
        for other in range(num_others)
    ]
    listens = [offset_address(config.executor.listen, place.number) for place in places]
    executors = [
        _executor(config, place, listen, cache_address, socket_of)
        for place, listen in zip(places, listens, strict=True)
    ]
    return [[cache], executors]


def _num_places(config: EngineConfig | ServeConfig) -> int:
    """For the executors of one engine: one that serves, its spares, or, where it has none, one for a roll-out."""
    return 1 + max(1, config.spare_executors)


class _Place(NamedTuple):
    """Of one executor: among all, which its addresses and its id follow, and among those of its engine."""

    number: int
    in_pool: int
    engine: int = 0


def _executor(
    config: EngineConfig | ServeConfig, place: _Place, listen: str, cache_address: str, socket_of: Callable[[str], str]
) -> ChildSpec:
    options = config.executor
    wiring = {
        "listen": listen,
        "health_listen": offset_address(options.health_listen, place.number),
        **_health(options, socket_of(f"executor-health-{place.number}")),
        "metrics_listen": offset_address(options.metrics_listen, place.number),
        "cache_service": cache_address,
        "executor_id": f"executor-{place.number}",
    }
    restart = RestartPolicy(config.max_restarts, max_delay_s=config.max_restart_pause_s)
    spec = _child(f"executor-{place.number}", options, EXECUTOR_HEALTH, wiring, restart, config)
    is_reserve = place.in_pool > config.spare_executors
    return replace(spec, pool=f"engine-{place.engine}", is_reserve=is_reserve)


def _health(options: Any, private_socket: str) -> dict[str, str]:
    """Where the launcher asks for health in plain text, if the process speaks TLS and the options name no place."""
    speaks_tls = getattr(options, "tls_certificate", "") or getattr(options, "internal_tls_certificate", "")
    return {"health_listen": private_socket} if speaks_tls and not options.health_listen else {}


def _child(
    name: str,
    options: Any,
    health_service: str,
    wiring: Mapping[str, Any],
    restart: RestartPolicy | None,
    config: EngineConfig | ServeConfig,
) -> ChildSpec:
    module = name.rstrip("-0123456789").replace("-", "_")

    def value_of(option: str) -> Any:
        return wiring.get(option, getattr(options, option))

    return ChildSpec(
        name=name,
        argv=(sys.executable, "-m", module, *arguments_of(options, wiring)),
        address=connect_address(str(value_of("health_listen") or value_of("listen"))),
        health_service=health_service,
        start_timeout_s=config.start_timeout_s,
        stop_grace_s=options.drain_accept_window_s + options.drain_grace_s + _STOP_MARGIN_S,
        restart=restart,
        silence_limit_s=config.silence_limit_s,
    )


def arguments_of(options: BaseModel, wiring: Mapping[str, Any]) -> list[str]:
    """The command line that gives `options`, with those of `wiring` instead of its own."""
    arguments = []
    for name, info in type(options).model_fields.items():
        value = wiring.get(name, getattr(options, name))
        if value != info.get_default(call_default_factory=True):
            arguments.append(_argument(option_of(name), value))
    return arguments


def _argument(option: str, value: Any) -> str:
    if isinstance(value, bool):
        return option if value else option.replace("--", "--no-", 1)
    if value is None or isinstance(value, (tuple, list)):
        return f"{option}={json.dumps(value, default=BaseModel.model_dump)}"
    return f"{option}={value}"


def _listen_or(options: Any, place: int, private_socket: str) -> str:
    return offset_address(options.listen, place) if "listen" in options.model_fields_set else private_socket


def connect_address(listen: str) -> str:
    """Where a process on the same machine connects to reach who listens there.

    Raises:
        ValueError: port 0, which nobody else could know.
    """
    host, _, port = listen.rpartition(":")
    if listen.startswith("unix:"):
        return listen
    if port == "0":
        raise ValueError(f"address {listen}: a port of 0 cannot be known to the other processes; choose one")
    return {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}.get(host, host) + f":{port}"


def offset_address(listen: str, index: int) -> str:
    """The address of the process `index` places after the first: its port, or its socket's name, moves on."""
    if index == 0 or not listen:
        return listen
    if listen.startswith("unix:"):
        return f"{listen}.{index}"
    host, _, port = listen.rpartition(":")
    return f"{host}:{int(port) + index if int(port) else 0}"
