"""ZeRO stages 2 and 3 (Rajbhandari et al., 2020): devices along `data` share gradients, and under 3 parameters too.

Gradients are taken of shares, and the model is handed whole parameters: under 3 gathered by each layer for itself, under 2 those
that lie there. A whole parameter gives its gradient to the share that stands for it by a reduce-scatter, so that no device ever holds
more than a layer's whole gradients. Both move bytes in every microbatch, and so belong inside a node.

Weights are gathered in the type of matrix products, what is looked up or added in fp32; gradients are scattered in fp32.
"""

import functools
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, PyTree

from giantjax.config import recompute_interval
from giantjax.parallel.product import Weight
from giantjax.parallel.stages import (
    BLOCKS,
    Batch,
    BlockFunction,
    Boundary,
    Model,
    Params,
    by_kind,
    compute_copies,
    from_kinds,
    shared_of,
)
from giantjax.parallel.varying import varying

DATA = "data"


@dataclass(frozen=True, eq=False)
class Zero:
    """What devices along `data` share while the model runs."""

    stage: Literal[2, 3]
    dims: PyTree
    """In each parameter's place the dim that is shared, counted from the last, -1, so that it is the same of one layer and of many;
    0 where none is."""


def scattered(grads: PyTree, dims: PyTree) -> PyTree:
    """This device's shares of the sums of gradients over `data`; its own gradient where the dim is 0."""

    def scatter(dim: int, grad: Array | None) -> Array | None:
        if grad is None or not dim:
            return grad
        return lax.psum_scatter(grad, DATA, scatter_dimension=grad.ndim + dim, tiled=True)

    return jax.tree.map(scatter, dims, grads)


def hold(model: Model, params: Params, zero: Zero | None) -> tuple[Params, Params]:
    """(What gradients are taken of, what else of the parameters a step reads): made once a step, outside of any pullback.

    The latter has in a parameter's place its copy in the type of matrix products, or None. Under ZeRO 2, where gradients are taken of
    shares, it has the whole parameter too, as a `Weight`; of the share nothing but its gradient is used.

    Args:
        model: whose they are.
        params: this device's, whole or under ZeRO 3 shares.
        zero: what is shared; None shares nothing.
    """
    copies = compute_copies(model, params)
    if zero is None or zero.stage == 3:
        return params, copies

    def share(x: Array, dim: int) -> Array:
        shape = [size // lax.axis_size(DATA) if place - x.ndim == dim else size for place, size in enumerate(x.shape)]
        return varying(jnp.zeros(shape, x.dtype)) if dim else x

    whole = jax.tree.map(lambda x, dim, copy: Weight(x, copy) if dim else copy, params, zero.dims, copies)
    return jax.tree.map(share, params, zero.dims), whole


def on_shares(model: Model, zero: Zero, recompute: str) -> Model:
    """`model` as functions of what `hold` gives, each parameter made whole by whoever uses it.

    Args:
        model: functions of whole parameters.
        zero: what is shared.
        recompute: the policy of `apply_blocks`. Under ZeRO 3 the backward pass gathers anew, whatever it is: where the model does not
            name what to keep, and in a group of layers of `full:K`, the results of products are kept and nothing else.
    """
    shared_dims = shared_of(zero.dims)
    whole = _gathered if zero.stage == 3 else _held

    def made_whole(dims: PyTree, tree: PyTree, batch: Batch) -> PyTree:
        return jax.tree.map(lambda dim, x: whole(x, dim, _sign_of(batch)) if dim else x, dims, tree)

    def embed(shared: Params, batch: Batch, step: Array | None) -> Boundary:
        return model.embed(made_whole(shared_dims, shared, batch), batch, step)

    def of_kind(function: BlockFunction, dims: PyTree) -> BlockFunction:
        def block(shared: Params, params: Params, x: Boundary, layer: Array, batch: Batch, step: Array | None) -> Boundary:
            shared, params = made_whole(shared_dims, shared, batch), made_whole(dims, params, batch)
            return function(shared, params, x, layer, batch, step)

        return jax.checkpoint(block, policy=jax.checkpoint_policies.dots_saveable) if gathers_anew else block

    def loss(shared: Params, x: Boundary, batch: Batch, step: Array | None) -> tuple[Array, dict[str, Array]]:
        return model.loss(made_whole(shared_dims, shared, batch), x, batch, step)

    named = recompute.startswith("full") or recompute in model.kept
    gathers_anew = zero.stage == 3 and (recompute_interval(recompute) > 1 or not named)
    dims = by_kind(model, zero.dims[BLOCKS])
    blocks = {kind: of_kind(function, dims[kind]) for kind, function in by_kind(model, model.block).items()}
    return replace(model, embed=embed, block=from_kinds(model, blocks), loss=loss)


def _sign_of(batch: Batch) -> Array:
    """A number of this microbatch."""
    leaf = jax.tree.leaves(batch)[0]
    return leaf[(0,) * leaf.ndim]


def _held(x: Weight, dim: int, _: Array) -> Any:
    """What ZeRO 2 has whole."""
    parameter = _standing_for(x.parameter, x.copy.parameter, dim)
    return parameter if x.copy.copy is None else replace(x, parameter=parameter, copy=x.copy.copy)


def _gathered(x: Any, dim: int, microbatch: Array) -> Any:
    """What ZeRO 3 gathers."""
    share = x.parameter if isinstance(x, Weight) else x
    # A product reads the copy alone, and what is gathered for nobody is not gathered.
    parameter = _standing_for(share, _gather(share, dim, microbatch), dim)
    return replace(x, parameter=parameter, copy=_gather(x.copy, dim, microbatch)) if isinstance(x, Weight) else parameter


def _gather(share: Array, dim: int, microbatch: Array) -> Array:
    # Tied to the microbatch, for a compiler moves what is the same in every tick out of the loop over ticks, and keeps it.
    share, _ = lax.optimization_barrier((lax.stop_gradient(share), microbatch))
    return lax.all_gather(share, DATA, axis=share.ndim + dim, tiled=True)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _standing_for(share: Array, whole: Array, dim: int) -> Array:
    """`whole`, of which `share` gets the gradient."""
    return whole


def _standing_for_forward(share: Array, whole: Array, dim: int) -> tuple[Array, None]:
    return whole, None


def _standing_for_backward(dim: int, _: None, cotangent: Array) -> tuple[Array, None]:
    return scattered(cotangent, dim), None


_standing_for.defvjp(_standing_for_forward, _standing_for_backward)
