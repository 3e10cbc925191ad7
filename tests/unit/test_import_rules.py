"""The import rules of the house, read from the source: who may import whom, and where gRPC may appear."""

import ast
import fnmatch
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SERVICES = ("cache_service", "executor", "router")
PACKAGES = (*SERVICES, "kernels", "octavo")

# octavo.X: what every process stands on, what a client installs, and the roof over all of it.
FOUNDATION = {
    "v1",
    "errors",
    "rpc",
    "settings",
    "settings_sources",
    "logs",
    "metrics",
    "model_source",
    "conversion_cache",
    "tls",
    "tls_metrics",
    "tracing",
    "otel",
    "secure_channel",
    "tokens",
    "cuda_driver",
    "memory_handle",
    "grammar",
    "ending",
    "heap",
}
CLIENT = {
    *("answer", "client", "async_client", "client_channel", "continuation", "messages", "options", "results", "retry"),
}
ROOF = {
    *("cli", "launcher", "launch_config", "launch_plan", "supervisor", "child", "guard", "run_directory"),
    *("rollout", "control", "rollout_command"),
    *("prefixed_log", "demo", "generate", "chat", "stats", "request_config", "connection_config", "token_command"),
    *("top", "top_screen", "samples"),
}

MAY_SPEAK_GRPC = (
    *(
        "octavo/rpc.py",
        "octavo/secure_channel.py",
        "octavo/answer.py",
        "octavo/client.py",
        "octavo/async_client.py",
        "octavo/client_channel.py",
        "octavo/messages.py",
    ),
    *("octavo/secure_channel.py", "*/servicer*.py", "*/servicer/*.py", "*/clients/*.py", "*/client.py"),
)


@dataclass(frozen=True)
class Import:
    """One imported module: where, what, and whether inside a function."""

    file: str  # relative to the root
    module: str
    in_function: bool

    @property
    def package(self) -> str:
        return self.module.partition(".")[0]

    def __str__(self) -> str:
        return f"{self.file} imports {self.module}"


def source_files() -> list[Path]:
    files = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    return [path for path in files if "octavo/v1/" not in path.as_posix()]


@cache
def imports() -> tuple[Import, ...]:
    return tuple(found for path in source_files() for found in imports_of(path))


def imports_of(path: Path) -> list[Import]:
    file, found = path.relative_to(ROOT).as_posix(), []

    def visit(node: ast.AST, in_function: bool) -> None:
        if isinstance(node, ast.Import):
            found.extend(Import(file, alias.name, in_function) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            assert node.level == 0, f"{file}: import by the full name, not relatively"
            found.extend(Import(file, f"{module}.{alias.name}", in_function) for alias in node.names)
        inside = in_function or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        for child in ast.iter_child_nodes(node):
            visit(child, inside)

    visit(ast.parse(path.read_text("utf-8")), False)
    return found


def offenders(rule) -> list[str]:
    return [str(found) for found in imports() if rule(found)]


def top(file: str) -> str:
    return file.partition("/")[0]


def octavo_part(name: str) -> str:
    """`octavo.rpc.open_channel` and `octavo/rpc.py` -> `rpc`; what the package itself exports -> ``."""
    package, _, rest = name.replace("/", ".").removesuffix(".py").partition(".")
    part = rest.partition(".")[0]
    return part if package == "octavo" and part in FOUNDATION | CLIENT | ROOF else ""


def test_the_walk_sees_the_tree():
    """The other tests can only fail if this one passes."""
    assert {top(found.file) for found in imports()} == set(PACKAGES)
    assert any(found.package == "grpc" for found in imports())


def test_every_module_of_octavo_has_its_place():
    modules = {path.stem for path in (ROOT / "octavo").glob("*.py")} - {"__init__"}
    assert modules == (FOUNDATION - {"v1"}) | CLIENT | ROOF


@pytest.mark.parametrize("service", SERVICES)
def test_services_never_import_each_other(service):
    others = set(SERVICES) - {service}
    assert offenders(lambda found: top(found.file) == service and found.package in others) == []


def test_only_the_executor_imports_kernels():
    assert offenders(lambda found: found.package == "kernels" and top(found.file) not in ("executor", "kernels")) == []


def test_kernels_import_nothing_of_ours():
    ours = set(PACKAGES) - {"kernels"}
    assert offenders(lambda found: top(found.file) == "kernels" and found.package in ours) == []


def test_kernels_is_no_regular_package():
    """With an __init__.py it would be taken for the distribution of the same name that transformers looks for."""
    assert not (ROOT / "kernels" / "__init__.py").exists()


@pytest.mark.parametrize("library", ["torch", "transformers", "numpy"])
def test_cache_service_has_no_numerical_library(library):
    assert offenders(lambda found: top(found.file) == "cache_service" and found.package == library) == []


def test_services_stand_on_the_foundation_alone():
    def rule(found: Import) -> bool:
        return top(found.file) in SERVICES and found.package == "octavo" and octavo_part(found.module) not in FOUNDATION

    # The version is all that the package itself gives them.
    assert [line for line in offenders(rule) if not line.endswith("octavo.__version__")] == []


def test_foundation_imports_no_client_and_no_roof():
    def rule(found: Import) -> bool:
        low = top(found.file) == "octavo" and octavo_part(found.file) in FOUNDATION
        return low and (found.package in SERVICES or octavo_part(found.module) in CLIENT | ROOF)

    assert offenders(rule) == []


def test_client_needs_no_server():
    def rule(found: Import) -> bool:
        client = top(found.file) == "octavo" and octavo_part(found.file) in CLIENT
        return client and (found.package in SERVICES or octavo_part(found.module) in ROOF)

    assert offenders(rule) == []


def test_roof_knows_the_configs_of_services_and_nothing_else():
    def rule(found: Import) -> bool:
        return top(found.file) == "octavo" and found.package in SERVICES and found.module.split(".")[1] != "config"

    assert offenders(rule) == []


@pytest.mark.parametrize("service", SERVICES)
def test_configs_are_light(service):
    light = {"pydantic", "typing", "collections", "enum"}
    assert offenders(lambda found: found.file == f"{service}/config.py" and found.package not in light) == []


def test_grpc_stays_at_the_edge():
    def rule(found: Import) -> bool:
        speaks = found.package in ("grpc", "grpc_health", "grpc_status", "grpc_reflection") or "_pb2" in found.module
        return speaks and not any(fnmatch.fnmatch(found.file, pattern) for pattern in MAY_SPEAK_GRPC)

    assert offenders(rule) == []


def test_no_import_of_ours_hides_in_a_function():
    assert offenders(lambda found: found.in_function and found.package in PACKAGES) == []


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("cache_service.__main__", ("torch", "transformers", "numpy")),
        ("executor.__main__", ("torch", "transformers", "triton")),
        ("router.__main__", ("torch", "transformers")),
        ("octavo.cli", ("torch", "transformers", "grpc", "pydantic")),
        ("octavo.client", ("torch", "transformers", "pydantic", "numpy")),
        ("octavo.launcher", ("torch", "transformers", "numpy")),
        ("octavo", ("grpc",)),
    ],
)
def test_what_is_really_loaded(module, absent):
    """Rules about names cannot see what libraries pull in; a fresh interpreter can."""
    code = f"import sys, {module}; print(*[name for name in {absent} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_nothing_waits_with_wait_for():
    """In Python 3.11 `asyncio.wait_for` can lose a cancellation that comes as its wait ends: a task lives for ever.
    `asyncio.timeout` does not."""
    assert [path.as_posix() for path in source_files() if "asyncio.wait_for(" in path.read_text("utf-8")] == []
