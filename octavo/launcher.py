"""`octavo serve` and `octavo engine`: start the processes of a plan, keep them running, stop them on a signal.

The glue between options, run directory, supervisor and terminal; each of those is a module of its own.
"""

import asyncio
import functools
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from pathlib import Path

from cache_service.config import CacheServiceConfig
from executor.config import ExecutorConfig
from octavo.child import Child, ChildSpec
from octavo.control import listening
from octavo.errors import OctavoError
from octavo.launch_config import EngineConfig, ServeConfig
from octavo.launch_plan import Stages, plan_engine, plan_serve
from octavo.logs import PREFIXED_VARIABLE
from octavo.prefixed_log import PrefixedLog
from octavo.rollout import Rollout
from octavo.rpc import answers, is_serving
from octavo.run_directory import RunDirectory
from octavo.settings import SECTIONS, load_settings
from octavo.supervisor import HealthProbe, Supervisor
from octavo.tls import internal_tls, public_tls
from router.config import RouterConfig

NAME = "octavo"
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

OnReady = Callable[[Callable[[str], None]], Awaitable[None]]  # is given a function that says a line


def serve(argv: list[str] | None = None) -> int:
    """`octavo serve`; returns the exit code."""
    config = load_settings(ServeConfig, section="serve", program="octavo serve", argv=argv)

    async def on_ready(say: Callable[[str], None]) -> None:
        say(f"ready: gRPC at {config.router.listen}, metrics at http://{config.router.metrics_listen}/metrics")

    return run_serve(config, on_ready)


def engine(argv: list[str] | None = None) -> int:
    """`octavo engine`; returns the exit code."""
    config = load_settings(EngineConfig, section="engine", program="octavo engine", argv=argv)

    async def on_ready(say: Callable[[str], None]) -> None:
        say(f"ready: cache service at {config.cache_service.listen}, first executor at {config.executor.listen}")

    def run() -> int:
        _check_tls(config.cache_service, config.executor)
        with RunDirectory() as directory:
            stages, is_json = plan_engine(config, directory.socket), config.log_format == "json"
            return run_stages(stages, on_ready, is_json=is_json, directory=directory.path)

    return _guarded("octavo engine", run)


def run_serve(config: ServeConfig, on_ready: OnReady) -> int:
    """Serve until a signal; `on_ready` is awaited when the router takes requests. Returns the exit code."""

    def run() -> int:
        _check_tls(config.cache_service, config.executor, config.router)
        with RunDirectory() as directory:
            stages, is_json = plan_serve(config, directory.socket), config.log_format == "json"
            return run_stages(stages, on_ready, is_json=is_json, directory=directory.path)

    return _guarded("octavo serve", run)


def run_stages(
    stages: Stages,
    on_ready: OnReady,
    probe: HealthProbe = is_serving,
    answering: HealthProbe = answers,
    *,
    is_json: bool = False,
    directory: Path | None = None,
) -> int:
    """Run the processes of a plan until a signal or a failure; returns the exit code.

    Args:
        is_json: their lines are.
        directory: where a roll-out can be asked for; None: nowhere.
    """
    names = [spec.name for stage in stages for spec in stage]
    log = PrefixedLog([NAME, *names], is_json=is_json)
    return asyncio.run(_run(stages, on_ready, probe, answering, log, directory))


async def _run(
    stages: Stages,
    on_ready: OnReady,
    probe: HealthProbe,
    answering: HealthProbe,
    log: PrefixedLog,
    directory: Path | None,
) -> int:
    environment = child_environment(dict(os.environ))

    def child_of(spec: ChildSpec) -> Child:
        return Child(spec, environment, functools.partial(log.write, spec.name))

    children = [[child_of(spec) for spec in stage] for stage in stages]

    def say(line: str) -> None:
        for part in line.splitlines():
            log.write(NAME, part)

    supervisor = Supervisor(children, probe, say, answering)
    loop = asyncio.get_running_loop()
    for number in _SIGNALS:
        loop.add_signal_handler(number, supervisor.request_stop)
    rollout = Rollout(supervisor, probe)

    async def roll_out(tell: Callable[[str], None]) -> str | None:
        def say_and_tell(line: str) -> None:
            say(line)
            tell(line)

        failure = await rollout.run(say_and_tell)
        if failure is not None:
            say(f"roll-out: {failure}")
        return failure

    async with listening(directory, {"rollout": roll_out}) if directory else nullcontext():
        return await supervisor.run(lambda: on_ready(say))


def child_environment(environ: dict[str, str]) -> dict[str, str]:
    """Of this process, without the options: those reach the children on their command lines."""
    prefixes = tuple(f"OCTAVO_{section.upper()}_" for section in SECTIONS)
    kept = {name: value for name, value in environ.items() if not name.startswith(prefixes) and name != "OCTAVO_CONFIG"}
    return {**kept, PREFIXED_VARIABLE: "1", "PYTHONUNBUFFERED": "1"}


def _check_tls(*sections: CacheServiceConfig | ExecutorConfig | RouterConfig) -> None:
    """Say what is wrong with certificates before anything starts. Raises ValueError."""
    for section in sections:
        internal_tls(section)
        if isinstance(section, RouterConfig):
            public_tls(section)


def _guarded(program: str, run: Callable[[], int]) -> int:
    try:
        return run()
    except OctavoError as error:
        sys.stderr.write(f"{program}: {error.code.name}: {error.message}\n")
        return 1
    except (ValueError, OSError) as error:
        sys.stderr.write(f"{program}: {error}\n")
        return 2
