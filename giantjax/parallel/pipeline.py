"""The executor: a schedule's table run in lockstep inside one `shard_map`.

Each kind of segment becomes one `lax.scan` over ticks. The forward slot takes `jax.vjp` of the stage and puts what the
pullback holds, parameters excepted, into a ring of slots; the backward slot puts the pullback together again and calls
it. So nothing is computed twice that the recompute policy does not ask for, and what a slot holds is what it keeps.

The order inside a tick makes each hop lie over the other direction's compute: the hop of the last tick's forward result
starts first and backward runs meanwhile; the hop of backward's result starts next and forward runs meanwhile.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.xla_metadata import set_xla_metadata
from jaxtyping import Array, Float, Int, PyTree

from giantjax.parallel.mesh import BATCH_AXES
from giantjax.parallel.pullback import Pullback
from giantjax.parallel.ring import new_ring, put, take
from giantjax.parallel.schedule import IDLE, Kind, Schedule
from giantjax.parallel.stage import PIPE, Chunk, Stage, where_there
from giantjax.parallel.stages import Batch, Model, Params, shared_of
from giantjax.parallel.ticks import Run, ticks_of
from giantjax.parallel.varying import varying, varying_axes, zeros
from giantjax.parallel.zero import Zero, on_shares

_Message: TypeAlias = tuple[list[Array], list[Array]]
"""The floating leaves of a boundary, and the others."""


class Sums(NamedTuple):
    """What a pass over all microbatches adds up on one device."""

    loss: Float[Array, ""]
    metrics: dict[str, Array]
    grads: Params | None


class _Carry(NamedTuple):
    """State between ticks."""

    sent_forward: _Message
    sent_backward: list[Array]
    rings: dict[str, list[Array]]
    sums: Sums


def run_schedule(
    model: Model,
    schedule: Schedule,
    layer_table: Int[np.ndarray, "S L"],
    recompute: str,
    params: Params,
    batches: Batch,
    step: Array | None,
    denominator: Float[Array, ""],
    skips_head: bool = False,
    num_parts: int = 1,
    zero: Zero | None = None,
) -> Sums:
    """Run `schedule` over all microbatches of this device; call it inside a `shard_map` over all mesh axes.

    Args:
        model: what to run.
        schedule: from `giantjax.parallel.schedule`; forward-only schedules give no gradients.
        layer_table: layers of each stage, chunk after chunk.
        recompute: the policy of `apply_blocks`.
        params: this device's shards, varying over all axes; `blocks` holds this stage's layers.
        batches: leaves [M, ...], one microbatch after the other.
        step: steps taken, or None in evaluation.
        denominator: loss, metrics and gradients are divided by this.
        skips_head: whether stages other than the last skip the loss, and those with fewer layers what others have more, under
            conditionals, rather than compute it to no effect.
        num_parts: each chunk's layers are cut into so many parts. With several the last tick stands outside of the loop, so that
            the sum of a part's gradients over devices can begin while the other parts' are still computed.
        zero: what ZeRO 2 and 3 share over `data`; gradients are then sums of shares, and under 3 `params` are shares.

    Returns:
        Sums over this device's microbatches, to be summed over the axes they vary over; gradients of blocks in parts and by kind,
        from which `join_parts` makes one.
    """
    num_chunks = schedule.num_chunks if len(layer_table) > 1 else 1
    model = on_shares(model, zero, recompute) if zero else model
    stage = Stage(model, layer_table, num_chunks, num_parts, recompute, params, batches, step, denominator, zero, skips_head)
    sums = _accumulate(stage) if stage.num_stages == 1 and schedule.trains else _Executor(stage, schedule).run()
    return sums if sums.grads is None else sums._replace(grads=stage.gradients(sums.grads))


def _zero_sums(stage: Stage, trains: bool) -> Sums:
    """Sums of nothing."""
    moving, still = stage.split(stage.empty)
    loss, metrics = stage.local_loss(shared_of(stage.example.params), moving, still, stage.microbatch(jnp.int32(0)))
    # Only the types of this loss are looked at, so nothing of it runs.
    return jax.tree.map(zeros, Sums(loss, metrics, None))._replace(grads=stage.zero_gradients() if trains else None)


def _accumulate(stage: Stage) -> Sums:
    """Every microbatch forward and backward in turn: what any schedule comes to with a single stage, without a ring."""
    chunk, empty = stage.example, stage.split(stage.empty)

    def loss_of(params: Params, batch: Batch) -> tuple[Array, dict[str, Array]]:
        return stage.local_loss(shared_of(params), *stage.blocks(chunk._replace(params=params), *empty, batch), batch)

    def add(sums: Sums, number: Array) -> tuple[Sums, None]:
        (loss, metrics), grads = jax.value_and_grad(loss_of, has_aux=True)(chunk.params, stage.microbatch(number))
        assert sums.grads is not None
        found = jax.tree.map(jnp.add, sums._replace(grads=None), Sums(loss, metrics, None))
        return found._replace(grads=stage.add_gradients(sums.grads, grads, chunk.number)), None

    last = stage.num_microbatches - int(stage.num_parts > 1)
    sums = lax.scan(add, _zero_sums(stage, trains=True), jnp.arange(last))[0]
    return sums if last == stage.num_microbatches else add(sums, jnp.int32(last))[0]


class _Executor:
    """A stage on its way through the ticks of a schedule."""

    def __init__(self, stage: Stage, schedule: Schedule):
        self.stage = stage
        self.shares_head = stage.model.spreads_head and stage.num_stages > 1
        self.ticks = ticks_of(schedule, self.shares_head)
        self.pullback = Pullback(stage, defers=schedule.splits_weight) if schedule.trains else None

    def run(self) -> Sums:
        """All ticks, one loop for each run of ticks that do the same."""
        moving, still = self.stage.split(self.stage.empty)
        kept = {"inbox forward": [*moving, *still], "inbox backward": moving}
        if self.pullback:
            kept |= {"residuals": self.pullback.leaves, "stash": self.pullback.stash}
            kept |= {"outputs": moving if self.shares_head else [*moving, *still]}
        rings = {name: new_ring(kept[name], slots.number) for name, slots in self.ticks.slots.items()}
        carry = _Carry((moving, still), moving, rings, _zero_sums(self.stage, self.ticks.schedule.trains))
        for run in self.ticks.runs:
            columns = {name: self._column(table[run.first : run.stop]) for name, table in self.ticks.columns.items()}
            body = functools.partial(_tick, self, run)
            if run.stop < self.ticks.schedule.num_ticks or self.stage.num_parts == 1:
                carry, _ = lax.scan(body, carry, columns)
            else:
                carry, _ = lax.scan(body, carry, {name: column[:-1] for name, column in columns.items()})
                carry, _ = body(carry, {name: column[-1] for name, column in columns.items()})
        return carry.sums

    def _column(self, table: Int[np.ndarray, "K S"]) -> Int[Array, "K"]:
        """This stage's column of a table; the only one, where all stages have the same."""
        return jnp.asarray(table)[:, self.stage.index if table.shape[1] > 1 else 0]

    def hop(self, tree: PyTree, direction: int) -> PyTree:
        """Each stage's `tree` to its neighbour, from first to last (1) or back (-1); around the ends only between chunks.

        A ring would make the last stage wait for the first, and XLA cannot then split the hop into a start and an end; so what
        goes around the ends goes by itself. The stream attribute keeps hops of both directions off the stream of
        tensor-parallel collectives.
        """
        number = self.stage.num_stages
        ends = (number - 1, 0) if direction == 1 else (0, number - 1)
        pairs = [(i, i + direction) for i in range(number) if 0 <= i + direction < number]
        with set_xla_metadata(_xla_gpu_collective_stream="p2p"):
            arrived = jax.tree.map(lambda x: lax.ppermute(x, PIPE, pairs), tree)
            if self.stage.num_chunks == 1:
                return arrived
            around = jax.tree.map(lambda x: lax.ppermute(x, PIPE, [ends]), tree)
        return jax.tree.map(lambda a, b: jnp.where(self.stage.index == ends[1], a, b), around, arrived)


def _tick(executor: _Executor, run: Run, carry: _Carry, cell: dict[str, Array]) -> tuple[_Carry, None]:
    """The body of the loop over the ticks of `run`."""
    at = _Tick(executor, run, cell)
    received = executor.hop(carry.sent_forward, 1) if run.delivers else carry.sent_forward
    ended = _from_last(executor.stage, carry.sent_forward) if run.shares_head else ([], [])

    def between(carry: _Carry, sent: list[Array], received: _Message) -> tuple[_Carry, list[Array], _Message]:
        ends = ended
        if "backward" in run.kinds:
            # Forward may not start before backward has ended, nor be merged with it; the hop back then lies over forward.
            received, ends, sent = lax.optimization_barrier((received, ends, sent))
            sent = executor.hop(sent, -1)
        return (_shared_head(at, carry, ends) if run.shares_head else carry), sent, received

    if run.mode == "lockstep":
        # Every stage runs every kind, to no effect where its cell is idle.
        carry, sent = _run_kinds(at, run.kinds, between, carry, received)
    else:
        # Every stage runs what its own cells hold and nothing else, and messages travel outside.
        branches = [functools.partial(_run_kinds, at, kinds, lambda *now: now) for kinds in executor.ticks.branches]
        carry, sent = lax.switch(cell["branch"], branches, carry, received)
        carry, sent, _ = between(carry, sent, received)
    return carry._replace(sent_backward=sent), None


def _run_kinds(at: "_Tick", kinds: tuple[Kind, ...], between: Callable[..., Any], carry: _Carry, received: _Message) -> tuple[_Carry, Any]:
    """Actions of these kinds, in their order; `between` happens when backward has ended. (Carry, cotangents to send.)"""
    carry, arrived = at.arrive(carry, "inbox backward", carry.sent_backward)
    stash, sent = at.take(carry, "stash") if "weight" in kinds else [], carry.sent_backward
    if "backward" in kinds:
        carry, sent = _backward(at, carry, arrived)
    carry, sent, received = between(carry, sent, received)
    if "weight" in kinds:
        carry = _weight(at, carry, stash)
    carry, leaves = at.arrive(carry, "inbox forward", [*received[0], *received[1]])
    if "forward" in kinds:
        carry = _forward(at, carry, leaves)
    return carry, sent


class _Tick(NamedTuple):
    """A tick of one stage: its cells, and its buffers' slots."""

    executor: _Executor
    run: Run
    cell: dict[str, Array]

    def take(self, carry: _Carry, ring: str) -> list[Array]:
        """What the tick takes out of a buffer."""
        return take(carry.rings[ring], self.cell[f"{ring} read"])

    def put(self, carry: _Carry, ring: str, leaves: list[Array]) -> _Carry:
        """What the tick puts into a buffer."""
        kept = put(carry.rings[ring], leaves, self.cell[f"{ring} write"], ring in self.run.always)
        return carry._replace(rings=carry.rings | {ring: kept})

    def arrive(self, carry: _Carry, ring: str, leaves: list[Array]) -> tuple[_Carry, list[Array]]:
        """Put what has come into an inbox, if messages ever wait, and take what the tick needs, which may be what has just come."""
        if ring not in carry.rings:
            return carry, leaves
        waited, old = self.cell[f"{ring} read"] != IDLE, self.take(carry, ring)
        return self.put(carry, ring, leaves), [jnp.where(waited, a, b) for a, b in zip(old, leaves, strict=True)]

    def work(self, kind: Kind) -> tuple[Array, Chunk, Batch]:
        """(whether there is an action of this kind, its chunk, its microbatch)."""
        stage = self.executor.stage
        there, microbatch, chunk = stage.work(self.cell[kind])
        return there, stage.chunk(chunk), stage.microbatch(microbatch)


def _from_last(stage: Stage, sent: _Message) -> _Message:
    """What the last stage has sent, on all stages."""
    return _sum_over_stages(where_there(stage.index == stage.num_stages - 1, sent))


def _sum_over_stages(tree: PyTree) -> Any:
    """The sums over stages, on the stream of hops, so that they lie over compute as hops do."""
    with set_xla_metadata(_xla_gpu_collective_stream="p2p"):
        return jax.tree.map(lambda x: lax.psum(x, PIPE), tree)


def _backward(at: _Tick, carry: _Carry, received: list[Array]) -> tuple[_Carry, list[Array]]:
    """The backward action: adds to the sums, and gives the cotangents to send back.

    At the end of the model it begins with the loss, forward too: so logits live within one action, and none are kept between
    ticks. Where all stages share the head they have done so in an earlier tick.
    """
    stage, pullback, sums = at.executor.stage, at.executor.pullback, carry.sums
    assert pullback is not None
    there, chunk, batch = at.work("backward")
    ends, output = stage.is_last(chunk.number), at.take(carry, "outputs")
    shared_grads: Params | None = None
    if at.executor.shares_head:
        begun = output
    else:
        loss, metrics, shared_grads, begun = _loss_backward(
            at.executor, there & ends, batch, output[: len(received)], output[len(received) :]
        )
        sums = sums._replace(loss=sums.loss + loss, metrics=jax.tree.map(jnp.add, sums.metrics, metrics))
    # Cotangents, not gradients, are masked: a stage with nothing to do adds zeros.
    cotangents = [jnp.where(there, jnp.where(ends, own, x), 0) for own, x in zip(begun, received, strict=True)]
    grads, stash, sent = pullback.backward(chunk, at.take(carry, "residuals"), cotangents)
    if shared_grads is not None:
        grads = grads | jax.tree.map(jnp.add, shared_of(grads), shared_grads)
    assert sums.grads is not None
    carry = carry._replace(sums=sums._replace(grads=stage.add_gradients(sums.grads, grads, chunk.number)))
    return (at.put(carry, "stash", stash) if stash else carry), sent


def _loss_backward(
    executor: _Executor, there: Array, batch: Batch, moving: list[Array], still: list[Array]
) -> tuple[Array, dict[str, Array], Params, list[Array]]:
    """(loss, metrics, gradients of what layers share, cotangents of the boundary) of a microbatch; zeros where it is not `there`."""
    stage = executor.stage
    shared = shared_of(stage.example.params)

    def compute() -> tuple[Array, dict[str, Array], Params, list[Array]]:
        loss_of = lambda shared, moving: stage.local_loss(shared, moving, still, batch)  # noqa: E731
        loss, pull, metrics = jax.vjp(loss_of, shared, moving, has_aux=True)
        grads, begun = pull(varying(jnp.where(there, 1, 0).astype(loss.dtype), varying_axes(loss)))
        return *where_there(there, (loss, metrics)), grads, begun

    if not stage.skips:
        return compute()
    # Only the types of this are looked at, so nothing of it runs.
    nothing = compute()
    return lax.cond(there, compute, lambda: jax.tree.map(zeros, nothing))


def _shared_head(at: _Tick, carry: _Carry, ended: _Message) -> _Carry:
    """The loss of the microbatch that has come to the end of the model, which all stages compute together."""
    stage, number = at.executor.stage, at.cell["head"]
    there, batch = number != IDLE, stage.microbatch(jnp.maximum(number, 0), BATCH_AXES)
    moving, still = ended
    loss_of = lambda shared, moving: stage.loss(shared, moving, still, batch)  # noqa: E731
    loss, pull, metrics = jax.vjp(loss_of, shared_of(stage.example.params), varying(moving), has_aux=True)
    counted = there & (stage.index == stage.num_stages - 1)
    sums = jax.tree.map(lambda total, more: total + jnp.where(counted, more, 0), carry.sums._replace(grads=None), Sums(loss, metrics, None))
    if at.executor.pullback is None:
        return carry._replace(sums=sums)
    grads, begun = pull(varying(jnp.where(there, 1, 0).astype(loss.dtype), varying_axes(loss)))
    assert carry.sums.grads is not None
    shared_grads = jax.tree.map(jnp.add, shared_of(carry.sums.grads), grads)
    carry = carry._replace(sums=sums._replace(grads=carry.sums.grads | shared_grads))
    return at.put(carry, "outputs", varying(_sum_over_stages(begun)))


def _weight(at: _Tick, carry: _Carry, stash: list[Array]) -> _Carry:
    """The gradients of weights that an earlier backward action has left."""
    stage, pullback = at.executor.stage, at.executor.pullback
    assert pullback is not None and carry.sums.grads is not None
    there, chunk, _ = at.work("weight")
    grads = pullback.weight_gradients(where_there(there, stash))
    return carry._replace(sums=carry.sums._replace(grads=stage.add_gradients(carry.sums.grads, grads, chunk.number)))


def _forward(at: _Tick, carry: _Carry, received: list[Array]) -> _Carry:
    """The forward action: leaves what backward needs, and what is to be sent."""
    stage, pullback = at.executor.stage, at.executor.pullback
    there, chunk, batch = at.work("forward")
    num_moving = len(carry.sent_backward)
    moving, still = received[:num_moving], received[num_moving:]
    if pullback is None:
        moving, still = stage.blocks(chunk, moving, still, batch)
        if not at.executor.shares_head:
            counted = there & stage.is_last(chunk.number)
            loss, metrics = where_there(counted, stage.local_loss(shared_of(chunk.params), moving, still, batch))
            found = Sums(loss, metrics, None)
            carry = carry._replace(sums=jax.tree.map(jnp.add, carry.sums, found))
    else:
        moving, still, leaves = pullback.forward(chunk, moving, still, batch)
        carry = at.put(carry, "residuals", leaves)
        if not at.executor.shares_head:
            carry = at.put(carry, "outputs", [*moving, *still])
    return carry._replace(sent_forward=(moving, still))
