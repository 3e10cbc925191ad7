"""The process: starts the cache service, serves until a signal, drains, takes its arenas out of /dev/shm."""

import asyncio
import logging
import os
import signal
import sys
from dataclasses import replace

from cache_service.app import RunningApp, outside_of, running
from cache_service.config import CacheServiceConfig
from octavo.heap import settle
from octavo.logs import configure_logging
from octavo.settings import load_settings

log = logging.getLogger(__name__)
PROGRAM = "octavo cache-service"


def main(argv: list[str] | None = None) -> int:
    """Run until SIGTERM or SIGINT. Returns the exit code: 0, or 2 when it cannot start as configured."""
    config = load_settings(CacheServiceConfig, section="cache_service", program=PROGRAM, argv=argv)
    configure_logging("cache-service", config.log_level, config.log_format)
    try:
        asyncio.run(_serve(config))
    except (OSError, ValueError) as error:
        log.debug("the cache service failed", exc_info=True)
        sys.stderr.write(f"{PROGRAM}: {error}\n")
        return 2
    return 0


async def _serve(config: CacheServiceConfig) -> None:
    async with running(config, replace(outside_of(config), on_arena=settle)) as app:
        stop = _stop_on_signals(app)
        log.info("serving on %s, metrics on %s", config.listen, config.metrics_listen or "no address")
        await stop.wait()
        log.info("stopping")


def _stop_on_signals(app: RunningApp) -> asyncio.Event:
    """Set by the first SIGTERM or SIGINT; the second ends the process at once, its arenas unlinked."""
    stop = asyncio.Event()

    def on_signal(number: int) -> None:
        if stop.is_set():
            app.service.close()
            os._exit(128 + number)
        stop.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    return stop


if __name__ == "__main__":
    sys.exit(main())
