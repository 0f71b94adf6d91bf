"""Seconds of work on one GPU: matrix products by their shape, and elementwise work by the bytes it moves."""

import math
from dataclasses import dataclass

from giantjax.cluster import GPU
from giantjax.planner.constants import Constants
from giantjax.planner.plan import Precision

TILES = ((256, 128), (128, 128), (128, 64), (64, 64))
"""Of matrix products in cuBLAS and CUTLASS, largest first; each is half of the one before."""


@dataclass(frozen=True)
class Pass:
    """Seconds of a piece of work, forward and backward."""

    forward: float
    backward: float

    def __add__(self, other: "Pass") -> "Pass":
        return Pass(self.forward + other.forward, self.backward + other.backward)

    def times(self, number: float) -> "Pass":
        """`number` of them."""
        return Pass(number * self.forward, number * self.backward)


class Processor:
    """A GPU and what it reaches of its line rates."""

    def __init__(self, gpu: GPU, constants: Constants, precision: Precision) -> None:
        self.gpu, self.constants = gpu, constants
        reached = {"V100": constants.gemm_v100, "A100": constants.gemm_a100}.get(gpu.family, constants.gemm_h100)
        self.half_rate = gpu.half_flops * reached
        """FLOP/s of large matrix products in 16 bits."""
        self.rate = {
            "fp32": gpu.single_flops * reached,
            "half": self.half_rate,
            "eighth": (gpu.eighth_flops or gpu.half_flops) * reached * (constants.eighth if gpu.eighth_flops else 1.0),
        }[precision]
        """FLOP/s of large matrix products in the precision of the layers' weights."""
        self.bandwidth = gpu.memory_bandwidth * constants.memory
        """Bytes/s of elementwise work."""
        self.width = 4 if precision == "fp32" else 2
        """Bytes of an activation."""

    def product(self, m: float, n: float, k: float, batch: float = 1.0, *, attention: bool = False) -> float:
        """Seconds of `batch` products of [m, k] and [k, n].

        A product is cut into tiles that multiprocessors work on in waves, the last of which may be nearly empty; the
        best of TILES counts. Thin products are limited by memory instead. `attention` products stay in 16 bits where
        weights are narrower.
        """
        share = max(self._used(m, n, batch, tile) * self.constants.small_tile**halvings for halvings, tile in enumerate(TILES))
        share *= k / (k + self.constants.half_depth)
        rate = min(self.half_rate, self.rate) if attention else self.rate
        moved = self.width * batch * (m * k + k * n + m * n)
        return max(2.0 * m * n * k * batch / (rate * share), moved / self.bandwidth) + self.constants.launch

    def _used(self, m: float, n: float, batch: float, tile: tuple[int, int]) -> float:
        """Share of the multiprocessors' time that goes into elements of the result."""
        tiles = batch * min(math.ceil(m / a) * math.ceil(n / b) for a, b in (tile, tile[::-1]))
        waves = math.ceil(tiles / self.gpu.num_multiprocessors)
        return m * n * batch / (waves * self.gpu.num_multiprocessors * tile[0] * tile[1])

    def dense(self, tokens: float, inputs: float, outputs: float) -> Pass:
        """A weight of [inputs, outputs]: the product forward; those of input and weight gradient backward."""
        return Pass(self.product(tokens, outputs, inputs), self.product(tokens, inputs, outputs) + self.product(inputs, outputs, tokens))

    def moved(self, num_bytes: float, kernels: float = 1.0) -> float:
        """Seconds of `kernels` kernels that read and write `num_bytes` in all."""
        return num_bytes / self.bandwidth + kernels * self.constants.launch
