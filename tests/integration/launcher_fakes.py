"""For the launcher's tests: children that are tiny scripts, and a driver that supervises them as `octavo serve` does.

A child is ready when the file that is its address exists. Everything that happens is a line in one events file.
"""

import os
import sys
from pathlib import Path

from octavo.child import ChildSpec, RestartPolicy
from octavo.launcher import run_stages

QUICK_RESTART = RestartPolicy(max_restarts=2, window_s=60, first_delay_s=0.01, max_delay_s=0.02)

CHILD = """
import os, signal, sys, time
events, name, address, mode = sys.argv[1:]
def note(what):
    with open(events, "a") as file:
        file.write(f"{name} {what} {os.getpid()}\\n")
def end(number, frame):
    note("term")
    terms.append(number)
    if mode == "busy" and len(terms) == 2:
        note("tidied")
    if mode == "busy" and len(terms) == 2 or mode not in ("busy", "stubborn"):
        sys.exit(0)
terms = []
signal.signal(signal.SIGTERM, end)
note("start")
print("first words of", name, flush=True)
if mode == "refuse":
    print("no such model", file=sys.stderr, flush=True)
    sys.exit(3)
if mode == "never":
    time.sleep(60)
if mode != "parent":
    open(address, "w").close()
note("ready")
if mode == "short":
    time.sleep(0.1)
    sys.exit(4)
if mode == "parent":
    if os.fork() == 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        note("grandchild")
        open(address, "w").close()
        time.sleep(30)
while True:
    time.sleep(0.05)
"""


async def file_exists(address: str, service: str) -> bool:
    """The health probe of these children."""
    return os.access(address, os.F_OK)


def child_spec(folder: Path, name: str, mode: str = "good", **options) -> ChildSpec:
    """A child of `CHILD` in one of its modes."""
    address = folder / f"{name}.ready"
    argv = (sys.executable, "-c", CHILD, str(folder / "events"), name, str(address), mode)
    return ChildSpec(name=name, argv=argv, address=str(address), health_service="any", **options)


def events_of(folder: Path) -> list[str]:
    """What happened, in order: `name what`."""
    return [line.rsplit(" ", 1)[0] for line in _event_lines(folder)]


def pids_of(folder: Path, what: str = "start") -> dict[str, int]:
    """The newest process of each child that noted `what`."""
    lines = [line.split(" ") for line in _event_lines(folder)]
    return {name: int(pid) for name, event, pid in lines if event == what}


def _event_lines(folder: Path) -> list[str]:
    path = folder / "events"
    return path.read_text().splitlines() if path.exists() else []


def main() -> int:
    """As a program: `launcher_fakes.py FOLDER NAME:MODE...`, one stage per name."""
    folder = Path(sys.argv[1])
    stages = [[child_spec(folder, *argument.split(":"), stop_grace_s=0.5)] for argument in sys.argv[2:]]

    async def on_ready(say) -> None:
        say("all ready")
        with (folder / "events").open("a") as file:
            file.write("launcher ready 0\n")

    return run_stages(stages, on_ready, file_exists, file_exists)


if __name__ == "__main__":
    sys.exit(main())
