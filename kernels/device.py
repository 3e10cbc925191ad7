"""What a kernel's launch parameters depend on, read once from the device."""

import functools
from dataclasses import dataclass

import torch

from kernels.numeric import INTERPRETED


@dataclass(frozen=True)
class DeviceProperties:
    """Properties that choose tile sizes and splits; nothing else of the hardware may."""

    name: str
    num_multiprocessors: int
    shared_memory_bytes: int  # that one program may have, opt-in limit
    native_fp8: bool  # converts e4m3fn by instruction
    warpgroup_dots: bool  # four warps do a dot of 64 rows together, reading operands from shared memory
    registers_per_thread: int = 255  # that a program of four warps may have


A100 = DeviceProperties("sm_80", 108, 163 * 1024, native_fp8=False, warpgroup_dots=False)
H100 = DeviceProperties("sm_90", 132, 227 * 1024, native_fp8=True, warpgroup_dots=True)
B200 = DeviceProperties("sm_100", 148, 227 * 1024, native_fp8=True, warpgroup_dots=True)
MI300X = DeviceProperties(  # its own e4m3 is another format, fnuz
    "gfx942", 304, 64 * 1024, native_fp8=False, warpgroup_dots=False, registers_per_thread=512
)
INTERPRETER = DeviceProperties("interpreter", 8, 227 * 1024, native_fp8=False, warpgroup_dots=False)


@functools.cache
def device_properties(device: torch.device) -> DeviceProperties:
    """Properties of `device`; RuntimeError where no kernel of this package can run on it."""
    if INTERPRETED:
        return INTERPRETER
    if device.type != "cuda":
        raise RuntimeError(
            f"Triton kernels need a CUDA or ROCm device and were given {device}; on a CPU they run only in Triton's "
            "interpreter: set TRITON_INTERPRET=1 before Python starts, or choose the `cpu` back end"
        )
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        return DeviceProperties(properties.gcnArchName, properties.multi_processor_count, 64 * 1024, False, False, 512)
    return DeviceProperties(
        f"sm_{properties.major}{properties.minor}",
        properties.multi_processor_count,
        properties.shared_memory_per_block_optin,  # type: ignore[attr-defined]  # the stubs leave NVIDIA's own out
        native_fp8=(properties.major, properties.minor) >= (8, 9),
        warpgroup_dots=properties.major in (9, 10),
    )
