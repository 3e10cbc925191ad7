"""Fetch the wheels that a GPU machine without a network lacks, into a folder that `make gpu-check` installs from.

The machine is taken to have torch, triton, transformers, numpy, pytest, prometheus-client and cuda-bindings. gRPC and
protobuf are fetched all the same, since the generated stubs are of their versions. Versions are those of
constraints.txt.

    python tests/gpu/pack_wheels.py --python 3.12 build/gpu-wheels
"""

import argparse
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NAMES = (
    *("annotated-types", "pydantic", "pydantic_core", "pydantic-settings", "python-dotenv", "typing-inspection"),
    *("googleapis-common-protos", "grpcio", "grpcio-health-checking", "grpcio-reflection", "grpcio-status", "protobuf"),
    *("llguidance", "hypothesis", "pytest-asyncio", "pytest-timeout", "sortedcontainers"),
)
# Wanted by no other test, so not in constraints.txt: kernels are compiled by many processes at once, or not in time.
PARALLEL = ("execnet==2.1.2", "pytest-xdist==3.8.0")
# Of manylinux, newest first; pip matches each exactly.
GLIBC_VERSIONS = ("2_34", "2_31", "2_28", "2_27", "2_24", "2_17", "2_12")


def pinned(constraints: str) -> dict[str, str]:
    """Normalized name -> version."""
    found = re.findall(r"^([A-Za-z0-9._-]+)==(\S+)", constraints, re.MULTILINE)
    return {normalize(name): version for name, version in found}


def normalize(name: str) -> str:
    """As PEP 503 has it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def requirements() -> list[str]:
    """What is fetched, each with its version. Raises KeyError for one that is not pinned."""
    versions = pinned((ROOT / "constraints.txt").read_text())
    return [*(f"{name}=={versions[normalize(name)]}" for name in NAMES), *PARALLEL]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", default="3.12", help="version of the machine's Python")
    parser.add_argument("--machine", default="x86_64")
    arguments = parser.parse_args(argv)
    platforms = [f"manylinux_{version}_{arguments.machine}" for version in GLIBC_VERSIONS]
    platforms += [f"manylinux2014_{arguments.machine}", f"manylinux1_{arguments.machine}"]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--python-version", arguments.python, "--implementation", "cp", "--dest", str(arguments.folder)]
    command += [part for platform in platforms for part in ("--platform", platform)]
    subprocess.run([*command, *requirements()], check=True)
    size = sum(path.stat().st_size for path in arguments.folder.glob("*.whl"))
    print(f"{len(list(arguments.folder.glob('*.whl')))} wheels in {arguments.folder}, {size >> 20} MiB")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
