"""The private directory in which the processes of one launcher meet: its Unix sockets, mode 0700.

A launcher that was killed cannot remove its directory; the next one does, because the lock of a dead one is free.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path
from types import TracebackType

PREFIX = "octavo-"
LOCK = "lock"
MAX_SOCKET_PATH_BYTES = 107  # of sockaddr_un, without the final zero
_LONGEST_NAME = "executor-health-999.sock"


class RunDirectory:
    """A context manager that makes the directory, holds its lock, and removes it.

    Args:
        base: where to make it; None: `XDG_RUNTIME_DIR`, or the directory for temporary files.

    Raises:
        OSError: the base cannot be written, or its path is too long for sockets.
    """

    def __init__(self, base: Path | None = None) -> None:
        self._base = base or _default_base()
        longest = len(os.fsencode(self._base / f"{PREFIX}12345678" / _LONGEST_NAME))
        if longest > MAX_SOCKET_PATH_BYTES:
            raise OSError(f"{self._base} is too long for Unix sockets; set TMPDIR to a shorter directory")
        self._lock_fd = -1
        self.path = Path()

    def __enter__(self) -> "RunDirectory":
        sweep(self._base)
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=self._base))
        fresh = self.path / f"{LOCK}.new"
        self._lock_fd = os.open(fresh, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock_fd, fcntl.LOCK_EX)
        fresh.rename(self.path / LOCK)  # whoever sees the lock file sees it locked
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock_fd)

    def socket(self, name: str) -> str:
        """The address of a socket in this directory: `unix:/...`."""
        return f"unix:{self.path / name}.sock"


def find_live(base: Path | None = None) -> list[Path]:
    """The directories under `base` of this user's launchers that run."""
    return [folder for folder in sorted((base or _default_base()).glob(f"{PREFIX}*")) if _is_live(folder)]


def _is_live(folder: Path) -> bool:
    try:
        fd = os.open(folder / LOCK, os.O_RDWR | os.O_CLOEXEC)
    except OSError:  # another user's, or gone by now
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def sweep(base: Path) -> list[Path]:
    """Remove the directories under `base` whose launchers are dead; returns them."""
    return [folder for folder in sorted(base.glob(f"{PREFIX}*")) if _remove_if_dead(folder)]


def _remove_if_dead(folder: Path) -> bool:
    with contextlib.suppress(OSError):  # another user's, another launcher's, or gone by now
        if folder.stat().st_uid != os.geteuid():
            return False
        fd = os.open(folder / LOCK, os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder)
            return True
        finally:
            os.close(fd)
    return False


def _default_base() -> Path:
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and os.access(runtime, os.W_OK):
        return Path(runtime)
    return Path(tempfile.gettempdir())
