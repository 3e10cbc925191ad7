"""Real proxies in front of real routers, by the configurations that operators are shown, on ports of their own."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from octavo.samples import Samples
from tests.alerts.prometheus import free_port, until
from tests.engines import RunningEngine

ROOT = Path(__file__).parents[2]
CONFIGURATIONS = ROOT / "docs" / "operations" / "proxies"
PUBLIC, ROUTERS = "7780", ("7700", "7710")  # ports in those
START_S = 300.0  # routers start beside a load, on machines with other work


def program(name: str) -> str | None:
    """Its path: of the environment that `make proxies-long` makes, or of the machine. None where there is none."""
    places = [f"{sys.prefix}-proxies/bin", os.environ.get("PATH", ""), "/usr/sbin"]
    return shutil.which(name, path=os.pathsep.join(places))


class RouterProcess:
    """`python -m router` at a port that stays, in front of an engine; started and ended as often as one likes."""

    def __init__(self, engine: RunningEngine, folder: Path, *options: str) -> None:
        self.port, self._metrics_port = free_port(), free_port()
        self.address = f"127.0.0.1:{self.port}"
        self._log = folder / f"router-{self.port}.log"
        self._command = [
            *(sys.executable, "-m", "router", f"--listen={self.address}"),
            f"--metrics-listen=127.0.0.1:{self._metrics_port}",
            *(f"--cache-service={engine.cache_service}", f"--executor={engine.executor}", *options),
        ]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Returns when it serves."""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT)
        until(lambda: is_healthy(self.address), START_S, f"the router serves: {self._log}")

    def metric(self, name: str, **labels: str) -> float:
        """The sum of its series of this name."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self._metrics_port}/metrics", timeout=10) as answer:
            return Samples(answer.read().decode()).total(name, **labels)

    def end(self) -> int:
        """SIGTERM; its exit code when it has drained."""
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        return self._process.wait(90)

    def put_away(self) -> None:
        """Whatever state it is in."""
        if self._process is not None and self._process.poll() is None:
            self.end()


def is_healthy(address: str) -> bool:
    """Whether the router behind it takes requests."""
    with grpc.insecure_channel(address) as channel:
        question = health_pb2.HealthCheckRequest(service="octavo.v1.InferenceService")
        try:
            return bool(health_pb2_grpc.HealthStub(channel).Check(question, timeout=2).status == 1)
        except grpc.RpcError:
            return False


@dataclass
class Proxy:
    """nginx or Envoy, running."""

    kind: str
    address: str
    _config: Path
    _process: "subprocess.Popen[bytes]"
    _text: str  # of the configuration, with the ports of this test

    def serve_by(self, *routers: RouterProcess) -> None:
        """Send calls to these alone. Envoy knows it by their health; nginx is told, and goes on with what runs."""
        if self.kind == "nginx":
            used = {str(router.port) for router in routers}
            lines = [_down_unless(line, used) for line in self._text.splitlines()]
            self._config.write_text("\n".join(lines))
            self._process.send_signal(signal.SIGHUP)
        until(lambda: is_healthy(self.address), START_S, "the proxy answers")


def _down_unless(line: str, ports: set[str]) -> str:
    is_router = line.strip().startswith("server 127.0.0.1:")
    return (
        line
        if not is_router or any(f":{port} " in line for port in ports)
        else line.replace(" max_fails", " down max_fails")
    )


@contextmanager
def running_proxy(kind: str, folder: Path, routers: tuple[RouterProcess, RouterProcess]) -> Iterator[Proxy]:
    """In front of the first of the routers, by the configuration of the pages, with ports of this test."""
    port = free_port()
    source = CONFIGURATIONS / {"nginx": "nginx.conf", "envoy": "envoy.yaml"}[kind]
    text = source.read_text()
    for shown, real in ((PUBLIC, port), *zip(ROUTERS, [router.port for router in routers], strict=True)):
        assert text.count(shown) == 1, shown
        text = text.replace(shown, str(real))
    config = folder / source.name
    config.write_text(text)
    path = program(kind)
    assert path is not None
    command = {
        "nginx": [path, "-p", f"{folder}", "-c", f"{config}", "-g", f"daemon off; pid {folder}/nginx.pid;"],
        "envoy": [path, "--config-path", f"{config}", "--concurrency", "1", "--disable-hot-restart", "-l", "warning"],
    }[kind]
    with (folder / f"{kind}.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    try:
        until(lambda: _listens(port) or process.poll() is not None, START_S, f"{kind} listens")
        assert process.poll() is None, (folder / f"{kind}.log").read_text()
        proxy = Proxy(kind, f"127.0.0.1:{port}", config, process, text)
        proxy.serve_by(routers[0])
        yield proxy
    finally:
        process.terminate()
        process.wait(30)


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
