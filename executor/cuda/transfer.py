"""Between host and device without waiting: pinned memory, asynchronous copies, one event to wait for.

A copy from pageable memory is no asynchronous one, whatever it is told. On a CPU, where tests run the same code, there
is nothing to copy. Not here: what is copied.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Upload = Callable[[Tensor], Tensor]


def uploader(device: torch.device) -> Upload:
    """A function that brings a tensor of the host to the device.

    Torch's allocator of pinned memory keeps a block until the copy from it is done, so the tensor may go at once.
    """
    if device.type == "cpu":
        return lambda tensor: tensor

    def upload(tensor: Tensor) -> Tensor:
        if not tensor.numel():  # nothing to pin
            return tensor.to(device)
        return tensor.contiguous().pin_memory().to(device, non_blocking=True)

    return upload


class Download:
    """Tensors of a device on their way to pinned memory of the host; without any, the end of what was launched."""

    def __init__(self, tensors: Sequence[Tensor], device: torch.device) -> None:
        """Start the copies behind what the current stream does."""
        self._event: torch.cuda.Event | None = None
        if device.type == "cpu":
            self._host = list(tensors)
            return
        self._host = [torch.empty(each.shape, dtype=each.dtype, pin_memory=True) for each in tensors]
        for target, source in zip(self._host, tensors, strict=True):
            target.copy_(source, non_blocking=True)
        self._event = torch.cuda.Event()
        self._event.record()

    @property
    def is_done(self) -> bool:
        """Whether `wait` returns at once. An error of the device is said by `wait`."""
        try:
            return self._event is None or self._event.query()
        except RuntimeError:
            return True

    def wait(self) -> list[Tensor]:
        """The tensors on the host. From any thread, and more than once. Raises RuntimeError for the device's errors."""
        if self._event is not None:
            self._event.synchronize()
        return self._host
