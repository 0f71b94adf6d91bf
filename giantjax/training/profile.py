"""A partition by measured times: how long blocks and the head of a run take on its own devices, at its own sizes."""

import dataclasses
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, PyTree

from giantjax.config import RunConfig
from giantjax.fields import from_dict
from giantjax.parallel.mesh import AXES
from giantjax.parallel.partition import Weights, balanced
from giantjax.parallel.sharding import partition_specs, shardings
from giantjax.parallel.stage import Stage
from giantjax.parallel.stages import BLOCKS, Batch, Model, Params, apply_blocks, order_of, shared_of, with_copies
from giantjax.parallel.varying import varying, varying_axes, zeros
from giantjax.training.processes import from_first, is_first
from giantjax.training.step import BATCH_SPEC

MICROBATCHES = 4
"""Of a measurement, one after the other as in a step."""
REPEATS = 3
"""Measurements, of which the fastest counts."""


@dataclass(frozen=True)
class Profile:
    """A partition with the times it was made of; a run that goes on keeps it."""

    partition: str
    """As `manual`."""
    measured_for: dict[str, Any]
    """What decides the times."""
    block_s: float
    """Seconds of forward and backward of a microbatch in one block."""
    head_s: float
    """The same of logits and loss; 0 where the last stage does no more of it than others."""

    def __str__(self) -> str:
        head = f", the head {self.head_s * 1e3:.3g} ms" if self.head_s else ""
        return f"a block takes {self.block_s * 1e3:.3g} ms a microbatch{head}"


def profile_of(config: RunConfig, model: Model, mesh: Mesh, path: Path | None = None) -> Profile:
    """The partition whose longest stage is shortest: that of the record at `path` if it was made for the same run, else measured now.

    Every process of a job calls this, and process 0 decides.

    Args:
        config: the run, its precision resolved.
        model: of the run, with the head whole.
        mesh: what it runs on.
        path: where an earlier start left its record.
    """
    facts = {
        "model": dataclasses.asdict(config.model),
        "mesh": dict(mesh.shape),
        "num_chunks": config.pipeline.num_chunks,
        "microbatch_size": config.microbatch_size,
        "head": config.pipeline.head,
        "recompute": config.training.recompute,
        "precision": config.training.precision,
        "device": jax.devices()[0].device_kind,
    }
    known = _read(path, facts) if is_first() and path else None
    found = from_first("partition known", known and dataclasses.asdict(known))
    if not found:
        found = from_first("partition measured", dataclasses.asdict(_measured(config, model, mesh, facts)))
    return from_dict(Profile, found)


def _read(path: Path, facts: dict[str, Any]) -> Profile | None:
    try:
        found = from_dict(Profile, json.loads(path.read_bytes()))
    except (OSError, ValueError):
        return None  # nothing is lost by measuring again
    return found if found.measured_for == facts else None


def _measured(config: RunConfig, model: Model, mesh: Mesh, facts: dict[str, Any]) -> Profile:
    samples = config.microbatch_size * MICROBATCHES * config.mesh.data * config.mesh.replica
    positions = (samples, config.model.sequence_length)
    batch = {
        "tokens": np.zeros(positions, np.int32),
        "targets": np.zeros(positions, np.int32),
        "loss_mask": np.ones(positions, np.float32),
        "sample": np.arange(samples, dtype=np.uint32),
    }
    where = NamedSharding(mesh, BATCH_SPEC)
    laid = jax.tree.map(lambda a: jax.make_array_from_callback(a.shape, where, lambda index: a[index]), batch)
    weights = measured_weights(model, mesh, laid, config.training.recompute, head=config.pipeline.head == "last")
    counts = balanced(weights, config.mesh.pipe * config.pipeline.num_chunks)
    partition = "manual:" + ",".join(map(str, counts))
    return Profile(partition, facts, weights.blocks[0] * 1e-9, weights.last * 1e-9)


def measured_weights(model: Model, mesh: Mesh, batch: Batch, recompute: str = "none", head: bool = False) -> Weights:
    """Nanoseconds that forward and backward of one microbatch take in each block, and with `head` in the loss.

    What ZeRO 2 and 3 exchange in every microbatch is not among them.

    Args:
        model: every stage of the mesh runs the same part of it, at the same time.
        mesh: what the run is to have.
        batch: MICROBATCHES microbatches of each data-parallel device, on the mesh.
        recompute: the policy.
        head: whether the last stage alone computes the loss.
    """
    shapes, order = jax.eval_shape(model.init, jax.random.key(0)), order_of(model)
    specs = partition_specs(model.dims)
    own = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((mesh.shape["pipe"], *leaf.shape[1:]), leaf.dtype), shapes[BLOCKS])
    leaves, structure = jax.tree.flatten(shapes | {BLOCKS: own})

    def draw(key: Array) -> Params:
        keys = jax.random.split(key, len(leaves))
        drawn = [0.02 * jax.random.normal(key, leaf.shape, leaf.dtype) for key, leaf in zip(keys, leaves, strict=True)]
        return jax.tree.unflatten(structure, drawn)

    params = jax.jit(draw, out_shardings=shardings(mesh, specs))(jax.random.key(0))

    def nanoseconds(part: Callable[[Stage, Array], PyTree], kind: str) -> int:
        def local(params: Params, batch: Batch) -> Array:
            batches = jax.tree.map(lambda a: a.reshape(MICROBATCHES, -1, *a.shape[1:]), batch)
            table = np.full((mesh.shape["pipe"], 1), order.index(kind), np.int32)
            stage = Stage(model, table, 1, 1, recompute, varying(params), batches, jnp.int32(0), jnp.float32(1))
            add = lambda sums, number: (jax.tree.map(jnp.add, sums, part(stage, number)), None)  # noqa: E731
            sums, _ = lax.scan(add, jax.tree.map(zeros, part(stage, jnp.int32(0))), jnp.arange(MICROBATCHES))
            total = jnp.sum(jnp.stack([jnp.sum(leaf) for leaf in jax.tree.leaves(sums)]))
            return lax.psum(total, tuple(axis for axis in AXES if axis in varying_axes(total)))

        step = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(specs, BATCH_SPEC), out_specs=PartitionSpec()))
        compiled = step.lower(params, batch).compile()
        times = []
        for _ in range(1 + REPEATS):  # the first has much to set up
            begin = time.perf_counter()
            jax.block_until_ready(compiled(params, batch))
            times.append(time.perf_counter() - begin)
        # Whole numbers, so that what is equal is equal.
        return round(min(times[1:]) / MICROBATCHES * 1e9)

    each = {kind: nanoseconds(_block, kind) for kind in dict.fromkeys(order)}
    return Weights(tuple(each[kind] for kind in order), last=nanoseconds(_head, order[-1]) if head else 0)


def _block(stage: Stage, number: Array) -> PyTree:
    """Gradients of the chunk's blocks and of what enters them."""
    chunk, batch = stage.example, stage.microbatch(number)
    moving, still = _entering(stage, batch)

    def half_square(blocks: list[PyTree], moving: list[Array]) -> Array:
        params = with_copies(chunk.params | {BLOCKS: blocks}, chunk.copies)
        x = stage.join(moving, still)
        y = apply_blocks(stage.model, shared_of(params), stage.spans, chunk.layers, params[BLOCKS], x, batch, stage.step, stage.recompute)
        return sum((jnp.sum(jnp.square(leaf.astype(jnp.float32))) for leaf in stage.split(y)[0]), jnp.float32(0)) / 2

    return jax.grad(half_square, argnums=(0, 1))(chunk.params[BLOCKS], moving)


def _head(stage: Stage, number: Array) -> PyTree:
    """Gradients of what layers share and of the boundary at the end of the model, by the loss."""
    batch = stage.microbatch(number)
    moving, still = _entering(stage, batch)
    loss = lambda shared, moving: stage.local_loss(shared, moving, still, batch)[0]  # noqa: E731
    return jax.grad(loss, argnums=(0, 1))(shared_of(stage.example.params), moving)


def _entering(stage: Stage, batch: Batch) -> tuple[list[Array], list[Array]]:
    chunk = stage.example
    shared = with_copies(shared_of(chunk.params), shared_of(chunk.copies))
    return stage.split(varying(stage.model.embed(shared, batch, stage.step)))
