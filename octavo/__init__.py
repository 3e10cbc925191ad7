"""Octavo: LLM serving in separate processes over one paged KV cache.

For callers: `octavo.Client` and `octavo.AsyncClient`, the `octavo.RetryPolicy` that they take, and
`octavo.OctavoError`, which they raise. All but the last are imported when first asked for, because the servers import
this package too.
"""

import importlib
from typing import TYPE_CHECKING, Any

from octavo.errors import OctavoError

if TYPE_CHECKING:
    from octavo.async_client import AsyncClient
    from octavo.client import Client
    from octavo.retry import RetryPolicy

__version__ = "0.1.0"
__all__ = ["AsyncClient", "Client", "OctavoError", "RetryPolicy", "__version__"]

_LAZY = {"AsyncClient": "octavo.async_client", "Client": "octavo.client", "RetryPolicy": "octavo.retry"}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
