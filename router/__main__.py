"""`python -m router`: one router process, until SIGTERM or SIGINT; a second signal ends it at once.

Options come first and `transformers` second, so that a wrong one is told at once.
"""

import asyncio
import logging
import os
import signal
import sys

from octavo.ending import end_process
from octavo.heap import import_once
from octavo.logs import configure_logging
from octavo.settings import load_settings
from octavo.tracing import Tracing, start_tracing
from router.config import RouterConfig

log = logging.getLogger(__name__)

EXIT_BAD_CONFIGURATION = 2
EXIT_SECOND_SIGNAL = 130


def main(argv: list[str] | None = None) -> int:
    """Run a router.

    Returns:
        The exit status: 0 after an end in order, 2 where an address or an option is wrong.
    """
    config = load_settings(RouterConfig, section="router", program="octavo router", argv=argv)
    configure_logging("router", config.log_level, config.log_format)
    # The tokenizer has its own threads here: more of them only fight with the executor for cores.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        asyncio.run(_serve(config, start_tracing("router", config.otel_traces)))
    except (OSError, ValueError) as error:
        sys.stderr.write(f"octavo router: {error}\n")
        return EXIT_BAD_CONFIGURATION
    return 0


async def _serve(config: RouterConfig, tracing: Tracing) -> None:
    stop = _Stop()
    # Brings in transformers and, through it, torch. In a thread, so that a signal ends the wait.
    app = await asyncio.to_thread(import_once, "router.app")
    router = app.Router(config, tracing=tracing)
    await router.start()
    stop.is_serving = True
    await stop.event.wait()
    await router.drain()


class _Stop:
    """The signals that end the process."""

    def __init__(self) -> None:
        self.event = asyncio.Event()
        self.is_serving = False
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signal)

    def _signal(self) -> None:
        if self.event.is_set():
            os._exit(EXIT_SECOND_SIGNAL)
        if not self.is_serving:
            log.info("stopped while starting")
            os._exit(0)  # an import runs in a thread that nothing can interrupt, and there is nothing to put away
        log.info("stopping: a second signal ends at once")
        self.event.set()


if __name__ == "__main__":
    end_process(main())
