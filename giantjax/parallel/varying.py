"""Over which mesh axes a value may differ inside a `shard_map`, as its type says."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, PyTree

from giantjax.parallel.placement import AXES


def varying_axes(x: Array) -> frozenset[str]:
    """The mesh axes over which `x` may differ, as its type says."""
    return frozenset(jax.typeof(x).manual_axis_type.varying)


def varying(tree: PyTree, axes: frozenset[str] | tuple[str, ...] = AXES) -> PyTree:
    """`tree` marked as varying over `axes`, by default every mesh axis.

    Gradients of parameters that are invariant over an axis are summed over it in every tick; those of varying
    parameters stay local, so that the sum can be taken once after the loop.
    """

    def mark(x: Array) -> Array:
        missing = tuple(axis for axis in AXES if axis in axes and axis not in varying_axes(x))
        return lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(mark, tree)


def zeros(like: Any, *more: int) -> Array:
    """Zeros of a type (`jax.typeof`), or of the type of an array, with `more` dims in front."""
    kind = jax.typeof(like) if isinstance(like, jax.Array) else like
    return varying(jnp.zeros((*more, *kind.shape), kind.dtype), frozenset(kind.manual_axis_type.varying))
