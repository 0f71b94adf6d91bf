"""What the parallel machinery knows of a model, and how layers are dealt to pipeline stages."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, PyTree

Params = dict[str, Any]
"""`blocks`, whose leaves are stacked by layer, [num_layers, ...], and any further entries, shared by all stages."""
Batch = dict[str, Array]
Boundary: TypeAlias = Any
"""What goes from block to block: any pytree of arrays of fixed shapes; those that are not floating carry no cotangent."""
BLOCKS = "blocks"


@dataclass(frozen=True)
class Model:
    """A model as pure functions: `batch -> boundary`, repeated blocks, `boundary, batch -> loss`.

    `shared` is the parameters without `blocks`; a weight that several places use, such as a tied embedding, is an entry
    of it. `step` is the number of steps taken, from which dropout is drawn, or None in evaluation.
    """

    init: Callable[[Array], Params]
    """PRNG key -> fp32 parameters."""
    dims: Params
    """In each parameter's place a tuple of names of its dims, for the sharding table; `layers` first in `blocks`."""
    decays: Params
    """In each parameter's place whether weight decay applies."""
    embed: Callable[[Params, Batch, Array | None], Boundary]
    """shared, microbatch, step -> the boundary that enters the first block."""
    block: Callable[[Params, Params, Boundary, Array, Batch, Array | None], Boundary]
    """shared, parameters of one block, boundary, index of the block, microbatch, step -> boundary."""
    loss: Callable[[Params, Boundary, Batch, Array | None], tuple[Float[Array, ""], dict[str, Array]]]
    """shared, last boundary, microbatch, step -> summed loss and further sums to report; `weight` divides them all."""
    weight: Callable[[Batch], Float[Array, ""]]
    """batch -> what sums of losses over it are divided by, such as its number of unmasked positions."""
    sizes: dict[str, int] = field(default_factory=dict)
    """Sizes without padding of dims that are padded for the mesh; what lies beyond is zero and stays so."""


def shared_of(params: Params) -> Params:
    """The parameters that no layer owns."""
    return {name: value for name, value in params.items() if name != BLOCKS}


def layer_table(num_layers: int, num_stages: int) -> Int[np.ndarray, "S L"]:
    """Which layers each stage holds, in order; -1 pads stages that hold fewer.

    The first stages take one more where the layers do not divide.
    """
    size, more = divmod(num_layers, num_stages)
    table = np.full((num_stages, size + (more > 0)), -1, np.int32)
    first = 0
    for stage in range(num_stages):
        count = size + (stage < more)
        table[stage, :count] = np.arange(first, first + count)
        first += count
    return table


def to_device_layout(stacked: PyTree, table: Int[np.ndarray, "S L"]) -> PyTree:
    """Leaves stacked by layer, [num_layers, ...], as leaves [S * L, ...] in the order of `table`, zeros where it pads."""
    order = table.ravel()
    if (order >= 0).all():
        return stacked
    real = order >= 0
    return jax.tree.map(lambda a: jnp.where(real.reshape(-1, *[1] * (a.ndim - 1)), a[np.maximum(order, 0)], 0), stacked)


def to_disk_layout(stacked: PyTree, table: Int[np.ndarray, "S L"]) -> PyTree:
    """The inverse of `to_device_layout`."""
    order = table.ravel()
    if (order >= 0).all():
        return stacked
    places = np.flatnonzero(order >= 0)
    return jax.tree.map(lambda a: a[places], stacked)


def apply_blocks(
    model: Model,
    params: Params,
    layers: Int[Array, "L"],
    boundary: Boundary,
    batch: Batch,
    step: Array | None,
    recompute: str,
    padded: bool,
) -> Boundary:
    """The blocks `layers` in order, keeping for the backward pass what the policy `recompute` names.

    `none` keeps the results of matrix products and redoes only elementwise work; `selective` makes the attention core
    again too (Korthikanti et al., 2022); `full` keeps only the input of each block; `full:K` of every K-th.

    Args:
        model: whose blocks they are.
        params: `blocks` stacked [L, ...], and the shared parameters.
        layers: index of each block; -1 is padding, which leaves the boundary as it is.
        boundary: what enters the first of them.
        batch: the microbatch.
        step: steps taken, or None in evaluation.
        recompute: the policy.
        padded: whether `layers` may hold -1 anywhere.
    """
    shared, num_layers = shared_of(params), layers.shape[0]
    kind, _, interval = recompute.partition(":")
    every = min(int(interval or 1), num_layers)
    whole = num_layers // every * every

    def one(x: Boundary, layer_and_params: tuple[Array, Params]) -> tuple[Boundary, None]:
        layer, block = layer_and_params
        y = model.block(shared, block, x, jnp.maximum(layer, 0), batch, step)
        return (jax.tree.map(lambda new, old: jnp.where(layer >= 0, new, old), y, x) if padded else y), None

    def group(x: Boundary, stacked: tuple[Array, Params]) -> tuple[Boundary, None]:
        return lax.scan(one, x, stacked)

    stacked = (layers, params[BLOCKS])
    if kind != "full":
        kept = ["qkv", "context", "residual", "up"] + (["attention_weights"] if kind == "none" else [])
        policy = jax.checkpoint_policies.save_only_these_names(*kept)
        return lax.scan(jax.checkpoint(one, policy=policy), boundary, stacked)[0]
    if every == 1:
        # Not grouped: the executor knows parameters by their identity, and would keep a reshaped copy of them in every slot.
        return lax.scan(jax.checkpoint(one), boundary, stacked)[0]
    grouped = jax.tree.map(lambda a: a[:whole].reshape(whole // every, every, *a.shape[1:]), stacked)
    boundary, _ = lax.scan(jax.checkpoint(group), boundary, grouped)
    if whole < num_layers:
        boundary, _ = jax.checkpoint(group)(boundary, jax.tree.map(lambda a: a[whole:], stacked))
    return boundary
