"""The process: loads, serves until a signal, drains.

Options come first and torch second, so that a wrong one is told at once, and because the options decide how Triton is
to be imported.
"""

import asyncio
import logging
import os
import signal
import sys
from typing import TYPE_CHECKING

from executor.config import ExecutorConfig
from octavo.ending import end_process
from octavo.errors import Code, OctavoError
from octavo.heap import import_once, settle
from octavo.logs import configure_logging
from octavo.settings import load_settings
from octavo.tls import TlsSource, internal_tls
from octavo.tracing import Tracing, start_tracing

if TYPE_CHECKING:
    from executor.session_host import SessionHost

log = logging.getLogger(__name__)
PROGRAM = "octavo executor"
EXIT_TRY_AGAIN, EXIT_BAD_CONFIGURATION = 1, 2
# How often a thread of a step looks whether the others have come, before it sleeps and leaves its processor to router
# and cache service (decision 58). OpenMP's own choice is some milliseconds. Read when torch is imported.
_SPINS = "1000"


def main(argv: list[str] | None = None) -> int:
    """Run until SIGTERM or SIGINT.

    Returns:
        The exit code: 0; 1 when another try may succeed; 2 when it cannot run as configured.
    """
    config = load_settings(ExecutorConfig, section="executor", program=PROGRAM, argv=argv)
    configure_logging("executor", config.log_level, config.log_format)
    if config.attention == "triton-interpret":
        os.environ["TRITON_INTERPRET"] = "1"  # which Triton reads when it is imported, and never again
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", _SPINS)
    try:
        return asyncio.run(_serve(config, internal_tls(config), start_tracing("executor", config.otel_traces)))
    except OctavoError as error:
        log.debug("the executor failed", exc_info=True)
        sys.stderr.write(f"{PROGRAM}: {error.message}\n")
        return EXIT_TRY_AGAIN if error.code is Code.UNAVAILABLE else EXIT_BAD_CONFIGURATION
    except (OSError, ValueError) as error:
        log.debug("the executor failed", exc_info=True)
        sys.stderr.write(f"{PROGRAM}: {error}\n")
        return EXIT_BAD_CONFIGURATION


async def _serve(config: ExecutorConfig, tls: TlsSource | None, tracing: Tracing) -> int:
    stop = _Stop()
    # Brings in torch, transformers and, through them, Triton. In a thread, so that a signal ends the wait.
    app = await asyncio.to_thread(import_once, "executor.app")
    async with app.running(config, stop.fatal, tls, tracing, on_loaded=settle) as executor:
        stop.is_serving = True
        stop.host = executor.host
        await stop.event.wait()
        log.info("draining")
    return stop.exit_code


class _Stop:
    """Why and how the process ends."""

    def __init__(self) -> None:
        self.event = asyncio.Event()
        self.exit_code = 0
        self.is_serving = False
        self.host: SessionHost | None = None
        self._changes: list[asyncio.Future[object]] = []  # so that nobody collects them
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signal, number)
        for number in (signal.SIGUSR1, signal.SIGUSR2):
            loop.add_signal_handler(number, self._hand_over, number)

    def _hand_over(self, number: int) -> None:
        """SIGUSR1: sessions are to go on elsewhere, as before SIGTERM. SIGUSR2: not any more."""
        if self.host is None:  # it does not serve yet
            return
        log.info("asked to hand its sessions over" if number == signal.SIGUSR1 else "asked to go on serving")
        change = self.host.drain() if number == signal.SIGUSR1 else self.host.take_again()
        self._changes.append(asyncio.ensure_future(change))

    def fatal(self, why: str) -> None:
        """This process is of no use any more."""
        log.error("%s; this executor ends, start another", why)
        self.exit_code = EXIT_TRY_AGAIN
        self.event.set()

    def _signal(self, number: int) -> None:
        if self.event.is_set():
            os._exit(128 + number)
        self.event.set()
        if not self.is_serving:
            log.info("stopped while starting")
            os._exit(0)  # a load runs in a thread that nothing can interrupt, and there is nothing to put away


if __name__ == "__main__":
    end_process(main())
