"""The backward pass of a stage's blocks, taken apart so that it can wait in a buffer between ticks."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from giantjax.parallel.product import Stash, Weight, is_stash_or_none, weight_gradient
from giantjax.parallel.spans import Span
from giantjax.parallel.stage import MICROBATCH_AXES, Chunk, Stage
from giantjax.parallel.stages import BLOCKS, Batch, Params, by_kind, shared_of, with_copies
from giantjax.parallel.varying import varying_axes, zeros
from giantjax.parallel.zero import scattered


class Pullback:
    """How the pullback of a chunk's blocks comes apart into leaves for the ring, and together again.

    Each leaf is a part of the chunk, which stays where it is; or a constant, the same in every tick; or of one microbatch, and
    goes into the ring. `leaves` are examples of the last kind. With `defers` the gradients of the weights of products are left
    to `weight_gradients`, and `stash` has examples of what that needs.
    """

    def __init__(self, stage: Stage, defers: bool = False):
        self.stage = stage
        self._stashes = _stashes_of(stage) if defers else None
        self.stash = jax.tree.leaves(self._stashes)
        # This trace is only looked at: its results reach nothing, so nothing of it runs.
        _, found, _ = self._forward(stage.example, *stage.split(stage.empty), stage.microbatch(jnp.int32(0)))
        leaves, self._structure = jax.tree.flatten(found)
        parts = self._parts(stage.example)
        # What comes from a microbatch varies over these axes, so a leaf that does not is the same in every tick.
        constants = [leaf for leaf in leaves if not varying_axes(leaf) >= MICROBATCH_AXES] + self.stash
        self._part = [next((place for place, part in enumerate(parts) if part is leaf), None) for leaf in leaves]
        self._constant = [next((constant for constant in constants if constant is leaf), None) for leaf in leaves]
        self.leaves = [leaf for leaf, waits in zip(leaves, self._waits, strict=True) if waits]

    @property
    def _waits(self) -> list[bool]:
        return [part is None and constant is None for part, constant in zip(self._part, self._constant, strict=True)]

    def _parts(self, chunk: Chunk) -> list[Array]:
        return jax.tree.leaves(tuple(chunk))

    def _forward(self, chunk: Chunk, moving: list[Array], still: list[Array], batch: Batch) -> Any:
        def blocks(params: Params, stashes: PyTree, moving: list[Array]) -> tuple[list[Array], list[Array]]:
            if stashes is not None:
                params = jax.tree.map(lambda own, whole: whole if own is None else own, params, chunk.params, is_leaf=_is_none)
            return self.stage.blocks(chunk._replace(params=params), moving, still, batch, stashes)

        params = chunk.params
        if self._stashes is not None:
            params = jax.tree.map(lambda stash, x: None if stash else x, self._stashes, params, is_leaf=is_stash_or_none)
        return jax.vjp(blocks, params, self._stashes, moving, has_aux=True)

    def forward(self, chunk: Chunk, moving: list[Array], still: list[Array], batch: Batch) -> tuple[list[Array], list[Array], list[Array]]:
        """(floating leaves sent, other leaves sent, leaves to keep)."""
        sent, found, others = self._forward(chunk, moving, still, batch)
        return sent, others, [leaf for leaf, waits in zip(jax.tree.leaves(found), self._waits, strict=True) if waits]

    def backward(self, chunk: Chunk, kept: list[Array], cotangents: list[Array]) -> tuple[Params, list[Array], list[Array]]:
        """(gradients of the chunk's parameters, None where they are left for later; what they are made of; cotangents to send)."""
        left, parts = iter(kept), self._parts(chunk)
        leaves = [
            parts[part] if part is not None else next(left) if constant is None else constant
            for part, constant in zip(self._part, self._constant, strict=True)
        ]
        grads, stashes, sent = jax.tree.unflatten(self._structure, leaves)(cotangents)
        return grads, jax.tree.leaves(stashes), sent

    def weight_gradients(self, stash: list[Array]) -> Params:
        """Gradients of the weights that were left for later; None in the place of all others."""
        stashes, zero = jax.tree.unflatten(jax.tree.structure(self._stashes), stash), self.stage.zero
        dims = by_kind(self.stage.model, zero.dims[BLOCKS]) if zero else {}

        def make(stashes: PyTree) -> PyTree:
            return jax.tree.map(lambda one: one and weight_gradient(one.x, one.dy), stashes, is_leaf=is_stash_or_none)

        def gradients(group: dict[str, PyTree], layers: Array) -> dict[str, PyTree]:
            if zero is None:
                every = jax.vmap(make) if layers.ndim == 1 else jax.vmap(jax.vmap(make))
                return every(group)
            # One layer after the other, so that no more than its gradients are ever whole.
            own = {kind: dims[kind] for kind in group}
            each = [scattered(make(jax.tree.map(lambda a: a[place], group)), own) for place in np.ndindex(layers.shape)]  # noqa: B023
            return jax.tree.map(lambda *found: jnp.stack(found).reshape(*layers.shape, *found[0].shape), *each)

        blocks = [gradients(group, layers) for group, layers in zip(stashes[BLOCKS], self.stage.example.layers, strict=True)]
        return stashes | {BLOCKS: blocks}


def _is_none(x: Any) -> bool:
    return x is None


def _stashes_of(stage: Stage) -> Params:
    """In the place of each weight in the blocks that a single product uses zeros for every layer; None in all other places."""
    chunk, batch = stage.example, stage.microbatch(jnp.int32(0))
    shared = with_copies(shared_of(chunk.params), shared_of(chunk.copies))

    def of_span(span: Span, layers: Array, params: dict[str, Params], copies: dict[str, Params]) -> dict[str, Params]:
        seen: dict[int, list[Stash]] = {}

        def watched(number: int, copy: Any, x: Array) -> Any:
            first = lambda a: a[(0,) * layers.ndim]  # noqa: E731
            if copy is None:
                return first(x)
            kinds = lambda x, y: seen.setdefault(number, []).append(Stash(jax.typeof(x), jax.typeof(y)))  # noqa: E731
            return Weight(first(x), jax.tree.map(first, copy), seen=kinds)

        def stash(number: int) -> Stash | None:
            found = seen.get(number, [])
            return Stash(zeros(found[0].x, *layers.shape), zeros(found[0].dy, *layers.shape)) if len(found) == 1 else None

        numbers = jax.tree.unflatten(jax.tree.structure(params), range(len(jax.tree.leaves(params))))
        own = jax.tree.map(watched, numbers, copies, params)
        for kind in span.kinds:
            block = by_kind(stage.model, stage.model.block)[kind]
            jax.eval_shape(lambda own: block(shared, own, stage.empty, jnp.int32(0), batch, stage.step), own[kind])  # noqa: B023
        return jax.tree.map(stash, numbers)

    spans = zip(stage.spans, chunk.layers, chunk.params[BLOCKS], chunk.copies[BLOCKS], strict=True)
    return jax.tree.map(lambda _: None, chunk.params) | {BLOCKS: [of_span(*one) for one in spans]}
