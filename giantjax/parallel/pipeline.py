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
from giantjax.parallel.stages import (
    BLOCKS,
    Batch,
    Boundary,
    Model,
    Params,
    apply_blocks,
    compute_copies,
    group_layers,
    shared_of,
    ungroup_layers,
    with_copies,
)

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

    sent_forward: tuple[list[Array], list[Array]]
    sent_backward: list[Array]
    ring: list[Array]
    outputs: list[Array]
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
    """One stage's functions, the sizes of what they pass on found by tracing them once."""

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
        self.model, self.recompute, self.batches = model, recompute, batches
        self.step, self.denominator = step, denominator
        self.num_stages, self.padded = len(table), bool((table < 0).any())
        self.num_microbatches = jax.tree.leaves(batches)[0].shape[0]
        self.index = lax.axis_index(PIPE)
        # Cast and cut here, once and outside of any pullback, so that pullbacks hold these very arrays and no copies.
        copies = compute_copies(model, params)
        groups = group_layers((jnp.asarray(table)[self.index], params[BLOCKS], copies[BLOCKS]), recompute)
        self.layers, blocks, copied_blocks = map(list, zip(*groups, strict=True))
        self.params, self.copies = params | {BLOCKS: blocks}, copies | {BLOCKS: copied_blocks}
        first = self.microbatch(jnp.int32(0))
        shapes = jax.eval_shape(lambda: varying(model.embed(shared_of(self.with_copies(self.params)), first, step)))
        self.empty = varying(jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes))

    def with_copies(self, params: Params) -> Params:
        """All parameters, or those without `blocks`, as the model's functions take them."""
        return with_copies(params, {name: self.copies[name] for name in params})

    def ungrouped(self, grads: Params) -> Params:
        """Gradients of the parameters as they were before layers were cut into groups."""
        groups = grads[BLOCKS]
        return grads | {BLOCKS: ungroup_layers(groups) if self.layers[0].ndim > 1 else groups[0]}

    def microbatch(self, number: Int[Array, ""]) -> Batch:
        """Microbatch `number`; any, where it is IDLE."""
        found = jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, jnp.maximum(number, 0), keepdims=False), self.batches)
        return varying(found, MICROBATCH_AXES)

    def blocks(self, params: Params, moving: list[Array], still: list[Array], batch: Batch) -> tuple[list[Array], list[Array]]:
        """The boundary sent, split, from the one received; the first stage makes its own from the microbatch."""
        params = self.with_copies(params)
        shared, boundary = shared_of(params), self.join(moving, still)
        # What an embedding computes is cheap and large: all that is kept of it is the microbatch.
        entering = varying(jax.checkpoint(lambda shared, batch: self.model.embed(shared, batch, self.step))(shared, batch))
        x = entering if self.num_stages == 1 else _where(self.index == 0, entering, boundary)
        groups = list(zip(self.layers, params[BLOCKS], strict=True))
        return self.split(varying(apply_blocks(self.model, shared, groups, x, batch, self.step, self.recompute, self.padded)))

    def loss(self, shared: Params, moving: list[Array], still: list[Array], batch: Batch) -> tuple[Array, dict[str, Array]]:
        """(loss, metrics) of the boundary that the last stage sends; 0 on the others."""
        loss, metrics = self.model.loss(self.with_copies(shared), self.join(moving, still), batch, self.step)
        # Dividing here, not at the end, scales the gradients too.
        found = varying(jax.tree.map(lambda total: total / self.denominator, (loss, metrics)), MICROBATCH_AXES)
        if self.num_stages > 1:
            found = _where_there(self.index == self.num_stages - 1, found)
        return found

    def zero_sums(self, trains: bool) -> Sums:
        """Sums of nothing."""
        loss, metrics = self.loss(shared_of(self.params), *self.split(self.empty), self.microbatch(jnp.int32(0)))
        grads = jax.tree.map(lambda p: varying(jnp.zeros(p.shape, jnp.float32)), self.params) if trains else None
        # Only the types of this loss are looked at, so nothing of it runs.
        return jax.tree.map(_zeros, Sums(loss, metrics, None))._replace(grads=grads)

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


def _where_there(there: Array, tree: PyTree) -> Any:
    return jax.tree.map(lambda x: jnp.where(there, x, 0), tree)


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
    sums = _accumulate(stage) if stage.num_stages == 1 and schedule.trains else _run_ticks(stage, schedule)
    return sums if sums.grads is None else sums._replace(grads=stage.ungrouped(sums.grads))


def _run_ticks(stage: _Stage, schedule: Schedule) -> Sums:
    pullback = _Pullback(stage) if schedule.trains else None
    slots = residual_slots(schedule)
    last = slots.of_stage(stage.num_stages - 1)
    moving, still = stage.split(stage.empty)
    carry = _Carry(
        sent_forward=(moving, still),
        sent_backward=moving,
        ring=_ring(pullback.leaves, slots.number) if pullback else [],
        outputs=_ring([*moving, *still], last.number) if pullback else [],
        sums=stage.zero_sums(schedule.trains),
    )
    cells = {"forward": schedule.forward, "backward": schedule.backward, "write": slots.write, "read": slots.read}
    for segment in schedule.segments():
        rows = slice(segment.first, segment.stop)
        columns = {name: jnp.asarray(table)[rows, stage.index] for name, table in cells.items()}
        # On every stage, for only the last one's outputs are ever read.
        columns |= {"write output": jnp.asarray(last.write)[rows, 0], "read output": jnp.asarray(last.read)[rows, 0]}
        always = {name: bool((table[rows] != IDLE).all()) for name, table in (("write", slots.write), ("write output", last.write))}
        carry, _ = lax.scan(_tick(stage, pullback, segment, always), carry, columns)
    return carry.sums


def _ring(leaves: list[Array], number: int) -> list[Array]:
    return [_zeros(leaf, number) for leaf in leaves]


def _zeros(like: Array, *more: int) -> Array:
    """Zeros of the type of `like`, with `more` dims in front."""
    return varying(jnp.zeros((*more, *like.shape), like.dtype), varying_axes(like))


def _check_immediate(schedule: Schedule) -> None:
    """Hops reach the next tick and are gone after it, so a schedule must use them there."""
    for table, order in ((schedule.forward, 1), (schedule.backward, -1)):
        sender, receiver = table[:-1, ::order][:, :-1], table[1:, ::order][:, 1:]
        expected = np.where(receiver != IDLE, receiver, sender)
        if (expected != sender).any() or (table[0, ::order][1:] != IDLE).any():
            raise ValueError(f"schedule {schedule.name}: a message is used later than in the tick after it was sent")


def _accumulate(stage: _Stage) -> Sums:
    """Every microbatch forward and backward in turn: what any schedule comes to with a single stage, without a ring."""
    empty = stage.split(stage.empty)

    def loss_of(params: Params, batch: Batch) -> tuple[Array, dict[str, Array]]:
        return stage.loss(shared_of(params), *stage.blocks(params, *empty, batch), batch)

    def add(sums: Sums, number: Array) -> tuple[Sums, None]:
        (loss, metrics), grads = jax.value_and_grad(loss_of, has_aux=True)(stage.params, stage.microbatch(number))
        return jax.tree.map(lambda a, b: a + b.astype(a.dtype), sums, Sums(loss, metrics, grads)), None

    return lax.scan(add, stage.zero_sums(trains=True), jnp.arange(stage.num_microbatches))[0]


class _Pullback:
    """How the pullback of a stage's blocks comes apart into leaves for the ring, and together again.

    `standing` has, for each leaf of a pullback, the parameter or the constant it is in every tick, or None for a leaf
    that is of one microbatch and goes into the ring; `leaves` are examples of the latter.
    """

    def __init__(self, stage: _Stage):
        self.stage = stage
        # This trace is only looked at: its results reach nothing, so nothing of it runs.
        _, found, _ = self._forward(*stage.split(stage.empty), stage.microbatch(jnp.int32(0)))
        leaves, self.structure = jax.tree.flatten(found)
        # What comes from a microbatch varies over these axes, so a leaf that does not is the same in every tick.
        constants = [leaf for leaf in leaves if not varying_axes(leaf) >= MICROBATCH_AXES]
        standing = [*jax.tree.leaves((stage.params, stage.copies, stage.layers)), *constants]
        self.standing = [next((held for held in standing if held is leaf), None) for leaf in leaves]
        self.leaves = [leaf for leaf, held in zip(leaves, self.standing, strict=True) if held is None]

    def _forward(self, moving: list[Array], still: list[Array], batch: Batch) -> Any:
        return jax.vjp(lambda params, x: self.stage.blocks(params, x, still, batch), self.stage.params, moving, has_aux=True)

    def forward(self, moving: list[Array], still: list[Array], batch: Batch) -> tuple[list[Array], list[Array], list[Array]]:
        """(floating leaves sent, other leaves sent, leaves to keep)."""
        sent, found, others = self._forward(moving, still, batch)
        leaves = jax.tree.leaves(found)
        return sent, others, [leaf for leaf, held in zip(leaves, self.standing, strict=True) if held is None]

    def backward(self, kept: list[Array], cotangents: list[Array]) -> tuple[Params, list[Array]]:
        """Cotangents of (parameters, boundary received) from those of the boundary sent."""
        left = iter(kept)
        leaves = [next(left) if held is None else held for held in self.standing]
        return jax.tree.unflatten(self.structure, leaves)(cotangents)


def _tick(
    stage: _Stage, pullback: _Pullback | None, segment: Segment, always: dict[str, bool]
) -> Callable[[_Carry, dict[str, Array]], tuple[_Carry, None]]:
    """The body of the loop over a segment's ticks; `always` says of a ring whether every tick has a slot to write to."""

    def body(carry: _Carry, cell: dict[str, Array]) -> tuple[_Carry, None]:
        sent_forward, sent_backward, ring, outputs, sums = carry
        received = sent_forward
        if "forward" in segment.kinds:
            received = _hop(sent_forward, stage.num_stages, 1)
        if "backward" in segment.kinds:
            assert pullback is not None
            kept, output = _take(ring, cell["read"]), _take(outputs, cell["read output"])
            more, sent = _backward(stage, pullback, cell["backward"], kept, output, sent_backward)
            sums = jax.tree.map(lambda a, b: a + b.astype(a.dtype), sums, more)
            # Forward may not start before backward has ended, nor be merged with it; the hop back then lies over forward.
            received, sent = lax.optimization_barrier((received, sent))
            sent_backward = _hop(sent, stage.num_stages, -1)
        if "forward" in segment.kinds:
            there, batch = cell["forward"] != IDLE, stage.microbatch(cell["forward"])
            moving, still = received
            if pullback is None:
                moving, still = stage.blocks(stage.params, moving, still, batch)
                loss, metrics = _where_there(there, stage.loss(shared_of(stage.params), moving, still, batch))
                sums = jax.tree.map(jnp.add, sums, Sums(loss, metrics, None))
            else:
                moving, still, leaves = pullback.forward(moving, still, batch)
                ring = _put(ring, leaves, cell["write"], always["write"])
                outputs = _put(outputs, [*moving, *still], cell["write output"], always["write output"])
            sent_forward = (moving, still)
        return _Carry(sent_forward, sent_backward, ring, outputs, sums), None

    return body


def _backward(
    stage: _Stage, pullback: _Pullback, number: Int[Array, ""], kept: list[Array], output: list[Array], received: list[Array]
) -> tuple[Sums, list[Array]]:
    """The backward action of microbatch `number`: what it adds to the sums, and the cotangents to send back.

    The last stage begins with the loss, forward too: so logits live within one action, and none are kept between ticks.
    """
    there, batch = number != IDLE, stage.microbatch(number)
    moving, still = output[: len(received)], output[len(received) :]
    shared = shared_of(stage.params)
    loss_of = lambda shared, moving: stage.loss(shared, moving, still, batch)  # noqa: E731
    loss, pull_loss, metrics = jax.vjp(loss_of, shared, moving, has_aux=True)
    # Cotangents, not gradients, are masked: a stage with nothing to do adds zeros.
    shared_grads, begun = pull_loss(varying(jnp.where(there, 1, 0).astype(loss.dtype), varying_axes(loss)))
    is_last = stage.index == stage.num_stages - 1
    cotangents = [jnp.where(is_last, own, jnp.where(there, x, 0)) for own, x in zip(begun, received, strict=True)]
    grads, sent = pullback.backward(kept, cotangents)
    grads = grads | jax.tree.map(jnp.add, shared_of(grads), shared_grads)
    loss, metrics = _where_there(there, (loss, metrics))
    return Sums(loss, metrics, grads), sent


def _take(ring: list[Array], slot: Int[Array, ""]) -> list[Array]:
    """The leaves in `slot`; any, where it is IDLE."""
    return [lax.dynamic_index_in_dim(buffer, jnp.maximum(slot, 0), keepdims=False) for buffer in ring]


def _put(ring: list[Array], leaves: list[Array], slot: Int[Array, ""], always: bool) -> list[Array]:
    """`ring` with `leaves` in `slot`; as it was where that is IDLE, which it never is where it `always` is a slot."""
    place = jnp.maximum(slot, 0)

    def put(buffer: Array, leaf: Array) -> Array:
        # What is written in place costs half the memory traffic of a choice between old and new.
        if not always:
            leaf = jnp.where(slot == IDLE, lax.dynamic_index_in_dim(buffer, place, keepdims=False), leaf)
        return lax.dynamic_update_index_in_dim(buffer, leaf, place, 0)

    return [put(buffer, leaf) for buffer, leaf in zip(ring, leaves, strict=True)]
