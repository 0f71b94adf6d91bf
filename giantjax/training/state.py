"""What a train step turns into its successor."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, PyTree

from giantjax.errors import TrainingFault
from giantjax.model.gpt import Model
from giantjax.parallel.sharding import partition_specs, shardings


class TrainState(NamedTuple):
    """Parameters, optimizer state and the number of steps taken."""

    step: PyTree
    """int32 scalar."""
    params: PyTree
    """fp32, as the model made them."""
    optimizer: PyTree
    """Of optax."""


def new_state(model: Model, optimizer: optax.GradientTransformation, key: Array) -> TrainState:
    """The state before the first step; traceable."""
    params = model.init(key)
    return TrainState(jnp.int32(0), params, optimizer.init(params))


def state_specs(model: Model, optimizer: optax.GradientTransformation) -> TrainState:
    """How each leaf of the state lies on the mesh: a moment lies as its parameter does, a counter is replicated."""
    abstract = jax.eval_shape(lambda: new_state(model, optimizer, jax.random.key(0)))
    params = partition_specs(model.dims)
    moments = optax.tree_map_params(
        optimizer, lambda _, spec: spec, abstract.optimizer, params, transform_non_params=lambda _: PartitionSpec()
    )
    return TrainState(PartitionSpec(), params, moments)


def init_state(model: Model, optimizer: optax.GradientTransformation, mesh: Mesh, seed: int) -> TrainState:
    """The state before the first step, made on the devices that hold it."""
    placed = shardings(mesh, state_specs(model, optimizer))
    return jax.jit(lambda key: new_state(model, optimizer, key), out_shardings=placed)(jax.random.key(seed))


def check_finite(state: TrainState, step: int) -> None:
    """Make sure that the state after `step` holds neither NaN nor infinity, so that no checkpoint ever does.

    Raises:
        TrainingFault: a leaf does; the sentence names it.
    """
    finite = jax.device_get(_finite(state))
    bad = [jax.tree_util.keystr(path) for path, whole in jax.tree_util.tree_leaves_with_path(finite) if not whole]
    if bad:
        raise TrainingFault(
            f"after step {step} arrays of the state are not finite ({len(bad)} of them, {bad[0]} the first), so it is not saved; "
            "a lower optimizer.learning_rate or a longer optimizer.warmup is the usual remedy"
        )


@jax.jit
def _finite(state: TrainState) -> PyTree:
    return jax.tree.map(lambda leaf: jnp.isfinite(leaf).all(), state)


def abstract_state(model: Model, optimizer: optax.GradientTransformation, mesh: Mesh) -> TrainState:
    """Shapes, types and shardings of the state, for a restore."""
    shapes = jax.eval_shape(lambda: new_state(model, optimizer, jax.random.key(0)))
    placed = shardings(mesh, state_specs(model, optimizer))
    return jax.tree.map(lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), shapes, placed)
