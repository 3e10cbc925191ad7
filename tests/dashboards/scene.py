"""A stack with something to see on every dashboard, under a real Prometheus, and pictures of what it shows.

    python -m tests.dashboards.scene --draw-with PYTHON build/dashboards

PYTHON is one that has matplotlib. Several tenants, one of them over its limit, a stranger, prompts that begin alike,
more of them than blocks, requests that can never fit, a tenants file that changes, an executor that is killed.
"""

import argparse
import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import octavo
from octavo.errors import OctavoError
from octavo.samples import scrape
from octavo.tokens import hash_of
from tests.alerts.prometheus import free_port, running_monitoring, until
from tests.tiny_models import save_tiny_llama

TOKENS = {name: f"octavo_token-of-{name}" for name in ("acme", "globex", "initech")}
LIMITS = {"initech": "tokens_per_minute = 3000\nmax_requests_in_flight = 2"}
SYSTEM_PROMPTS = [f"You are assistant number {number}. " * 4 for number in range(6)]
NUM_CALLERS = {"acme": 6, "globex": 3, "initech": 3}
START_S = 300.0


def write_tenants(file: Path, comment: str) -> None:
    """A whole file at once, as a mounted Secret changes."""
    tables = (
        f'[[tenants]]\nname = "{name}"\ntokens = [{{ sha256 = "{hash_of(token)}" }}]\n{LIMITS.get(name, "")}\n'
        for name, token in TOKENS.items()
    )
    fresh = file.with_suffix(".new")
    fresh.write_text(f"# {comment}\n" + "".join(tables))
    fresh.replace(file)


@contextlib.contextmanager
def running_serve(folder: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """The router's address, and the metrics' by job."""
    tenants = folder / "tenants.toml"
    write_tenants(tenants, "the first")
    router, of_router, of_cache = (f"127.0.0.1:{free_port()}" for _ in range(3))
    executor_port = free_port()
    command = [
        *(sys.executable, "-m", "octavo.cli", "serve", f"--model={save_tiny_llama(folder / 'model')}"),
        *("--executor.model-name=tiny", "--executor.threads=1", "--executor.kv-memory-mib=1", "--spare-executors=1"),
        *(f"--router.listen={router}", f"--router.metrics-listen={of_router}", f"--router.tenants-file={tenants}"),
        *(f"--cache-service.metrics-listen={of_cache}", f"--executor.metrics-listen=127.0.0.1:{executor_port}"),
    ]
    with (folder / "serve.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    jobs = {"octavo-router": of_router, "octavo-cache-service": of_cache}
    jobs |= {f"octavo-executor-{place}": f"127.0.0.1:{executor_port + place}" for place in range(2)}
    try:
        until(lambda: spares_ready(of_router) == 1, START_S, f"the stack is ready: {folder / 'serve.log'}")
        yield router, jobs
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(120)


def spares_ready(of_router: str) -> float:
    """As the router says; 0 while it says nothing."""
    with contextlib.suppress(OSError, ValueError):
        return scrape(of_router, 5).total("octavo_spare_executors_ready")
    return 0


def call(address: str, tenant: str, seed: int, ends_at: float) -> None:
    """Ask one thing after another until then."""
    chance = random.Random(seed)
    with octavo.Client(address, token=TOKENS[tenant], retry=None, timeout_s=60) as client:
        while time.monotonic() < ends_at:
            prompt = chance.choice(SYSTEM_PROMPTS) + str(chance.random())
            if chance.random() < 0.03:
                prompt *= 40  # can never fit
            with contextlib.suppress(OctavoError):
                client.generate(
                    prompt,
                    max_tokens=chance.randint(5, 80),
                    ignore_eos=chance.random() < 0.5,
                    n=chance.choice((1, 1, 2)),
                )
            time.sleep(chance.random() * 0.3)


def disturb(address: str, folder: Path, seconds: float) -> None:
    """A stranger's calls, and, one after the other, a changed tenants file, one that is bad, and a killed executor."""
    write_tenants(folder / "tenants.toml", "the second")
    with octavo.Client(address, token="octavo_nobody", retry=None, timeout_s=20) as stranger:
        for place in range(12):
            time.sleep(seconds / 12)
            with contextlib.suppress(OctavoError):
                stranger.generate("let me in", max_tokens=1)
            if place == 3:
                (folder / "tenants.toml").write_text("nonsense")
            if place == 4:
                write_tenants(folder / "tenants.toml", "the third")
            if place == 6:
                os.kill(executor_with_a_session(folder), signal.SIGKILL)


def executor_with_a_session(folder: Path) -> int:
    """The process id of the first executor of this stack."""
    wanted = ["-m", "executor", f"--model={folder / 'model'}"]
    for entry in sorted(Path("/proc").glob("[0-9]*"), key=lambda path: int(path.name)):
        with contextlib.suppress(OSError):
            arguments = (entry / "cmdline").read_text().split("\0")
            if all(word in arguments for word in wanted):
                return int(entry.name)
    raise LookupError("no executor runs")


def main() -> None:
    """Run the scene, then draw it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pictures", type=Path)
    parser.add_argument("--draw-with", default=sys.executable)
    parser.add_argument("--seconds", type=float, default=180.0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with running_serve(folder) as (address, jobs), running_monitoring(folder, jobs, []) as monitoring:
            ends_at = time.monotonic() + options.seconds
            callers = [
                threading.Thread(target=call, args=(address, tenant, seed, ends_at))
                for tenant, count in NUM_CALLERS.items()
                for seed in range(count)
            ]
            for caller in callers:
                caller.start()
            disturb(address, folder, options.seconds)
            for caller in callers:
                caller.join()
            where = [f"--prometheus={monitoring.prometheus}", f"--seconds={options.seconds}", "--scrape-s=1"]
            draw = str(Path(__file__).with_name("draw.py"))
            subprocess.run([options.draw_with, draw, *where, str(options.pictures)], check=True)


if __name__ == "__main__":
    main()
