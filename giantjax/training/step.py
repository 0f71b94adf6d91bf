"""The train step and the evaluation step: one `shard_map` over the whole mesh."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float32, PyTree

from giantjax.parallel.gradients import reduce_gradients
from giantjax.parallel.mesh import AXES, BATCH_AXES
from giantjax.parallel.pipeline import Sums, run_schedule
from giantjax.parallel.schedule import Schedule, forward_only, schedule_of_name
from giantjax.parallel.sharding import partition_spec, shardings
from giantjax.parallel.spans import join_parts
from giantjax.parallel.stages import BLOCKS, Batch, Model, Params, from_kinds
from giantjax.parallel.varying import varying, varying_axes
from giantjax.training.loss_scale import next_scale
from giantjax.training.optimizer import Optimizer, clipped
from giantjax.training.state import Layout, TrainState
from giantjax.xla_flags import compiler_options


class StepMetrics(NamedTuple):
    """What one step reports, each a scalar on the device."""

    loss: Float32[Array, ""]
    """Mean over the weight of the global batch; for a GPT over its unmasked positions, in nats."""
    grad_norm: Float32[Array, ""]
    """Global norm of the gradients before clipping."""
    learning_rate: Float32[Array, ""]
    reported: dict[str, Array]
    """Further means that the model names."""
    loss_scale: Array | float = 1.0
    """That the step was taken with."""
    skipped: Array | int = 0
    """Steps of the run whose gradients overflowed, so that nothing was updated."""
    skipped_in_a_row: Array | int = 0
    """Of those, how many since the last step that was not; 0 where this step was not."""


BATCH_SPEC = partition_spec(("batch",))


def build_train_step(
    model: Model,
    optimizer: Optimizer,
    layout: Layout,
    *,
    num_microbatches: int = 1,
    schedule: str | Schedule = "1f1b",
    recompute: str = "none",
    skips_head: bool = False,
) -> jax.stages.Wrapped:
    """state, global batch -> next state, StepMetrics.

    The state is donated. Batch arrays lie as `BATCH_SPEC` on the mesh, and each device's samples are divided into
    `num_microbatches` in order.

    Args:
        model: what to train.
        optimizer: from `build_optimizer`, or one's own.
        layout: from `layout_of`; its ZeRO stage is the step's.
        num_microbatches: on each data-parallel device.
        schedule: name of a pipeline schedule, path of a file that holds one, or one's own.
        recompute: what the backward pass makes again, as `apply_blocks` says.
        skips_head: whether stages but the last skip the loss, as `run_schedule` says.
    """
    num_stages, scales = len(layout.layers), layout.loss_scale
    if isinstance(schedule, str):
        schedule = schedule_of_name(schedule, num_stages, num_microbatches, layout.num_chunks)
    ways = num_microbatches * math.prod(layout.mesh.shape[axis] for axis in BATCH_AXES)

    def local_step(state: TrainState, batch: Batch) -> tuple[TrainState, StepMetrics]:
        total = _total_weight(model, batch)
        batches = _microbatches(batch, num_microbatches)
        # The mean over the global batch is a sum of means over microbatches, each smaller by their number.
        factor = state.scaling.scale * ways if scales else jnp.float32(1)
        params, denominator = varying(state.params), total / factor
        sums = run_schedule(
            model,
            schedule,
            layout.layers,
            recompute,
            params,
            batches,
            state.step,
            denominator,
            skips_head=skips_head,
            num_parts=layout.num_parts,
            zero=layout.zero,
        )
        assert sums.grads is not None
        if scales:
            sums = jax.tree.map(lambda x: x / factor, sums)
        loss, metrics = _sum_scalars(sums)
        grads, feedback = reduce_gradients(layout.reduction, sums.grads, state.feedback)
        grads = grads | {BLOCKS: from_kinds(model, join_parts(grads[BLOCKS], layout.num_chunks))}
        norm = _global_norm(grads)
        grads = clipped(grads, norm, optimizer.clip_norm)
        # Under ZeRO 3 parameters are shares before and after.
        sharing = 0 < layout.zero_stage < 3
        held = jax.tree.map(_own_share, state.params, layout.zero_dims) if sharing else state.params
        updates, moments = optimizer.transform.update(grads, state.optimizer, held)
        after, scaling = (optax.apply_updates(held, updates), moments, feedback), state.scaling
        skipped = jnp.int32(0)
        if scales:
            # One value on all devices, for the norm is over all gradients: either every device updates or none does.
            finite = jnp.isfinite(norm)
            after = jax.tree.map(lambda new, old: jnp.where(finite, new, old), after, (held, state.optimizer, state.feedback))
            skipped, scaling = scaling.skipped, next_scale(scales, scaling, finite)
        params = jax.tree.map(_gather_shares, after[0], layout.zero_dims) if sharing else after[0]
        reported = StepMetrics(loss, norm, optimizer.learning_rate(state.step - skipped), metrics)
        if scales:
            reported = reported._replace(loss_scale=state.scaling.scale, skipped=scaling.skipped, skipped_in_a_row=scaling.in_a_row)
        return TrainState(state.step + 1, params, *after[1:], scaling), reported

    specs = layout.state
    mapped = jax.shard_map(local_step, mesh=layout.mesh, in_specs=(specs, BATCH_SPEC), out_specs=(specs, PartitionSpec()))
    outputs = (layout.shardings, shardings(layout.mesh, PartitionSpec()))
    options = compiler_options(layout.mesh.devices.flat[0].platform) or None
    return jax.jit(mapped, donate_argnums=0, out_shardings=outputs, compiler_options=options)


def build_eval_step(model: Model, layout: Layout, *, num_microbatches: int = 1) -> jax.stages.Wrapped:
    """parameters, batch -> (sum of losses, weight), without dropout; the batch lies as in training."""
    table = forward_only(len(layout.layers), num_microbatches, layout.num_chunks)

    def local_eval(params: Params, batch: Batch) -> tuple[Array, Array]:
        batches = _microbatches(batch, num_microbatches)
        zero = layout.zero if layout.zero_stage == 3 else None
        sums = run_schedule(model, table, layout.layers, "none", varying(params), batches, None, jnp.float32(1), zero=zero)
        return _sum_scalars(sums)[0], lax.psum(model.weight(batch), BATCH_AXES)

    specs = (layout.params, BATCH_SPEC)
    return jax.jit(jax.shard_map(local_eval, mesh=layout.mesh, in_specs=specs, out_specs=PartitionSpec()))


def _total_weight(model: Model, batch: Batch) -> Float32[Array, ""]:
    """The mean is over the whole global batch, however unevenly masks are spread over devices; 1 where all is masked."""
    total = lax.psum(model.weight(batch), BATCH_AXES)
    return jnp.where(total == 0, 1, total)


def _microbatches(batch: Batch, number: int) -> Batch:
    return jax.tree.map(lambda a: a.reshape(number, -1, *a.shape[1:]), batch)


def _sum_scalars(sums: Sums) -> tuple[Array, dict[str, Array]]:
    return jax.tree.map(lambda x: lax.psum(x, tuple(axis for axis in AXES if axis in varying_axes(x))), (sums.loss, sums.metrics))


def _global_norm(grads: PyTree) -> Float32[Array, ""]:
    """The norm over every parameter once: squares are summed over the axes that share a parameter, and no other."""
    squares: dict[tuple[str, ...], Array] = {}
    for grad in jax.tree.leaves(grads):
        axes = tuple(axis for axis in AXES if axis in varying_axes(grad))
        squares[axes] = squares.get(axes, jnp.float32(0)) + jnp.sum(jnp.square(grad))
    return jnp.sqrt(sum((lax.psum(total, axes) for axes, total in squares.items()), jnp.float32(0)))


def _own_share(param: Array, zero_dim: int) -> Array:
    if zero_dim < 0:
        return param
    size = param.shape[zero_dim] // lax.axis_size("data")
    return lax.dynamic_slice_in_dim(param, lax.axis_index("data") * size, size, zero_dim)


def _gather_shares(share: Array, zero_dim: int) -> Array:
    return share if zero_dim < 0 else lax.all_gather(share, "data", axis=zero_dim, tiled=True, to="invarying")
