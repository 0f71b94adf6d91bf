"""From the rows of a batch that a process reads to arrays that lie on the devices of all."""

import jax
import numpy as np
from jax.sharding import NamedSharding

from giantjax.data.loader import Batch


def rows_here(placement: NamedSharding, batch_size: int) -> list[int]:
    """Rows of a global batch that the devices of this process hold, in order; several processes may hold the same."""
    held = placement.addressable_devices_indices_map((batch_size,)).values()
    return sorted({row for index in held if index is not None for row in range(batch_size)[index[0]]})


def spread(batch: Batch, placement: NamedSharding, batch_size: int, rows: list[int]) -> dict[str, jax.Array]:
    """The global batch whose `rows` are those of `batch`, laid over the mesh."""
    place = np.full(batch_size, -1)
    place[rows] = np.arange(len(rows))

    def laid(array: np.ndarray) -> jax.Array:
        def of(index: tuple[slice, ...] | None) -> np.ndarray:
            assert index is not None
            return array[place[index[0]]]

        return jax.make_array_from_callback((batch_size, *array.shape[1:]), placement, of, dtype=array.dtype)

    return {name: laid(array) for name, array in batch.items()}
