"""What the metrics of every process share: the buckets of histograms, and the HTTP server of `/metrics`.

Each service keeps its own metrics in its own `metrics.py` and its own registry. Not here: any single metric.
"""

import logging
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Final

from prometheus_client import CollectorRegistry, disable_created_metrics, generate_latest

log = logging.getLogger(__name__)

Buckets = tuple[float, ...]

# fmt: off
TIME_TO_FIRST_TOKEN_SECONDS: Final[Buckets] = (
    .001, .005, .01, .02, .04, .06, .08, .1, .25, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560,
)
INTER_TOKEN_LATENCY_SECONDS: Final[Buckets] = (
    .001, .0025, .005, .01, .025, .05, .075, .1, .15, .2, .3, .4, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80,
)
REQUEST_LATENCY_SECONDS: Final[Buckets] = (
    .01, .025, .05, .075, .1, .15, .2, .25, .3, .5, .8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60,
    120, 240, 480, 960, 1920, 7680,
)
KV_BLOCK_TIME_SECONDS: Final[Buckets] = (
    .001, .005, .01, .05, .1, .5, 1, 5, 10, 30, 60, 120, 300, 600, 1200, 1800,
)
STEP_TIME_SECONDS: Final[Buckets] = (
    .0001, .00025, .0005, .001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10,
)
# fmt: on
ITERATION_TOKENS: Final[Buckets] = (1, *(2.0**power for power in range(3, 15)))  # 1, 8, 16 ... 16384

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def token_count_buckets(max_tokens: int) -> Buckets:
    """The series 1, 2, 5, 10, 20, 50 ... up to and with `max_tokens`, the longest that a model takes."""
    series = (float(digit * 10**power) for power in range(10) for digit in (1, 2, 5))
    return (*(value for value in series if value < max_tokens), float(max_tokens))


class MetricsServer:
    """Serves one registry at `/metrics` from a thread of its own until closed."""

    def __init__(self, server: ThreadingHTTPServer, thread: threading.Thread) -> None:
        self._server = server
        self._thread = thread

    @property
    def port(self) -> int:
        """The TCP port that was really bound."""
        return int(self._server.server_address[1])

    def close(self) -> None:
        """Stop serving and free the port."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def start_metrics_server(registry: CollectorRegistry, listen: str) -> MetricsServer:
    """Serve `registry` at `http://LISTEN/metrics`, in text format 0.0.4 whatever the scraper accepts.

    Args:
        registry: read at each scrape, in the server's thread.
        listen: `host:port`; port 0 takes any. An IPv4 address or a name.

    Raises:
        ValueError: not `host:port`.
        OSError: the address is taken or not ours; the message names it.
    """
    host, port = _split_address(listen)
    disable_created_metrics()  # a second series per counter and histogram, of no use to anyone who scrapes
    try:
        server = ThreadingHTTPServer((host, port), _handler_of(registry))
    except OSError as error:
        raise OSError(error.errno, f"cannot serve metrics on {listen}: {error.strerror or error}") from error
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, name="metrics", daemon=True)
    thread.start()
    return MetricsServer(server, thread)


def _split_address(listen: str) -> tuple[str, int]:
    host, colon, port = listen.rpartition(":")
    if not colon or not port.isdecimal():
        raise ValueError(f"metrics address {listen!r}: expected host:port, such as 127.0.0.1:9700")
    return host, int(port)


def _handler_of(registry: CollectorRegistry) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path.partition("?")[0] != "/metrics":
                self._answer(404, b"metrics are at /metrics\n")
                return
            try:
                body = generate_latest(registry)
            except Exception:  # a metric can never stop the process it measures
                log.exception("a scrape failed")
                self._answer(500, b"the scrape failed; the log has it\n")
                return
            self._answer(200, body)

        def _answer(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", CONTENT_TYPE)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            log.debug(format, *args)

    return Handler
