"""What the parallel machinery knows of a model, and how layers are dealt to pipeline stages."""

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, PyTree

from giantjax.parallel.product import Weight, is_stash_or_none

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
    casts: Params | None = None
    """In each parameter's place whether it arrives as a `Weight` with a copy in `dtype`; None casts nothing."""
    dtype: DTypeLike | None = None
    """Of the copies."""
    spreads_head: bool = False
    """Whether all stages compute `loss` together, each a share of it, such as a part of the vocabulary, over the mesh axis `pipe`."""
    kept: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """By recompute policy the names (`jax.ad_checkpoint.checkpoint_name`) in a block whose values the backward pass finds
    kept; a policy without an entry keeps all that autodiff asks for."""


def shared_of(params: Params) -> Params:
    """The parameters that no layer owns."""
    return {name: value for name, value in params.items() if name != BLOCKS}


def compute_copies(model: Model, params: Params) -> Params:
    """In each parameter's place its copy in `model.dtype`, or None where it has none."""
    casts = model.casts or jax.tree.map(lambda _: False, params)
    copy = lambda x: x if x.dtype == model.dtype else x.astype(model.dtype)  # noqa: E731
    return jax.tree.map(lambda x, casts: copy(x) if casts else None, params, casts)


def with_copies(params: Params, copies: Params, stashes: Params | None = None) -> Params:
    """`params`, those that have a copy as a `Weight`; only the parameters are what a gradient is taken of.

    `stashes` has in a parameter's place the `Stash` of its `Weight`, or None.
    """
    stashes = jax.tree.map(lambda _: None, params) if stashes is None else stashes
    return jax.tree.map(
        lambda stash, copy, x: x if copy is None else Weight(x, copy, stash), stashes, copies, params, is_leaf=is_stash_or_none
    )


def layer_table(num_layers: int, num_stages: int, num_chunks: int = 1) -> Int[np.ndarray, "S L"]:
    """Which layers each stage holds, chunk after chunk, all chunks of one length; -1 pads those that hold fewer.

    The model runs through the first chunk of every stage, then the second of every stage, and so on. The first of these take
    one more layer where the layers do not divide.
    """
    size, more = divmod(num_layers, num_stages * num_chunks)
    table = np.full((num_chunks, num_stages, size + (more > 0)), -1, np.int32)
    first = 0
    for number, (chunk, stage) in enumerate(np.ndindex(num_chunks, num_stages)):
        count = size + (number < more)
        table[chunk, stage, :count] = np.arange(first, first + count)
        first += count
    return table.transpose(1, 0, 2).reshape(num_stages, -1)


def is_in_order(table: Int[np.ndarray, "S L"]) -> bool:
    """Whether stages hold the layers one after the other, without padding, so that both layouts are the same."""
    return bool((table.ravel() == np.arange(table.size)).all())


def to_device_layout(stacked: PyTree, table: Int[np.ndarray, "S L"]) -> PyTree:
    """Leaves stacked by layer, [num_layers, ...], as leaves [S * L, ...] in the order of `table`, zeros where it pads."""
    if is_in_order(table):
        return stacked
    order = table.ravel()
    real = order >= 0
    return jax.tree.map(lambda a: jnp.where(real.reshape(-1, *[1] * (a.ndim - 1)), a[np.maximum(order, 0)], 0), stacked)


def to_disk_layout(stacked: PyTree, table: Int[np.ndarray, "S L"]) -> PyTree:
    """The inverse of `to_device_layout`."""
    if is_in_order(table):
        return stacked
    places = np.argsort(table.ravel())[int((table < 0).sum()) :]
    return jax.tree.map(lambda a: a[places], stacked)


def group_layers(stacked: PyTree, recompute: str) -> list[PyTree]:
    """Leaves stacked by layer, [L, ...], cut as the policy `recompute` makes them again.

    `full:K` gives groups of K layers, [L // K, K, ...], and what is left over, [1, L % K, ...]; other policies [L, ...].
    """
    num_layers = jax.tree.leaves(stacked)[0].shape[0]
    every = min(recompute_interval(recompute), num_layers)
    if every == 1:
        return [stacked]
    whole = num_layers // every * every
    cuts = [(0, whole, every)] + ([(whole, num_layers, num_layers - whole)] if whole < num_layers else [])
    return [jax.tree.map(lambda a: a[first:stop].reshape(-1, size, *a.shape[1:]), stacked) for first, stop, size in cuts]  # noqa: B023


def ungroup_layers(groups: list[PyTree], num_dims: list[int]) -> PyTree:
    """Leaves stacked by layer, [L, ...], from groups of which each has so many dims for its layers."""
    if num_dims == [1]:
        return groups[0]

    def join(*parts: Array) -> Array:
        return jnp.concatenate([a.reshape(-1, *a.shape[number:]) for a, number in zip(parts, num_dims, strict=True)])

    return jax.tree.map(join, *groups)


def cut_layers(num_layers: int, num_parts: int) -> list[slice]:
    """Layers in order, cut into parts of which none has more than one layer more than another."""
    ends = np.linspace(0, num_layers, num_parts + 1).round().astype(int)
    return [slice(int(first), int(stop)) for first, stop in itertools.pairwise(ends)]


def recompute_interval(recompute: str) -> int:
    """K of `full:K`, else 1."""
    return int(recompute.partition(":")[2] or 1)


def apply_blocks(
    model: Model,
    shared: Params,
    groups: list[PyTree],
    boundary: Boundary,
    batch: Batch,
    step: Array | None,
    recompute: str,
    padded: bool = False,
) -> Boundary:
    """The blocks of `groups` in order, keeping for the backward pass what the policy `recompute` names.

    `none` keeps the results of matrix products and redoes only elementwise work; `selective` makes the attention core
    again too (Korthikanti et al., 2022); `full` keeps only the input of each block; `full:K` of every K-th.

    What a gradient is taken of must be cut into groups beforehand: a pullback that cuts keeps the pieces beside the whole.

    Args:
        model: whose blocks they are.
        shared: the parameters that all layers share.
        groups: from `group_layers` of (index of each layer [L], parameters stacked [L, ...]); index -1 is padding, which
            leaves the boundary as it is.
        boundary: what enters the first of them.
        batch: the microbatch.
        step: steps taken, or None in evaluation.
        recompute: the policy.
        padded: whether an index may be -1.
    """

    def one(x: Boundary, layer_and_params: tuple[Array, Params]) -> tuple[Boundary, None]:
        layer, block = layer_and_params
        y = model.block(shared, block, x, jnp.maximum(layer, 0), batch, step)
        return (jax.tree.map(lambda new, old: jnp.where(layer >= 0, new, old), y, x) if padded else y), None

    if not recompute.startswith("full") and recompute in model.kept:
        one = jax.checkpoint(one, policy=jax.checkpoint_policies.save_only_these_names(*model.kept[recompute]))

    def group(x: Boundary, layers_and_params: PyTree) -> tuple[Boundary, None]:
        return lax.scan(one, x, layers_and_params)

    for stacked in groups:
        body = one if stacked[0].ndim == 1 else group
        boundary, _ = lax.scan(jax.checkpoint(body) if recompute.startswith("full") else body, boundary, stacked)
    return boundary
