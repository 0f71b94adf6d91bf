"""One pipeline stage as functions of one microbatch: its blocks, and the loss at the end of the model."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int, PyTree

from giantjax.parallel.mesh import BATCH_AXES
from giantjax.parallel.partition import BLOCK
from giantjax.parallel.schedule import IDLE
from giantjax.parallel.spans import cut, join, spans_of
from giantjax.parallel.stages import (
    BLOCKS,
    Batch,
    Boundary,
    Model,
    Params,
    apply_blocks,
    by_kind,
    shared_of,
    with_copies,
)
from giantjax.parallel.varying import varying
from giantjax.parallel.zero import Zero, hold

PIPE = "pipe"
MICROBATCH_AXES = frozenset((PIPE, *BATCH_AXES))
"""Over these each device sees another microbatch; devices that share layers see the same one."""


class Chunk(NamedTuple):
    """What a stage holds of one chunk of the model, cut into spans."""

    number: Int[Array, ""]
    layers: list[Array]
    """Index of each layer in the model; -1 is padding."""
    params: Params
    """With all that layers share; `blocks` is a list of what `cut` makes of them."""
    copies: Params
    """In each parameter's place its copy in the compute type, or None."""


class Work(NamedTuple):
    """The cell of a table: which microbatch and chunk, and whether there is any."""

    there: Array
    microbatch: Int[Array, ""]
    chunk: Int[Array, ""]


class Stage:
    """One stage's functions, the sizes of what they pass on found by tracing them once."""

    def __init__(
        self,
        model: Model,
        table: Int[np.ndarray, "S L"],
        num_chunks: int,
        num_parts: int,
        recompute: str,
        params: Params,
        batches: Batch,
        step: Array | None,
        denominator: Array,
        zero: Zero | None = None,
        skips: bool = False,
    ):
        self.model, self.recompute, self.batches, self.zero = model, recompute, batches, zero
        self.step, self.denominator, self.num_chunks = step, denominator, num_chunks
        order = model.order or (BLOCK,) * int((table >= 0).sum())
        self.num_parts, self.spans = num_parts, spans_of(order, table, num_chunks, recompute, skips, num_parts)
        self.skips = skips
        self.num_stages, self.num_microbatches = len(table), jax.tree.leaves(batches)[0].shape[0]
        self.index = lax.axis_index(PIPE)
        # Cast and cut here, once and outside of any pullback, so that pullbacks hold these very arrays and no copies.
        params, copies = hold(model, params, zero)
        layers = jnp.asarray(table)[self.index]
        held = (layers, by_kind(model, params[BLOCKS]), by_kind(model, copies[BLOCKS]))
        if num_chunks > 1:
            # Which layers they are differs from tick to tick, so what is made of it is no constant of the stage.
            held = (varying(layers, MICROBATCH_AXES), *held[1:])
            held = jax.tree.map(lambda a: a.reshape(num_chunks, -1, *a.shape[1:]), held)
        self._shared, self._shared_copies, self._held = shared_of(params), shared_of(copies), held
        self._only = self._cut(jnp.int32(0), held) if num_chunks == 1 else None
        self.example = self.chunk(jnp.int32(0))
        first = self.microbatch(jnp.int32(0))
        shared = with_copies(self._shared, self._shared_copies)
        shapes = jax.eval_shape(lambda: varying(model.embed(shared, first, step)))
        self.empty = varying(jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes))

    def _cut(self, number: Array, held: PyTree) -> Chunk:
        layers, blocks, copied = held
        (numbers, own), (_, own_copies) = cut(self.spans, layers, blocks), cut(self.spans, layers, copied)
        return Chunk(number, numbers, self._shared | {BLOCKS: own}, self._shared_copies | {BLOCKS: own_copies})

    def chunk(self, number: Int[Array, ""]) -> Chunk:
        """Chunk `number` of this stage."""
        if self._only is not None:
            return self._only
        return self._cut(number, jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, number, keepdims=False), self._held))

    def work(self, cell: Int[Array, ""]) -> Work:
        """What a cell of the schedule's tables names."""
        number = jnp.maximum(cell, 0)
        if self.num_chunks == 1:
            return Work(cell != IDLE, number, jnp.int32(0))
        return Work(cell != IDLE, number % self.num_microbatches, number // self.num_microbatches)

    def microbatch(self, number: Int[Array, ""], axes: frozenset[str] | tuple[str, ...] = MICROBATCH_AXES) -> Batch:
        """Microbatch `number`, of which devices along `axes` each see one of their own."""
        found = jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, number, keepdims=False), self.batches)
        return varying(found, axes)

    def is_first(self, chunk: Array) -> Array:
        """Whether the model begins with this chunk of this stage."""
        return (self.index == 0) & (chunk == 0)

    def is_last(self, chunk: Array) -> Array:
        """Whether the model ends with this chunk of this stage."""
        return (self.index == self.num_stages - 1) & (chunk == self.num_chunks - 1)

    def blocks(
        self, chunk: Chunk, moving: list[Array], still: list[Array], batch: Batch, stashes: PyTree = None
    ) -> tuple[list[Array], list[Array]]:
        """The boundary sent, split, from the one received; the first stage makes its own from the microbatch.

        `stashes` has those of weights whose gradient is made later.
        """
        params = with_copies(chunk.params, chunk.copies, stashes)
        shared, boundary = shared_of(params), self.join(moving, still)
        # What an embedding computes is cheap and large: all that is kept of it is the microbatch.
        entering = varying(jax.checkpoint(lambda shared, batch: self.model.embed(shared, batch, self.step))(shared, batch))
        x = entering if self.num_stages * self.num_chunks == 1 else _where(self.is_first(chunk.number), entering, boundary)
        sent = apply_blocks(self.model, shared, self.spans, chunk.layers, params[BLOCKS], x, batch, self.step, self.recompute)
        return self.split(varying(sent))

    def loss(self, shared: Params, moving: list[Array], still: list[Array], batch: Batch) -> tuple[Array, dict[str, Array]]:
        """(loss, metrics) of the boundary at the end of the model, over the denominator."""
        shared = with_copies(shared, self._shared_copies)
        found = self.model.loss(shared, self.join(moving, still), batch, self.step)
        # Dividing here, not at the end, scales the gradients too.
        return jax.tree.map(lambda total: total / self.denominator, found)

    def local_loss(self, shared: Params, moving: list[Array], still: list[Array], batch: Batch) -> tuple[Array, dict[str, Array]]:
        """`loss` as a number of this stage alone, which other stages have others of."""
        return varying(self.loss(shared, moving, still, batch), MICROBATCH_AXES)

    def split(self, boundary: Boundary) -> tuple[list[Array], list[Array]]:
        """The floating leaves of a boundary, which carry cotangents, and the others."""
        leaves = jax.tree.leaves(boundary)
        return [x for x in leaves if _is_floating(x)], [x for x in leaves if not _is_floating(x)]

    def join(self, moving: list[Array], still: list[Array]) -> Boundary:
        """The inverse of `split`."""
        leaves, structure = jax.tree.flatten(self.empty)
        moving_left, still_left = iter(moving), iter(still)
        return jax.tree.unflatten(structure, [next(moving_left if _is_floating(x) else still_left) for x in leaves])

    def zero_gradients(self) -> Params:
        """Sums of the gradients of nothing: of blocks part by part, each of all chunks, [C, ...], where there are several."""
        blocks = join(self.spans, self.example.params[BLOCKS])
        if self._only is None:
            blocks = jax.tree.map(lambda p: jnp.broadcast_to(p, (self.num_chunks, *p.shape)), blocks)
        return jax.tree.map(lambda p: varying(jnp.zeros(p.shape, jnp.float32)), self._shared | {BLOCKS: blocks})

    def add_gradients(self, sums: Params, grads: Params, chunk: Int[Array, ""]) -> Params:
        """`sums` with the gradients of a chunk added; None in `grads` adds nothing."""

        def add(grad: Array | None, total: Array) -> Array:
            return total if grad is None else total + grad.astype(total.dtype)

        def add_at(grad: Array | None, total: Array) -> Array:
            return total if grad is None else total.at[chunk].add(grad.astype(total.dtype))

        is_none = lambda x: x is None  # noqa: E731
        own = jax.tree.map(add if self._only else add_at, join(self.spans, grads[BLOCKS]), sums[BLOCKS], is_leaf=is_none)
        return jax.tree.map(add, shared_of(grads), shared_of(sums), is_leaf=is_none) | {BLOCKS: own}

    def gradients(self, sums: Params) -> Params:
        """Sums of gradients whose blocks are in parts and by kind, each stacked by layer, [C x L, ...]; `join_parts` makes one of them."""
        if self._only is None:
            return sums | {BLOCKS: jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), sums[BLOCKS])}
        return sums


def _is_floating(x: Array) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


def _where(condition: Array, yes: PyTree, no: PyTree) -> PyTree:
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), yes, no)


def where_there(there: Array, tree: PyTree) -> Any:
    """`tree`, or zeros where there is nothing."""
    return jax.tree.map(lambda x: jnp.where(there, x, 0), tree)
