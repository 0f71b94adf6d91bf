"""The keys and values of tokens that were decoded before, so that each token is computed once."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

DIMS = ("layers", "batch", "position", "heads", "head")
"""Of both arrays, for the sharding table."""


class Cache(NamedTuple):
    """Keys and values of L layers, B samples, S positions, N heads, D a head."""

    key: Float[Array, "L B S N D"]
    value: Float[Array, "L B S N D"]


def of_layer(cache: Cache, slot: Int[Array, ""]) -> tuple[Float[Array, "B S N D"], Float[Array, "B S N D"]]:
    """Keys and values of one layer."""
    key, value = (lax.dynamic_index_in_dim(array, slot, keepdims=False) for array in cache)
    return key, value


def with_layer(
    cache: Cache, slot: Int[Array, ""], position: Int[Array, "B T"], key: Float[Array, "B T N D"], value: Float[Array, "B T N D"]
) -> Cache:
    """The cache with keys and values of T tokens of each sample; those whose position is not below S are left out."""
    sample = jnp.arange(position.shape[0])[:, None]
    return Cache(*(array.at[slot, sample, position].set(new, mode="drop") for array, new in zip(cache, (key, value), strict=True)))
