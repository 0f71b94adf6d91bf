"""The executor: a schedule's table run in lockstep inside one `shard_map`.

Each kind of segment becomes one `lax.scan` over ticks. The forward slot takes `jax.vjp` of the stage and puts what the
pullback holds, parameters excepted, into a ring of slots; the backward slot puts the pullback together again and calls
it. So nothing is computed twice that the recompute policy does not ask for, and what a slot holds is what it keeps.

The order inside a tick makes each hop lie over the other direction's compute: the hop of the last tick's forward result
starts first and backward runs meanwhile; the hop of backward's result starts next and forward runs meanwhile.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.xla_metadata import set_xla_metadata
from jaxtyping import Array, Float, Int, PyTree

from giantjax.parallel.mesh import AXES, BATCH_AXES
from giantjax.parallel.schedule import IDLE, Schedule, Segment, residual_slots
from giantjax.parallel.stages import Batch, Boundary, Model, Params, apply_blocks, shared_of

PIPE = "pipe"
MICROBATCH_AXES = frozenset((PIPE, *BATCH_AXES))
"""Over these each device sees another microbatch; devices that share layers see the same one."""


class Sums(NamedTuple):
    """What a pass over all microbatches adds up on one device."""

    loss: Float[Array, ""]
    metrics: dict[str, Array]
    grads: Params | None


class _Carry(NamedTuple):
    """State between ticks."""

    sent_forward: Boundary
    sent_backward: Boundary
    ring: list[Array]
    sums: Sums


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


class _Stage:
    """One stage's forward function, its sizes found by tracing it once."""

    def __init__(
        self,
        model: Model,
        table: Int[np.ndarray, "S L"],
        recompute: str,
        params: Params,
        batches: Batch,
        step: Array | None,
        denominator: Array,
    ):
        self.model, self.recompute, self.params, self.batches = model, recompute, params, batches
        self.step, self.denominator = step, denominator
        self.num_stages, self.padded = len(table), bool((table < 0).any())
        self.num_microbatches = jax.tree.leaves(batches)[0].shape[0]
        self.index = lax.axis_index(PIPE)
        self.layers = jnp.asarray(table)[self.index]
        first = self.microbatch(jnp.int32(0))
        shapes = jax.eval_shape(lambda: varying(model.embed(shared_of(params), first, step)))
        self.empty = varying(jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes))

    def microbatch(self, number: Int[Array, ""]) -> Batch:
        """Microbatch `number`; any, where it is IDLE."""
        found = jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, jnp.maximum(number, 0), keepdims=False), self.batches)
        return varying(found, MICROBATCH_AXES)

    def __call__(self, params: Params, moving: list[Array], still: list[Array], batch: Batch) -> tuple[Any, Any]:
        """((floating leaves of the boundary sent, loss), (its other leaves, metrics)); loss is 0 except on the last stage."""
        shared = shared_of(params)
        boundary = self.join(moving, still)
        entering = varying(self.model.embed(shared, batch, self.step))
        x = entering if self.num_stages == 1 else _where(self.index == 0, entering, boundary)
        x = apply_blocks(self.model, params, self.layers, x, batch, self.step, self.recompute, self.padded)
        # Full recompute keeps a stage's input alone: logits in every slot would outweigh it many times.
        remade = self.num_stages > 1 and self.recompute.startswith("full")
        loss_of = jax.checkpoint(self.model.loss) if remade else self.model.loss
        loss, metrics = loss_of(shared, x, batch, self.step)
        # Dividing here, not at the end, scales the gradients too.
        loss, metrics = varying(jax.tree.map(lambda total: total / self.denominator, (loss, metrics)), MICROBATCH_AXES)
        if self.num_stages > 1:
            loss, metrics = _where(self.index == self.num_stages - 1, (loss, metrics), jax.tree.map(jnp.zeros_like, (loss, metrics)))
        moving, still = self.split(varying(x))
        return (moving, loss), (still, metrics)

    def split(self, boundary: Boundary) -> tuple[list[Array], list[Array]]:
        """The floating leaves of a boundary, which carry cotangents, and the others."""
        leaves = jax.tree.leaves(boundary)
        return [x for x in leaves if _is_floating(x)], [x for x in leaves if not _is_floating(x)]

    def join(self, moving: list[Array], still: list[Array]) -> Boundary:
        """The inverse of `split`."""
        leaves, structure = jax.tree.flatten(self.empty)
        moving_left, still_left = iter(moving), iter(still)
        return jax.tree.unflatten(structure, [next(moving_left if _is_floating(x) else still_left) for x in leaves])


def _is_floating(x: Array) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


def _where(condition: Array, yes: PyTree, no: PyTree) -> PyTree:
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), yes, no)


def _hop(tree: PyTree, num_stages: int, direction: int) -> PyTree:
    """Each stage's `tree` to its neighbour, from first to last (1) or back (-1); never around the ends.

    A ring would make the last stage wait for the first, and XLA cannot then split the hop into a start and an end. The
    stream attribute keeps hops of both directions off the stream of tensor-parallel collectives.
    """
    pairs = [(i, i + direction) for i in range(num_stages) if 0 <= i + direction < num_stages]
    with set_xla_metadata(_xla_gpu_collective_stream="p2p"):
        return jax.tree.map(lambda x: lax.ppermute(x, PIPE, pairs), tree)


def run_schedule(
    model: Model,
    schedule: Schedule,
    layer_table: Int[np.ndarray, "S L"],
    recompute: str,
    params: Params,
    batches: Batch,
    step: Array | None,
    denominator: Float[Array, ""],
) -> Sums:
    """Run `schedule` over all microbatches of this device; call it inside a `shard_map` over all mesh axes.

    Args:
        model: what to run.
        schedule: from `giantjax.parallel.schedule`; forward-only schedules give no gradients.
        layer_table: layers of each stage.
        recompute: the policy of `apply_blocks`.
        params: this device's shards, varying over all axes; `blocks` holds this stage's layers.
        batches: leaves [M, ...], one microbatch after the other.
        step: steps taken, or None in evaluation.
        denominator: loss, metrics and gradients are divided by this.

    Returns:
        Sums over this device's microbatches, to be summed over the axes they vary over.
    """
    _check_immediate(schedule)
    stage = _Stage(model, layer_table, recompute, params, batches, step, denominator)
    if stage.num_stages == 1 and schedule.trains:
        return _accumulate(stage)
    pullback = _Pullback(stage) if schedule.trains else None
    slots = residual_slots(schedule)
    moving, still = stage.split(stage.empty)
    carry = _Carry(
        sent_forward=(moving, still),
        sent_backward=moving,
        ring=[jnp.broadcast_to(leaf * 0, (slots.number, *leaf.shape)) for leaf in pullback.leaves] if pullback else [],
        sums=_zero_sums(stage, pullback),
    )
    cells = {"forward": schedule.forward, "backward": schedule.backward, "write": slots.write, "read": slots.read}
    for segment in schedule.segments():
        columns = {name: jnp.asarray(table[segment.first : segment.stop])[:, stage.index] for name, table in cells.items()}
        carry, _ = lax.scan(_tick(stage, pullback, segment), carry, columns)
    return carry.sums


def _check_immediate(schedule: Schedule) -> None:
    """Hops reach the next tick and are gone after it, so a schedule must use them there."""
    for table, order in ((schedule.forward, 1), (schedule.backward, -1)):
        sender, receiver = table[:-1, ::order][:, :-1], table[1:, ::order][:, 1:]
        expected = np.where(receiver != IDLE, receiver, sender)
        if (expected != sender).any() or (table[0, ::order][1:] != IDLE).any():
            raise ValueError(f"schedule {schedule.name}: a message is used later than in the tick after it was sent")


def _accumulate(stage: _Stage) -> Sums:
    """Every microbatch forward and backward in turn: what any schedule comes to with a single stage, without a ring."""
    moving, still = stage.split(stage.empty)

    def loss_of(params: Params, batch: Batch) -> tuple[Array, dict[str, Array]]:
        (_, loss), (_, metrics) = stage(params, moving, still, batch)
        return loss, metrics

    def add(sums: Sums, number: Array) -> tuple[Sums, None]:
        (loss, metrics), grads = jax.value_and_grad(loss_of, has_aux=True)(stage.params, stage.microbatch(number))
        return jax.tree.map(lambda a, b: a + b.astype(a.dtype), sums, Sums(loss, metrics, grads)), None

    loss, metrics = loss_of(stage.params, stage.microbatch(jnp.int32(0)))
    grads = jax.tree.map(lambda p: varying(jnp.zeros(p.shape, jnp.float32)), stage.params)
    zeros = Sums(loss * 0, jax.tree.map(lambda x: x * 0, metrics), grads)
    return lax.scan(add, zeros, jnp.arange(stage.num_microbatches))[0]


class _Pullback:
    """How a stage's pullback comes apart into leaves for the ring, and together again.

    `standing` has, for each leaf of a pullback, the parameter or the constant it is in every tick, or None for a leaf
    that is of one microbatch and goes into the ring; `leaves` are examples of the latter.
    """

    def __init__(self, stage: _Stage):
        self.stage = stage
        moving, still = stage.split(stage.empty)
        # This trace is only looked at: its results reach nothing, so nothing of it runs.
        (_, self.loss), found, (_, self.metrics) = self._forward(moving, still, stage.microbatch(jnp.int32(0)))
        leaves, self.structure = jax.tree.flatten(found)
        # What comes from a microbatch varies over these axes, so a leaf that does not is the same in every tick.
        standing = [*jax.tree.leaves(stage.params), *(leaf for leaf in leaves if not varying_axes(leaf) >= MICROBATCH_AXES)]
        self.standing = [next((held for held in standing if held is leaf), None) for leaf in leaves]
        self.leaves = [leaf for leaf, held in zip(leaves, self.standing, strict=True) if held is None]

    def _forward(self, moving: list[Array], still: list[Array], batch: Batch) -> Any:
        return jax.vjp(lambda params, x: self.stage(params, x, still, batch), self.stage.params, moving, has_aux=True)

    def forward(self, moving: list[Array], still: list[Array], batch: Batch) -> tuple[Any, Any, list[Array]]:
        """(primal results, others, leaves to keep)."""
        results, found, others = self._forward(moving, still, batch)
        leaves = jax.tree.leaves(found)
        return results, others, [leaf for leaf, held in zip(leaves, self.standing, strict=True) if held is None]

    def backward(self, kept: list[Array], cotangents: list[Array], weight: Array) -> tuple[Params, list[Array]]:
        """Cotangents of (parameters, boundary received) from those of the boundary sent and of the loss."""
        left = iter(kept)
        leaves = [next(left) if held is None else held for held in self.standing]
        weight = varying(weight.astype(self.loss.dtype), varying_axes(self.loss))
        return jax.tree.unflatten(self.structure, leaves)((cotangents, weight))


def _zero_sums(stage: _Stage, pullback: _Pullback | None) -> Sums:
    if pullback is None:
        moving, still = stage.split(stage.empty)
        (_, loss), (_, metrics) = stage(stage.params, moving, still, stage.microbatch(jnp.int32(0)))
        return jax.tree.map(lambda x: x * 0, Sums(loss, metrics, None))
    grads = jax.tree.map(lambda p: varying(jnp.zeros(p.shape, jnp.float32)), stage.params)
    return Sums(pullback.loss * 0, jax.tree.map(lambda x: x * 0, pullback.metrics), grads)


def _tick(stage: _Stage, pullback: _Pullback | None, segment: Segment) -> Callable[[_Carry, dict[str, Array]], tuple[_Carry, None]]:
    """The body of the loop over a segment's ticks."""

    def body(carry: _Carry, cell: dict[str, Array]) -> tuple[_Carry, None]:
        sent_forward, sent_backward, ring, sums = carry
        received = sent_forward
        if "forward" in segment.kinds:
            received = _hop(sent_forward, stage.num_stages, 1)
        if "backward" in segment.kinds:
            assert pullback is not None
            there = cell["backward"] != IDLE
            kept = [lax.dynamic_index_in_dim(leaf, jnp.maximum(cell["read"], 0), keepdims=False) for leaf in ring]
            # Cotangents, not gradients, are masked: a stage with nothing to do adds zeros.
            passes_on = there & (stage.index < stage.num_stages - 1)
            cotangents = [jnp.where(passes_on, x, 0) for x in sent_backward]
            grads, sent = pullback.backward(kept, cotangents, jnp.where(there, 1.0, 0.0))
            sums = sums._replace(grads=jax.tree.map(lambda a, b: a + b.astype(a.dtype), sums.grads, grads))
            # Forward may not start before backward has ended, nor be merged with it; the hop back then lies over forward.
            received, sent = lax.optimization_barrier((received, sent))
            sent_backward = _hop(sent, stage.num_stages, -1)
        if "forward" in segment.kinds:
            there = cell["forward"] != IDLE
            batch = stage.microbatch(cell["forward"])
            moving, still = received
            if pullback is None:
                (moving, loss), (still, metrics) = stage(stage.params, moving, still, batch)
            else:
                (moving, loss), (still, metrics), leaves = pullback.forward(moving, still, batch)
                slot = jnp.maximum(cell["write"], 0)
                ring = [_put(buffer, leaf, slot, there) for buffer, leaf in zip(ring, leaves, strict=True)]
            sent_forward = (moving, still)
            sums = sums._replace(
                loss=sums.loss + jnp.where(there, loss, 0),
                metrics=jax.tree.map(lambda a, b: a + jnp.where(there, b, 0), sums.metrics, metrics),
            )
        return _Carry(sent_forward, sent_backward, ring, sums), None

    return body


def _put(buffer: Array, leaf: Array, slot: Array, there: Array) -> Array:
    """`buffer` with `leaf` in `slot`, unless the stage has nothing to do."""
    old = lax.dynamic_index_in_dim(buffer, slot, keepdims=False)
    return lax.dynamic_update_index_in_dim(buffer, jnp.where(there, leaf, old), slot, 0)
