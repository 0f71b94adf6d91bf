"""What the parallel machinery knows of a model, and how layers are dealt to pipeline stages."""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, PyTree

from giantjax.errors import InputError
from giantjax.parallel.partition import BLOCK, Weights, counts_of, layer_table
from giantjax.parallel.product import Weight, is_stash_or_none
from giantjax.parallel.spans import Span

Params = dict[str, Any]
"""`blocks`, whose leaves are stacked by layer, [num_layers, ...], and any further entries, shared by all stages.

Of a model with blocks of several kinds, `blocks` has an entry of each kind, stacked over the blocks of that kind alone.
"""
Batch = dict[str, Array]
Boundary: TypeAlias = Any
"""What goes from block to block: any pytree of arrays of fixed shapes; those that are not floating carry no cotangent."""
BLOCKS = "blocks"
BlockFunction: TypeAlias = Callable[[Params, Params, Boundary, Array, Batch, Array | None], Boundary]


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
    block: BlockFunction | Mapping[str, BlockFunction]
    """shared, parameters of one block, boundary, index of the block in the model, microbatch, step -> boundary; of several kinds one
    of each, by name."""
    loss: Callable[[Params, Boundary, Batch, Array | None], tuple[Float[Array, ""], dict[str, Array]]]
    """shared, last boundary, microbatch, step -> summed loss and further sums to report; `weight` divides them all."""
    weight: Callable[[Batch], Float[Array, ""]]
    """batch -> what sums of losses over it are divided by, such as its number of unmasked positions."""
    order: tuple[str, ...] = ()
    """The kind of each block, in the order in which they run, where there are several kinds."""
    sizes: dict[str, int] = field(default_factory=dict)
    """Sizes without padding of dims that are padded for the mesh; what lies beyond is zero and stays so."""
    casts: Params | None = None
    """In each parameter's place whether it arrives as a `Weight` with a copy in `dtype`; None casts nothing."""
    dtype: DTypeLike | None = None
    """Of the copies."""
    spreads_head: bool = False
    """Whether all stages compute `loss` together, each a share of it, such as a part of the vocabulary, over the mesh axis `pipe`."""
    ends: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
    """Names of the entries that `embed` uses and of those that `loss` uses, for a partition by parameters."""
    kept: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """By recompute policy the names (`jax.ad_checkpoint.checkpoint_name`) in a block whose values the backward pass finds
    kept; a policy without an entry keeps all that autodiff asks for."""


def by_kind(model: Model, blocks: PyTree) -> dict[str, PyTree]:
    """What is in the place of `blocks` in a tree like the parameters, or the functions of blocks, by kind."""
    return dict(blocks) if model.order else {BLOCK: blocks}


def from_kinds(model: Model, kinds: dict[str, PyTree]) -> PyTree:
    """The inverse of `by_kind`."""
    return kinds if model.order else kinds[BLOCK]


def order_of(model: Model) -> tuple[str, ...]:
    """The kind of each block, in order.

    Raises:
        ValueError: `model.order` has other kinds than there are functions or parameters of, or another number of blocks.
    """
    blocks = jax.eval_shape(model.init, jax.random.key(0))[BLOCKS]
    numbers = {kind: jax.tree.leaves(tree)[0].shape[0] for kind, tree in by_kind(model, blocks).items()}
    order = model.order or (BLOCK,) * numbers[BLOCK]
    counts, functions = {kind: order.count(kind) for kind in dict.fromkeys(order)}, by_kind(model, model.block)
    if counts != numbers or functions.keys() != numbers.keys():
        raise ValueError(f"the order of a model has blocks {counts}, but its parameters have {numbers} and its functions {list(functions)}")
    return order


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


def deal(model: Model, partition: str, num_stages: int, num_chunks: int = 1) -> Int[np.ndarray, "S L"]:
    """Which layers each stage holds, chunk after chunk, all chunks of one length; -1 pads those that hold fewer.

    Raises:
        InputError: `partition` does not suit the model, as `counts_of` says, or is yet to be measured.
    """
    order, size = order_of(model), lambda tree: sum(leaf.size for leaf in jax.tree.leaves(tree))
    if partition == "profile":
        like = ",".join(map(str, counts_of("uniform", order, num_stages * num_chunks)))
        raise InputError(f"pipeline.partition is profile, which a run measures at its start; name what it has found, such as manual:{like}")
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    each = {kind: size(tree) // order.count(kind) for kind, tree in by_kind(model, shapes[BLOCKS]).items()}
    first, last = (sum(size(shapes[name]) for name in names) for names in model.ends)
    weights = Weights(tuple(each[kind] for kind in order), first, last)
    counts = counts_of(partition, order, num_stages * num_chunks, weights)
    return layer_table(counts if num_stages > 1 else (len(order),), num_stages)


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


def apply_blocks(
    model: Model,
    shared: Params,
    spans: Sequence[Span],
    layers: Sequence[Array],
    blocks: Sequence[dict[str, PyTree]],
    boundary: Boundary,
    batch: Batch,
    step: Array | None,
    recompute: str,
) -> Boundary:
    """Blocks in order, keeping for the backward pass what the policy `recompute` names.

    `none` keeps the results of matrix products and redoes only elementwise work; `selective` makes the attention core
    again too (Korthikanti et al., 2022); `full` keeps only the input of each block; `full:K` of every K-th.

    What a gradient is taken of must be cut into spans beforehand: a pullback that cuts keeps the pieces beside the whole.

    Args:
        model: whose blocks they are.
        shared: the parameters that all layers share.
        spans: from `spans_of` under the same policy.
        layers: from `cut`, the index of each layer; -1 is padding, which leaves the boundary as it is.
        blocks: from `cut`, parameters by kind.
        boundary: what enters the first of them.
        batch: the microbatch.
        step: steps taken, or None in evaluation.
        recompute: the policy.
    """
    for span, *stacked in zip(spans, layers, blocks, strict=True):
        one = _block_of(model, span, shared, batch, step)
        if not recompute.startswith("full") and recompute in model.kept:
            one = jax.checkpoint(one, policy=jax.checkpoint_policies.save_only_these_names(*model.kept[recompute]))
        elif not recompute.startswith("full") and span.chooses:
            # A conditional by itself would keep copies of its operands, weights among them.
            one = jax.checkpoint(one, policy=jax.checkpoint_policies.dots_saveable)
        body = one if span.every == 1 else lambda x, stacked, one=one: lax.scan(one, x, stacked)
        boundary, _ = lax.scan(jax.checkpoint(body) if recompute.startswith("full") else body, boundary, tuple(stacked))
    return boundary


def _block_of(model: Model, span: Span, shared: Params, batch: Batch, step: Array | None) -> Callable[..., tuple[Boundary, None]]:
    """The body of the loop over a span: boundary, (layer, parameters by kind) -> boundary."""
    functions = by_kind(model, model.block)
    # Which of the span's kinds each layer is of.
    numbers = np.array([span.kinds.index(kind) if kind in span.kinds else 0 for kind in model.order or span.kinds], np.int32)

    def run(kind: str, x: Boundary, layer: Array, params: dict[str, Params]) -> Boundary:
        return functions[kind](shared, params[kind], x, jnp.maximum(layer, 0), batch, step)

    def one(x: Boundary, layer_and_params: tuple[Array, dict[str, Params]]) -> tuple[Boundary, None]:
        layer, params = layer_and_params
        if span.chooses:
            branches = [functools.partial(run, kind) for kind in span.kinds] + [lambda x, *_: x] * span.padded
            number = jnp.asarray(numbers)[layer] if len(span.kinds) > 1 else 0
            return lax.switch(jnp.where(layer < 0, len(span.kinds), number), branches, x, layer, params), None
        y = run(span.kinds[0], x, layer, params)
        return (jax.tree.map(lambda new, old: jnp.where(layer >= 0, new, old), y, x) if span.padded else y), None

    return one
