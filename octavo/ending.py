"""How a process of ours ends when it has put everything away: at once.

Not here: what is to be put away before (each process's own `__main__` and app).
"""

import logging
import os
import sys
from typing import NoReturn


def end_process(exit_code: int) -> NoReturn:
    """Leave without the interpreter's own end.

    Taking torch and what it brought apart costs more than a second of processor time, several on a busy machine. A
    restart or a roll-out waits for the memory and the name of this process all the while, and the kernel needs none.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)
