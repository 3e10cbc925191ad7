"""Which attention back end runs, decided once at start from the option and the device."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from executor.attention import AttentionBackend
from executor.attention_torch import TorchAttention
from octavo.errors import Code, OctavoError

BACKENDS: Mapping[str, Callable[[], AttentionBackend]] = MappingProxyType({"torch": TorchAttention})


def choose_attention(name: str, device: str) -> AttentionBackend:
    """The back end that the `attention` option names.

    Raises:
        OctavoError: FAILED_PRECONDITION: this build has no such back end for the device.
    """
    if name not in BACKENDS:
        message = f"attention {name!r} is not available on {device}; available: {', '.join(BACKENDS)}"
        raise OctavoError(Code.FAILED_PRECONDITION, "ATTENTION_NOT_AVAILABLE", message)
    return BACKENDS[name]()
