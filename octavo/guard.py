"""Run as a script between the launcher and a child: `guard.py LAUNCHER_PID PROGRAM ARGUMENT...`.

Asks the kernel to end the child when the launcher dies, however it dies, then becomes the child. A script of its own,
with nothing but the standard library, because code between fork and exec in a process with gRPC threads can hang.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

PR_SET_PDEATHSIG = 1


def guarded(command: Sequence[str]) -> list[str]:
    """The command, run by way of this script: a child of the calling process, which ends when that thread does."""
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), *command]


def main() -> None:
    """Set the parent-death signal, which survives exec, and exec. SIGTERM: the child still cleans up after itself."""
    launcher_pid, command = int(sys.argv[1]), sys.argv[2:]
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != launcher_pid:  # it died before the line above
        sys.exit(1)
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
