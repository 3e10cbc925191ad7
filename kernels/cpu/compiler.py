"""Compiles the C++ of this folder for the processor at hand, once, and keeps the library in the user's cache directory.

What is kept is found by everything that decides it: sources, compiler, flags, processor. It appears by one rename, so
that what is there is whole, and of two processes that compile at once either's library serves both. Without a
compiler there is no library: the caller has a slower way, and says so.
"""

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path

SOURCES = Path(__file__).parent
# -ffp-contract=fast lets a product and a sum become one instruction, everywhere alike. No -ffast-math: sums keep their
# order, and NaN stays NaN.
FLAGS = (
    *("-std=c++17", "-O3", "-march=native", "-fopenmp", "-shared", "-fPIC"),
    *("-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-w"),
)
_COMPILERS = ("c++", "g++")
_TIMEOUT_S = 300


class CompilerError(RuntimeError):
    """There is no library, and this is why."""


def compiled_library() -> Path:
    """The library for this processor, compiled when it is not there yet (about 10 s).

    Raises:
        CompilerError: no compiler of GCC's kind, it failed, or nothing can be written.
    """
    compiler = find_compiler()
    key = _key(compiler)
    for folder in (_cache_directory(), Path(tempfile.gettempdir()) / f"octavo-{os.getuid()}"):
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            if folder.stat().st_uid != os.getuid():  # what another user wrote is not run
                continue
            library = folder / f"cpu-{key}.so"
            if not library.is_file():
                _compile(compiler, library)
            return library
        except OSError as error:
            problem = error
    raise CompilerError(f"the compiled library cannot be kept: {problem}")


def _compile(compiler: str, library: Path) -> None:
    """Beside its place first, then renamed."""
    descriptor, unfinished = tempfile.mkstemp(prefix=".unfinished-", suffix=".so", dir=library.parent)
    os.close(descriptor)
    try:
        command = [compiler, *FLAGS, *map(str, _sources(".cpp")), "-o", unfinished]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
        if done.returncode:
            lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
            raise CompilerError(f"{compiler} failed: {lines[0]}")
        with open(unfinished, "rb") as written:
            os.fsync(written.fileno())
        os.replace(unfinished, library)
    except subprocess.TimeoutExpired as error:
        raise CompilerError(f"{compiler} took longer than {_TIMEOUT_S} s") from error
    finally:
        Path(unfinished).unlink(missing_ok=True)


def find_compiler() -> str:
    """$CXX, where it is set, else the first that is found. Raises CompilerError."""
    for name in (os.environ.get("CXX"), *_COMPILERS):
        found = shutil.which(name) if name else None
        if found:
            return found
    raise CompilerError(f"there is no C++ compiler ({' or '.join(_COMPILERS)}; $CXX names another)")


def _key(compiler: str) -> str:
    digest = hashlib.sha256()
    for path in _sources(".cpp", ".h"):
        digest.update(f"{path.name} {path.stat().st_size} ".encode() + path.read_bytes())
    try:
        version = subprocess.run([compiler, "--version"], capture_output=True, timeout=_TIMEOUT_S, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise CompilerError(f"{compiler} --version failed: {error}") from error
    digest.update(b"\0".join((compiler.encode(), version, " ".join(FLAGS).encode(), _processor())))
    return digest.hexdigest()[:24]


def _processor() -> bytes:
    """What -march=native looks at: Linux's description of the first processor."""
    try:
        lines = Path("/proc/cpuinfo").read_bytes().split(b"\n\n")[0].splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}".encode()
    wanted = (b"vendor_id", b"cpu family", b"model\t", b"model name", b"stepping", b"flags", b"Features")
    return b"\n".join(line for line in lines if line.startswith(wanted))


def _sources(*suffixes: str) -> Iterable[Path]:
    return sorted(path for path in SOURCES.iterdir() if path.suffix in suffixes)


def _cache_directory() -> Path:
    """By the XDG base directory specification: $XDG_CACHE_HOME, else ~/.cache."""
    try:
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError as error:  # a user without a home
        raise CompilerError(str(error)) from error
    return home / "octavo" / "kernels"
