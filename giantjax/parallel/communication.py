"""What a layer says to the devices that share it: the identity on one device.

Megatron's tensor parallelism with sequence parallelism (Shoeybi et al., 2019; Korthikanti et al., 2022): between the
column-parallel and the row-parallel product of a layer each device holds its share of heads or inner columns for all
positions; outside of them it holds all of the hidden dim for its share of positions.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float


@dataclass(frozen=True)
class Communication:
    """Functions over the mesh axis, or axes, that share layers; `axis` None is one device."""

    axis: str | tuple[str, ...] | None = None
    positions: Literal["shared", "whole"] = "shared"
    """Whether each device holds its share of the positions outside of products, or all of them, as where a single token is decoded."""

    def index(self) -> Array | int:
        """Which of the devices this is."""
        return 0 if self.axis is None else lax.axis_index(self.axis)

    def gather_sequence(self, x: Float[Array, "B s ..."]) -> Float[Array, "B S ..."]:
        """All positions from each device's share of them; the transpose of `scatter_sequence`."""
        return x if self.axis is None or self.positions == "whole" else lax.all_gather(x, self.axis, axis=1, tiled=True)

    def scatter_sequence(self, x: Float[Array, "B S ..."]) -> Float[Array, "B s ..."]:
        """Each device's share of positions of the sum of every device's partial result."""
        if self.axis is None or self.positions == "whole":
            return self.reduce(x)
        return lax.psum_scatter(x, self.axis, scatter_dimension=1, tiled=True)

    def first_position(self, size: int) -> Array | int:
        """The first of the `size` positions of a sequence that this device holds."""
        return self.index() * size if self.positions == "shared" else 0

    def reduce(self, x: Array) -> Array:
        """The sum over the devices, the same on each."""
        return x if self.axis is None else lax.psum(x, self.axis)

    def largest(self, x: Array) -> Array:
        """The maximum over the devices, the same on each; no gradient goes through it."""
        x = lax.stop_gradient(x)
        return x if self.axis is None else lax.pmax(x, self.axis)


ONE_DEVICE = Communication()


def column_parallel(
    comm: Communication, x: Float[Array, "B s *I"], product: Callable[[Array], Float[Array, "B S *o"]]
) -> Float[Array, "B S *o"]:
    """A product whose output columns are shared: gathers the positions, then multiplies by this device's columns."""
    return product(comm.gather_sequence(x))


def row_parallel(
    comm: Communication, x: Float[Array, "B S *i"], product: Callable[[Array], Float[Array, "B S *O"]]
) -> Float[Array, "B s *O"]:
    """A product whose input rows are shared: multiplies by this device's rows, then sums and scatters the positions.

    A bias belongs after this, once, not inside `product`.
    """
    return comm.scatter_sequence(product(x))


def own_part(comm: Communication, size: int) -> Array:
    """Indices of this device's `size` entries of a dim that the devices share in order."""
    return comm.index() * size + jnp.arange(size)


__all__ = ["ONE_DEVICE", "Communication", "column_parallel", "own_part", "row_parallel"]
