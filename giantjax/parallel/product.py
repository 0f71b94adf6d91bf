"""Matrix products of activations with a weight, and the weight's gradient, at once or later.

A product reads the copy of its weight in the compute type, and gives the gradient to the parameter in fp32: it is accumulated
there and never rounded to the compute type, which matters once many microbatches are summed (Megatron's fp32 gradient
accumulation fusion).

Zero bubble schedules compute the gradient of weights in ticks of their own (Qi et al., 2023). Then the weight comes with
a `stash`, whose cotangent is not a derivative but what the gradient is made of later: the input of the product and the
cotangent of its output.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Stash:
    """What the gradient of a product's weight is made of."""

    x: Any
    """The input."""
    dy: Any
    """The cotangent of the output."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Weight:
    """A parameter with its copy in the type of matrix products, which is made once a step."""

    parameter: Any
    copy: Any
    stash: Stash | None = None
    """Zeros of the types of what its only product leaves, where the gradient is made later."""
    seen: Callable[[Array, Array], None] | None = field(default=None, metadata={"static": True})
    """Told the input and the output of each product while a model is looked over."""


def is_stash_or_none(x: Any) -> bool:
    """Whether this stands in the place of one weight in a tree of stashes."""
    return x is None or isinstance(x, Stash)


def product(x: Float[Array, "B S *I"], kernel: Weight) -> Float[Array, "B S *O"]:
    """The matrix product of activations with a kernel `[*I, *O]` in their type."""
    y = (_product if kernel.stash is None else _deferring_product)(x, kernel)
    if kernel.seen:
        kernel.seen(x, y)
    return y


@jax.custom_vjp
def _product(x: Array, kernel: Weight) -> Array:
    inner = x.ndim - 2
    return lax.dot_general(x, kernel.copy, ((tuple(range(2, x.ndim)), tuple(range(inner))), ((), ())))


def _forward(x: Array, kernel: Weight) -> tuple[Array, tuple[Array, Weight]]:
    return _product(x, kernel), (x, Weight(None, kernel.copy, seen=kernel.seen))


def _input_gradient(dy: Array, copy: Array) -> Array:
    inner = dy.ndim - 2
    outer = tuple(range(copy.ndim - inner, copy.ndim))
    return lax.dot_general(dy, copy, ((tuple(range(2, dy.ndim)), outer), ((), ())))


def _backward(saved: tuple[Array, Weight], dy: Array) -> tuple[Array, Weight]:
    x, kernel = saved
    return _input_gradient(dy, kernel.copy), Weight(weight_gradient(x, dy), jnp.zeros_like(kernel.copy), seen=kernel.seen)


_product.defvjp(_forward, _backward)


@jax.custom_vjp
def _deferring_product(x: Array, kernel: Weight) -> Array:
    return _product(x, kernel)


def _deferring_backward(saved: tuple[Array, Weight], dy: Array) -> tuple[Array, Weight]:
    x, kernel = saved
    none = jnp.zeros_like(kernel.copy, dtype=jnp.float32)
    return _input_gradient(dy, kernel.copy), Weight(none, jnp.zeros_like(kernel.copy), Stash(x, dy), kernel.seen)


_deferring_product.defvjp(_forward, _deferring_backward)


def weight_gradient(x: Float[Array, "B S *I"], dy: Float[Array, "B S *O"]) -> Float[Array, "..."]:
    """fp32 gradient of a product's weight from its input and the cotangent of its output."""
    return lax.dot_general(x, dy, (((0, 1), (0, 1)), ((), ())), preferred_element_type=jnp.float32)
