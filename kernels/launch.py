"""One kernel launch as a value: what the executor runs is, to the letter, what `kernels.compile` compiles.

Every launcher of this package first builds its launches (shapes, strides and constants, no memory touched, so
meta tensors serve as well) and then runs them.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

OPTIONS = {"enable_fp_fusion": True}  # a*b+c as one instruction, said aloud: Triton's default is about to change


@dataclass(frozen=True)
class Launch:
    """A kernel, its grid and every argument by name, constants included."""

    kernel: Any  # a @triton.jit function
    grid: tuple[int, ...]
    args: dict[str, Any]
    num_warps: int = 4
    num_stages: int = 2

    @property
    def name(self) -> str:
        return self.kernel.__name__

    def run(self) -> None:
        """Launch on the current stream of the current device; an empty grid is no launch."""
        if 0 in self.grid:
            return
        self.kernel[self.grid](**self.args, num_warps=self.num_warps, num_stages=self.num_stages, **OPTIONS)


def run_all(launches: Iterable[Launch]) -> None:
    for launch in launches:
        launch.run()


def next_power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def cdiv(numerator: int, denominator: int) -> int:
    return -(-numerator // denominator)
