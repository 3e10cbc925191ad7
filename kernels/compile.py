"""`python -m kernels.compile`: compile every launch of `compile_configs` for real targets, without a GPU.

Prints a table of registers, spills and shared memory per configuration and target, and fails on a compile error or
on a spill that `compile_configs.ALLOWED_SPILLS` does not list with a reason. Triton brings the compilers: ptxas and
cuobjdump for NVIDIA, LLVM for AMD.

The signature of each compilation is derived from the launch the executor would make, by the rule by which Triton's
launcher specializes it: an integer 1 becomes a constant, integers and pointers divisible by 16 are marked so.
"""

import argparse
import fnmatch
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels.compile_configs import ALLOWED_SPILLS, CONFIGURATIONS, TARGETS, Configuration
from kernels.device import DeviceProperties
from kernels.launch import OPTIONS, Launch
from kernels.numeric import INTERPRETED

TYPE_NAMES = {
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.int32: "i32",
    torch.int64: "i64",
}


@dataclass(frozen=True)
class Resources:
    """What one program of a compiled kernel takes."""

    configuration: str
    kernel: str
    target: str
    registers: int  # per thread; on AMD vector registers, accumulation registers included
    spill_bytes: int  # per thread
    shared_bytes: int  # per program
    num_warps: int
    num_stages: int
    seconds: float


class Signature:
    """Triton's (signature, constexprs, attributes) of a launch."""

    def __init__(self, launch: Launch) -> None:
        self.types: dict[str, Any] = {}
        self.constants: dict[tuple[int, ...], Any] = {}
        self.attributes: dict[tuple[int, ...], list[list[Any]]] = {}
        for position, parameter in enumerate(launch.kernel.params):
            value = launch.args[parameter.name]
            if parameter.is_constexpr:
                self.types[parameter.name] = "constexpr"
                self.constants[(position,)] = value
            else:
                self.types[parameter.name] = self._type_of(value, (position,), not parameter.do_not_specialize)

    def _type_of(self, value: Any, path: tuple[int, ...], specialize: bool) -> Any:
        if isinstance(value, tuple):
            return type(value)(*(self._type_of(item, (*path, i), specialize) for i, item in enumerate(value)))
        if value is None or (specialize and type(value) is int and value == 1):
            self.constants[path] = value
            return "constexpr"
        if isinstance(value, torch.Tensor):
            self.attributes[path] = [["tt.divisibility", 16]]
            return "*" + TYPE_NAMES[value.dtype]
        if isinstance(value, float):
            return "fp32"
        if specialize and value % 16 == 0:
            self.attributes[path] = [["tt.divisibility", 16]]
        return "i32" if -(2**31) <= value < 2**31 else "i64"


def gpu_target(device: DeviceProperties) -> GPUTarget:
    if device.name.startswith("gfx"):
        return GPUTarget("hip", device.name, 64)
    return GPUTarget("cuda", int(device.name.removeprefix("sm_")), 32)


def compile_launch(name: str, launch: Launch, device: DeviceProperties) -> Resources:
    signature = Signature(launch)
    source = ASTSource(launch.kernel, signature.types, signature.constants, signature.attributes)
    options = {"num_warps": launch.num_warps, "num_stages": launch.num_stages, **OPTIONS}
    started = time.perf_counter()
    compiled = triton.compile(source, target=gpu_target(device), options=options)
    seconds = time.perf_counter() - started
    read = _amd_resources if "amdgcn" in compiled.asm else _nvidia_resources
    registers, spill_bytes = read(compiled.asm)
    shared = compiled.metadata.shared
    return Resources(
        name, launch.name, device.name, registers, spill_bytes, shared, launch.num_warps, launch.num_stages, seconds
    )


def _nvidia_resources(asm: dict[str, Any]) -> tuple[int, int]:
    """From the cubin itself. No kernel here has local arrays or calls, so its stack frame is what it spills."""
    cuobjdump = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(asm["cubin"])
        cubin.flush()
        usage = subprocess.run([cuobjdump, "-res-usage", cubin.name], check=True, capture_output=True, text=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    if found is None:
        raise RuntimeError(f"cuobjdump gave no resource usage: {usage!r}")
    return int(found[1]), int(found[2])


def _amd_resources(asm: dict[str, Any]) -> tuple[int, int]:
    """From the metadata note of the assembly; scratch ("private segment") is what spills to memory."""
    fields = dict(re.findall(r"\.(vgpr_count|agpr_count|private_segment_fixed_size):\s+(\d+)", asm["amdgcn"]))
    return int(fields["vgpr_count"]), int(fields["private_segment_fixed_size"])


def allowed_spill(resources: Resources) -> int:
    """Bytes a configuration may spill on its target: the largest listed entry that matches, 0 without one."""
    key = f"{resources.configuration}/{resources.kernel}/{resources.target}"
    matching = (
        spill.bytes
        for pattern, spill in ALLOWED_SPILLS.items()
        if fnmatch.fnmatch(key, pattern) and fnmatch.fnmatch(triton.__version__, spill.triton)
    )
    return max(matching, default=0)


def compile_all(configurations: list[Configuration], targets: list[DeviceProperties]) -> Iterator[Resources]:
    for configuration in configurations:
        for device in targets:
            for launch in configuration.launches(device):
                yield compile_launch(configuration.name, launch, device)


def row(resources: Resources) -> str:
    spilled = "  SPILLS" if resources.spill_bytes > allowed_spill(resources) else ""
    return (
        f"{resources.configuration:34} {resources.kernel:30} {resources.target:7} {resources.registers:5}"
        f" {resources.spill_bytes:6} {resources.shared_bytes:7} {resources.num_warps:5} {resources.num_stages:6}"
        f" {resources.seconds:5.1f}{spilled}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", action="append", choices=[device.name for device in TARGETS], help="default: all")
    parser.add_argument("--match", default="*", help="configurations to compile, a shell pattern")
    parser.add_argument("--json", type=Path, help="also write the table here")
    options = parser.parse_args()
    if INTERPRETED:
        sys.exit("kernels.compile: TRITON_INTERPRET is set; kernels that are interpreted cannot be compiled: unset it")
    targets = [device for device in TARGETS if not options.target or device.name in options.target]
    configurations = [c for c in CONFIGURATIONS if fnmatch.fnmatch(c.name, options.match)]
    print(f"{'configuration':34} {'kernel':30} {'target':7}  regs  spill  shared warps stages     s")
    table = []
    with tempfile.TemporaryDirectory() as cache:  # a cached kernel would prove nothing about this compiler
        os.environ["TRITON_CACHE_DIR"] = cache
        for resources in compile_all(configurations, targets):
            table.append(resources)
            print(row(resources), flush=True)
    if options.json:
        options.json.write_text(json.dumps([asdict(resources) for resources in table], indent=1) + "\n")
    failed = [resources for resources in table if resources.spill_bytes > allowed_spill(resources)]
    print(f"{len(table)} kernels compiled from {len(configurations)} configurations, {len(failed)} spill unlisted")
    return 1 if failed or not table else 0


if __name__ == "__main__":
    sys.exit(main())
