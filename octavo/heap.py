"""The garbage collector beside a heap that stays: what a process made to serve with is not looked at again and again.

Modules of torch and transformers are half a million objects that live until the end. While they come, the collector
walks all of them five times and finds next to nothing; later each full collection stops the process for a quarter of
a second. For the main functions of processes alone: in a process of tests this would keep what should go. Not here:
when it is time to.
"""

import gc
import importlib
import sys
from types import ModuleType


def import_once(name: str) -> ModuleType:
    """Import a big module without collections, then see to it that none of them looks at it."""
    if name in sys.modules:
        return sys.modules[name]
    gc.disable()
    try:
        module = importlib.import_module(name)
    finally:
        gc.enable()
    settle()
    return module


def settle() -> None:
    """Whatever is alive now counts as there for good: of cycles among it nobody notices the end."""
    gc.collect()
    gc.freeze()
