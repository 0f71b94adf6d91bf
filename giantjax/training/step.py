"""The train step and the evaluation step: one `shard_map` over the whole mesh."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float32, PyTree

from giantjax.config import RunConfig
from giantjax.model.dropout import dropout_key
from giantjax.model.gpt import Batch, Model, Params, apply_blocks
from giantjax.parallel.mesh import AXES, BATCH_AXES
from giantjax.parallel.sharding import partition_spec, shardings
from giantjax.training.optimizer import learning_rate_schedule
from giantjax.training.state import TrainState, state_specs


class StepMetrics(NamedTuple):
    """What one step reports, each a scalar on the device."""

    loss: Float32[Array, ""]
    """Mean over all unmasked positions of the global batch, in nats."""
    grad_norm: Float32[Array, ""]
    """Global norm of the gradients before clipping."""
    learning_rate: Float32[Array, ""]


BATCH_SPEC = partition_spec(("batch",))


def varying(tree: PyTree) -> PyTree:
    """`tree` marked as varying over every mesh axis.

    Gradients of parameters that are invariant over an axis are summed over it inside every microbatch; of varying
    ones they stay local, so that the sum can be taken once at the end.
    """

    def mark(x: Array) -> Array:
        missing = tuple(axis for axis in AXES if axis not in jax.typeof(x).manual_axis_type.varying)
        return lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(mark, tree)


def build_train_step(config: RunConfig, model: Model, optimizer: optax.GradientTransformation, mesh: Mesh) -> jax.stages.Wrapped:
    """state, global batch -> next state, metrics. The state is donated; batch arrays lie as `BATCH_SPEC` on the mesh."""
    schedule = learning_rate_schedule(config)
    drops = config.model.attention_dropout > 0 or config.model.hidden_dropout > 0
    num_microbatches = config.num_microbatches

    def microbatch_loss(params: Params, batch: Batch, step: Array, count: Array) -> Array:
        key = dropout_key(config.seed, step, batch["sample"]) if drops else None
        x = model.embed(params, batch, key)
        x = apply_blocks(model, params["blocks"], x, key, config.training.recompute)
        return model.loss(params, x, batch) / count

    def local_step(state: TrainState, batch: Batch) -> tuple[TrainState, StepMetrics]:
        # The mean is over all positions of the global batch, however unevenly masks are spread over devices.
        count = jnp.maximum(lax.psum(jnp.sum(batch["loss_mask"]), BATCH_AXES), 1)
        params = varying(state.params)
        microbatches = jax.tree.map(lambda a: a.reshape(num_microbatches, -1, *a.shape[1:]), batch)

        def accumulate(total: tuple[Array, Params], microbatch: Batch) -> tuple[tuple[Array, Params], None]:
            found = jax.value_and_grad(microbatch_loss)(params, varying(microbatch), state.step, count)
            return jax.tree.map(jnp.add, total, found), None

        zeros = varying((jnp.float32(0), jax.tree.map(jnp.zeros_like, state.params)))
        total, _ = lax.scan(accumulate, zeros, microbatches)
        # pipe and tensor have degree 1 here: the sum over them only tells the type system so.
        loss, grads = lax.psum(total, AXES)
        updates, moments = optimizer.update(grads, state.optimizer, state.params)
        metrics = StepMetrics(loss, optax.global_norm(grads), schedule(state.step))
        return TrainState(state.step + 1, optax.apply_updates(state.params, updates), moments), metrics

    specs = state_specs(model, optimizer)
    mapped = jax.shard_map(local_step, mesh=mesh, in_specs=(specs, BATCH_SPEC), out_specs=(specs, PartitionSpec()))
    return jax.jit(mapped, donate_argnums=0, out_shardings=(shardings(mesh, specs), shardings(mesh, PartitionSpec())))


def build_eval_step(config: RunConfig, model: Model, optimizer: optax.GradientTransformation, mesh: Mesh) -> jax.stages.Wrapped:
    """parameters, batch -> (sum of losses in nats, number of positions), without dropout."""

    def local_eval(params: Params, batch: Batch) -> tuple[Array, Array]:
        batch = varying(batch)
        params = varying(params)
        x = apply_blocks(model, params["blocks"], model.embed(params, batch, None), None, config.training.recompute)
        return lax.psum((model.loss(params, x, batch), jnp.sum(batch["loss_mask"])), AXES)

    specs = state_specs(model, optimizer).params
    return jax.jit(jax.shard_map(local_eval, mesh=mesh, in_specs=(specs, BATCH_SPEC), out_specs=PartitionSpec()))
