"""Buffers of slots that keep arrays from one tick to a later one."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from giantjax.parallel.schedule import IDLE
from giantjax.parallel.varying import zeros


def new_ring(leaves: list[Array], number: int) -> list[Array]:
    """`number` empty slots for arrays like `leaves`: each [number, ...]."""
    return [zeros(leaf, number) for leaf in leaves]


def take(ring: list[Array], slot: Int[Array, ""]) -> list[Array]:
    """The leaves in `slot`; any, where it is IDLE."""
    return [lax.dynamic_index_in_dim(buffer, jnp.maximum(slot, 0), keepdims=False) for buffer in ring]


def put(ring: list[Array], leaves: list[Array], slot: Int[Array, ""], always: bool) -> list[Array]:
    """`ring` with `leaves` in `slot`; as it was where that is IDLE, which it never is where it `always` is a slot."""
    place = jnp.maximum(slot, 0)

    def one(buffer: Array, leaf: Array) -> Array:
        # What is written in place costs half the memory traffic of a choice between old and new.
        if not always:
            leaf = jnp.where(slot == IDLE, lax.dynamic_index_in_dim(buffer, place, keepdims=False), leaf)
        return lax.dynamic_update_index_in_dim(buffer, leaf, place, 0)

    return [one(buffer, leaf) for buffer, leaf in zip(ring, leaves, strict=True)]
