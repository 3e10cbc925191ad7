"""Which attention back end runs, decided once at start from the option and the device."""

import importlib
import logging
from collections.abc import Mapping
from types import MappingProxyType

from executor.attention import AttentionBackend
from executor.attention_torch import TorchAttention
from octavo.errors import Code, OctavoError

DEVICES_OF: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"torch": ("cpu",), "cpu": ("cpu",), "triton": ("cuda",), "triton-interpret": ("cpu",)}
)
AUTO = "auto"

log = logging.getLogger(__name__)


def choose_attention(name: str, device: str) -> AttentionBackend:
    """The back end that the `attention` option names; `auto` is the fastest one that can be had.

    Raises:
        OctavoError: FAILED_PRECONDITION: there is none of that name for the device, or it cannot be used as asked.
    """
    if name == AUTO:
        return _automatic(device)
    kind = device.partition(":")[0]  # cuda:1 -> cuda
    if kind not in DEVICES_OF.get(name, ()):
        there = ", ".join(other for other, devices in DEVICES_OF.items() if kind in devices)
        raise _not_available(f"attention {name!r} is not available on {device}; available: {there}")
    if name == "torch":
        return TorchAttention()
    return _cpu() if name == "cpu" else _triton(name)


def _automatic(device: str) -> AttentionBackend:
    if device != "cpu":
        return choose_attention("triton", device)
    try:
        return _cpu()
    except OctavoError as error:
        log.warning("%s; plain torch attends instead, which is slower", error.message)
        return TorchAttention()


def _cpu() -> AttentionBackend:
    """Imported only here: where attention is torch's, nothing is compiled."""
    try:
        return importlib.import_module("executor.attention_cpu").CpuAttention()
    except (ImportError, RuntimeError) as error:
        raise _not_available(f"attention 'cpu' cannot be had: {error}") from error


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
