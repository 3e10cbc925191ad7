"""Everything that only a GPU can show, in one command and under nine minutes: `make gpu-check`.

Tests of the arena, the runner and a whole server, the kernels' own tests compiled instead of interpreted, and the
benchmarks, each with a share of the time. Without a GPU it fails, at once and with a reason. What it found is a JSON
file, also where it failed. It needs nothing installed but what a CUDA image has, and the wheels of `pack_wheels`.

    python3 tests/gpu/check.py --wheels build/gpu-wheels --results benchmarks/results
"""

import argparse
import json
import os
import subprocess
import sys
import time
import tomllib
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SITE = ROOT / "build" / "gpu-site"
TOTAL_S = 525.0
TAIL_CHARACTERS = 6000
MODULES = (
    *("torch", "triton", "transformers", "numpy", "pytest", "cuda.bindings.driver", "grpc", "google.protobuf"),
    *("grpc_health", "grpc_reflection", "grpc_status", "pydantic_settings", "prometheus_client", "llguidance"),
    *("hypothesis", "pytest_asyncio", "pytest_timeout", "octavo.v1.cache_pb2_grpc"),
)
PROBE = f"""
import importlib, sys
missing = []
for name in {MODULES!r}:
    try:
        importlib.import_module(name)
    except Exception as error:
        missing.append(f"{{name}} ({{type(error).__name__}}: {{error}})")
if missing:
    sys.exit("cannot be imported: " + "; ".join(missing))
import torch
if not torch.cuda.is_available():
    sys.exit(f"there is no GPU that PyTorch {{torch.__version__}} (CUDA {{torch.version.cuda}}) can use")
import triton, transformers
print(torch.cuda.get_device_name(), torch.__version__, triton.__version__, transformers.__version__)
"""


@dataclass(frozen=True)
class Phase:
    """One command and the seconds that it is sure to get; what earlier ones leave comes on top."""

    name: str
    command: tuple[str, ...]
    seconds: float


@dataclass(frozen=True)
class Outcome:
    """What a phase came to."""

    name: str
    passed: bool
    seconds: float
    tail: str  # of its output


def phases(results: Path, has_xdist: bool) -> list[Phase]:
    """In order. Tests come first, so that no figure is told of what is wrong."""
    pytest = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider")
    workers = ("-n", str(max(1, min(12, (os.cpu_count() or 2) - 2)))) if has_xdist else ()
    kernels = ("tests/kernels", "-m", "not long", "--ignore=tests/kernels/test_compile.py", *workers)
    module = (sys.executable, "-m")
    return [
        Phase("arena, runner, server", (*pytest, "-s", "tests/gpu", "tests/unit/octavo/test_cuda_driver.py"), 150),
        Phase("kernels", (*pytest, *kernels), 130),
        Phase("attention", (*module, "benchmarks.gpu_attention", "--json", f"{results}/gpu_attention.json"), 80),
        Phase("decode step", (*module, "benchmarks.gpu_decode_step", "--json", f"{results}/gpu_decode_step.json"), 80),
    ]


def run(phase: Phase, environment: dict[str, str], until_s: float) -> Outcome:
    """Its output is shown when it has ended, and the end of it kept. A phase that runs out of time has failed."""
    began_s = time.monotonic()
    limit_s = until_s - began_s
    print(f"== {phase.name}: {' '.join(phase.command[1:])} (at most {limit_s:.0f} s)", flush=True)
    log = ROOT / "build" / "gpu-check.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            phase.command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = process.wait(max(limit_s, 1.0))
            why = "" if code == 0 else f"\nended with {code}"
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)  # its own group: the phase and what it started
            process.wait()
            code, why = 124, f"\nran out of its {limit_s:.0f} s"
    text = log.read_text(errors="replace") + why
    print(text, flush=True)
    return Outcome(phase.name, code == 0, time.monotonic() - began_s, text[-TAIL_CHARACTERS:])


def install(wheels: Path) -> None:
    """The wheels into a folder of their own, and the project's own name and version, by which it finds itself."""
    SITE.mkdir(parents=True, exist_ok=True)
    found = sorted(map(str, wheels.glob("*.whl")))
    if found:
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile"]
        subprocess.run([*command, "--upgrade", "--target", str(SITE), *found], check=True)
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    about = SITE / f"octavo-{version}.dist-info"
    about.mkdir(exist_ok=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: octavo\nVersion: {version}\n")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--wheels", type=Path, default=ROOT / "build" / "gpu-wheels")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    arguments = parser.parse_args(argv)
    until_s = time.monotonic() + TOTAL_S
    results = arguments.results.resolve()
    results.mkdir(parents=True, exist_ok=True)
    try:
        install(arguments.wheels)
    except subprocess.CalledProcessError:  # pip has said which
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        print(f"gpu-check: wheels that do not fit; make gpu-wheels GPU_PYTHON={version}", file=sys.stderr)
        return 2
    environment = os.environ | {
        "PYTHONPATH": f"{ROOT}{os.pathsep}{SITE}",
        "PYTHONUNBUFFERED": "1",
        "TRITON_INTERPRET": "0",
        "GPU_CHECK": "1",
    }
    probe = subprocess.run([sys.executable, "-c", PROBE], cwd=ROOT, env=environment, capture_output=True, text=True)
    if probe.returncode:
        print(f"gpu-check: {probe.stderr.strip().splitlines()[-1]}", file=sys.stderr)
        return 2
    print(probe.stdout.strip())
    xdist = subprocess.run([sys.executable, "-c", "import xdist"], env=environment, capture_output=True)
    todo = phases(results, xdist.returncode == 0)
    outcomes = [
        run(phase, environment, until_s - sum(later.seconds for later in todo[number:]))
        for number, phase in enumerate(todo, 1)
    ]
    found = {"machine": probe.stdout.strip(), "phases": [asdict(outcome) for outcome in outcomes]}
    (results / "gpu_check.json").write_text(json.dumps(found, indent=1) + "\n")
    for outcome in outcomes:
        print(f"{'passed' if outcome.passed else 'FAILED'}  {outcome.seconds:6.1f} s  {outcome.name}")
    return 0 if all(outcome.passed for outcome in outcomes) else 1


if __name__ == "__main__":
    raise SystemExit(main())
