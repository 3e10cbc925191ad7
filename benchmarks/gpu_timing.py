"""Time on a GPU: medians of many runs by the device's own events, and the limits of the machine in the same run.

Every figure is on random data. A run is repeated over several sets of inputs where they would stay in the cache.
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

WARM_UP_RUNS = 3
GIB = 1 << 30


def median_seconds(work: Callable[[], object], seconds: float = 0.3, least_runs: int = 5) -> float:
    """Median time of one call of `work` on the device, after a warm-up.

    Args:
        seconds: how long to repeat it, about.
    """
    for _ in range(WARM_UP_RUNS):
        work()
    if not torch.cuda.is_available():  # a rehearsal: it shows that the code runs, and no more
        began = time.perf_counter()
        work()
        return time.perf_counter() - began
    once = _timed([work])[0]
    return statistics.median(_timed([work] * max(least_runs, min(1000, int(seconds / max(once, 1e-6))))))


def _timed(works: list[Callable[[], object]]) -> list[float]:
    """Seconds of each, from event to event, so that nothing waits between them."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(len(works) + 1)]
    torch.cuda.synchronize()
    events[0].record()
    for work, event in zip(works, events[1:], strict=True):
        work()
        event.record()
    torch.cuda.synchronize()
    return [before.elapsed_time(after) / 1e3 for before, after in itertools.pairwise(events)]


def copy_bytes_per_second(device: str, size_bytes: int = 4 * GIB) -> float:
    """Of a copy within the device, bytes read plus bytes written."""
    source = torch.randint(0, 256, (size_bytes,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size_bytes / median_seconds(lambda: target.copy_(source))


def matrix_operations_per_second(device: str, size: int = 8192) -> float:
    """Of a bf16 product of square matrices by the framework's library."""
    left, right = (torch.randn(size, size, dtype=torch.bfloat16, device=device) for _ in "lr")
    return 2 * size**3 / median_seconds(lambda: left @ right)


def parse_arguments(docstring: str, argv: list[str] | None) -> argparse.Namespace:
    """`device`, and where the JSON goes: `json`, or None. The first line of the docstring is the help."""
    parser = argparse.ArgumentParser(description=docstring.partition("\n")[0])
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--json", type=Path, help="where the figures go; without it they are only printed")
    return parser.parse_args(argv)


def machine(device: str) -> dict[str, Any]:
    """The device, its driver and the libraries, and the two limits."""
    found: dict[str, Any] = {"torch": torch.__version__, "cuda": torch.version.cuda}
    found["commit"] = _output_of("git", "rev-parse", "--short", "HEAD")
    if not torch.cuda.is_available():
        return found | {"device": "rehearsal without a GPU", "copy_gb_s": float("nan"), "matrix_tflop_s": float("nan")}
    properties = torch.cuda.get_device_properties(device)
    found |= {"device": properties.name, "multiprocessors": properties.multi_processor_count}
    found["driver"] = _output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    found["copy_gb_s"] = copy_bytes_per_second(device) / 1e9
    found["matrix_tflop_s"] = matrix_operations_per_second(device) / 1e12
    return found


def write_results(path: Path, results: dict[str, Any]) -> None:
    """Keep them, with the load of the machine."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"load": os.getloadavg(), **results}, indent=1) + "\n")


def _output_of(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"
