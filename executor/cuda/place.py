"""What an executor's device changes when it starts: where the weights lie, and what runs its steps.

On a CPU it changes nothing, and nothing of Triton or CUDA is imported. Not here: the arena (arena), steps (runner).
"""

import importlib
from collections.abc import Callable

import torch
from torch import nn

from executor.arena import Arena
from executor.attention import AttentionBackend
from executor.config import ExecutorConfig
from executor.model.served import ServedModel
from executor.runner import Runner
from octavo.errors import Code, OctavoError


def check_device(device: str) -> None:
    """Raise FAILED_PRECONDITION DEVICE_NOT_AVAILABLE where torch cannot use the device."""
    if device == "cpu":
        return
    num_devices = torch.cuda.device_count()
    if torch.device(device).index >= num_devices:
        built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA"
        raise OctavoError(
            Code.FAILED_PRECONDITION,
            "DEVICE_NOT_AVAILABLE",
            f"device {device}: PyTorch (built with {built}) sees {num_devices} CUDA devices; choose one of them, "
            "install a PyTorch that is built with CUDA, or use --device cpu",
        )


def place(module: nn.Module, device: str) -> None:
    """Move the weights. Raises RESOURCE_EXHAUSTED OUT_OF_MEMORY."""
    if device == "cpu":
        return
    try:
        module.to(device)
    except torch.OutOfMemoryError as error:
        raise OctavoError(
            Code.RESOURCE_EXHAUSTED, "OUT_OF_MEMORY", f"the weights do not fit into {device}: {error}"
        ) from error


def make_runner(
    model: ServedModel,
    arena: Arena,
    attention: AttentionBackend,
    config: ExecutorConfig,
    max_context_tokens: int,
    on_fatal: Callable[[str], object],
) -> Runner:
    """What runs steps on this device. Captures graphs, which takes seconds.

    Args:
        on_fatal: told, from the thread of the steps, why no step can run any more.
    """
    if config.device == "cpu":
        return Runner(model, arena, attention)
    # Imported only here: it brings Triton in, which reads its environment when it is imported.
    runner = importlib.import_module("executor.cuda.runner").CudaRunner(model, arena, attention, on_fatal)
    runner.capture_graphs(min(config.max_graph_rows, config.max_rows), max_context_tokens)
    return runner
