"""What `make gpu-check` needs is on the GPU machine or among the wheels that are carried there."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.gpu.check import MODULES
from tests.gpu.pack_wheels import PARALLEL, requirements

ROOT = Path(__file__).resolve().parents[2]
OURS = {path.name for path in ROOT.iterdir() if path.is_dir()}
# The machine's own, and what comes with it: torch brings triton, transformers brings tokenizers.
THERE = {"torch", "triton", "transformers", "tokenizers", "numpy", "pytest", "prometheus_client", "cuda", "flashinfer"}
# Distributions whose modules have other names.
MODULES_OF = {
    "grpcio": {"grpc"},
    "protobuf": {"google"},
    "googleapis-common-protos": {"google"},
    "grpcio-health-checking": {"grpc_health"},
    "grpcio-reflection": {"grpc_reflection"},
    "grpcio-status": {"grpc_status"},
    "python-dotenv": {"dotenv"},
}
RUN = (
    *(ROOT / "tests" / "gpu").glob("*.py"),
    *(path for path in (ROOT / "tests" / "kernels").glob("*.py") if path.name != "test_compile.py"),
    *(ROOT / "tests" / f"{name}.py" for name in ("conftest", "engines", "oracle", "runner_cases", "executor_cases")),
    ROOT / "tests" / "tiny_models.py",
    ROOT / "tests" / "unit" / "octavo" / "test_cuda_driver.py",
    *(ROOT / "benchmarks").glob("gpu_*.py"),
)


def carried() -> set[str]:
    names = [each.partition("==")[0] for each in requirements()]
    return set().union(*(MODULES_OF.get(name, {name.replace("-", "_")}) for name in names))


def imported(path: Path) -> Iterator[str]:
    """Top names of what a file imports, wherever."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (each.name.partition(".")[0] for each in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]


def test_every_import_of_the_pack_is_there_or_carried():
    known = OURS | THERE | carried() | set(sys.stdlib_module_names)
    missing = {(path.name, name) for path in RUN for name in imported(path) if name not in known}
    assert not missing


def test_markers_of_plugins_are_carried_too():
    """`--strict-markers` refuses to collect a file with the marker of a plugin that is not there."""
    marks = {line for path in RUN for line in path.read_text().splitlines() if "pytest.mark.timeout" in line}
    assert marks
    assert {"pytest_timeout", "pytest_asyncio"} <= carried() & set(MODULES)


def test_what_is_carried_is_pinned():
    assert all(each.count("==") == 1 for each in requirements())
    assert {each.partition("==")[0] for each in PARALLEL} == {"execnet", "pytest-xdist"}
