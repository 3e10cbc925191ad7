"""How much memory a segment may take here: what the file system, the machine and the control group still have.

Not here: taking it (arena).
"""

import os
from pathlib import Path

CGROUP_DIR = Path("/sys/fs/cgroup")
MEMORY_INFO = Path("/proc/meminfo")


def available_bytes(directory: str, *, cgroup: Path = CGROUP_DIR, memory_info: Path = MEMORY_INFO) -> int:
    """Bytes that a file in `directory` (a memory file system) can have before something refuses or kills."""
    file_system = os.statvfs(directory)
    limits = [file_system.f_bavail * file_system.f_frsize]
    limits += [limit for limit in (_machine_bytes(memory_info), _cgroup_bytes(cgroup)) if limit is not None]
    return max(0, min(limits))


def _machine_bytes(memory_info: Path) -> int | None:
    try:
        lines = memory_info.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _cgroup_bytes(cgroup: Path) -> int | None:
    """What a version 2 memory limit leaves; pages of files that can be dropped count as free."""
    try:
        limit = (cgroup / "memory.max").read_text().strip()
        if limit == "max":
            return None
        current = int((cgroup / "memory.current").read_text())
        statistics = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    return int(limit) - current + int(statistics.get("inactive_file", 0))
