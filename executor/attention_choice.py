"""Which attention back end runs, decided once at start from the option and the device."""

import importlib
from collections.abc import Mapping
from types import MappingProxyType

from executor.attention import AttentionBackend
from executor.attention_torch import TorchAttention
from octavo.errors import Code, OctavoError

DEVICES_OF: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"torch": ("cpu",), "triton": ("cuda",), "triton-interpret": ("cpu",)}
)


def choose_attention(name: str, device: str) -> AttentionBackend:
    """The back end that the `attention` option names.

    Raises:
        OctavoError: FAILED_PRECONDITION: there is none of that name for the device, or Triton cannot be used as asked.
    """
    if device not in DEVICES_OF.get(name, ()):
        there = ", ".join(other for other, devices in DEVICES_OF.items() if device in devices)
        raise _not_available(f"attention {name!r} is not available on {device}; available: {there}")
    return TorchAttention() if name == "torch" else _triton(name)


def _triton(name: str) -> AttentionBackend:
    """Imported only here: where attention is torch's, Triton need not be installed, nor its compiler loaded."""
    try:
        module = importlib.import_module("executor.attention_triton")
    except (ImportError, RuntimeError) as error:
        raise _not_available(f"attention {name!r} cannot be loaded: {error}") from error
    interpret = name == "triton-interpret"
    if interpret != module.INTERPRETED:
        wanted = "set TRITON_INTERPRET=1" if interpret else "unset TRITON_INTERPRET"
        raise _not_available(
            f"attention {name!r} cannot run here: Triton was imported with its interpreter "
            f"{'on' if module.INTERPRETED else 'off'}; {wanted} in the environment before Python starts"
        )
    return module.TritonAttention(name)


def _not_available(message: str) -> OctavoError:
    return OctavoError(Code.FAILED_PRECONDITION, "ATTENTION_NOT_AVAILABLE", message)
