"""Runs of positions of a stage's blocks that are one loop: which kinds of block the stages have there.

Every stage runs the same program. At a position where all have blocks of one kind it holds that kind; where they differ, or where
those without a block are to skip it, each picks its own under a conditional.
"""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, PyTree


class Span(NamedTuple):
    """Positions [first, stop) of every chunk."""

    first: int
    stop: int
    every: int
    """Blocks that the backward pass makes again together; 1 where each is by itself."""
    kinds: tuple[str, ...]
    """What stages have there."""
    padded: bool
    """Whether some stage has nothing there."""
    skips: bool
    """Whether those that have nothing skip it, rather than compute a block to no effect."""

    @property
    def chooses(self) -> bool:
        """Whether stages do different things."""
        return len(self.kinds) > 1 or (self.padded and self.skips)


def spans_of(
    order: Sequence[str], table: Int[np.ndarray, "S L"], num_chunks: int, recompute: str = "none", skips: bool = False
) -> list[Span]:
    """The spans of a chunk.

    Args:
        order: the kind of each block of the model.
        table: layers of each stage, chunk after chunk; -1 is padding.
        num_chunks: chunks on each stage.
        recompute: the policy; `full:K` makes K blocks again together.
        skips: whether stages without a block skip it.
    """
    positions = []
    for cells in _positions(table, num_chunks):
        padded = bool((cells < 0).any())
        positions.append((_kinds_at(order, cells), padded and skips, padded))
    spans: list[Span] = []
    for (kinds, _), found in itertools.groupby(positions, key=lambda position: position[:2]):
        run, first = list(found), spans[-1].stop if spans else 0
        stop, padded = first + len(run), any(position[2] for position in run)
        every = min(recompute_interval(recompute), len(run))
        whole = first + len(run) // every * every
        cuts = [(first, whole, every)] + ([(whole, stop, stop - whole)] if whole < stop else [])
        spans += [Span(*cut, kinds, padded, skips) for cut in cuts]
    return spans


def kind_tables(order: Sequence[str], table: Int[np.ndarray, "S L"], num_chunks: int) -> dict[str, Int[np.ndarray, "S K"]]:
    """Of each kind, which of its blocks each stage holds, chunk after chunk; -1 is padding.

    A stage has room for one at each position at which any stage has one.
    """
    number = {kind: np.cumsum([one == kind for one in order]) - 1 for kind in dict.fromkeys(order)}
    tables = {}
    for kind, numbers in number.items():
        held = [cells for cells in _positions(table, num_chunks) if kind in _kinds_at(order, cells)]
        own = [np.where((cells >= 0) & (np.array(order)[cells] == kind), numbers[cells], -1) for cells in held]
        tables[kind] = np.stack(own, axis=-1).reshape(len(table), -1).astype(np.int32)
    return tables


def recompute_interval(recompute: str) -> int:
    """K of `full:K`, else 1."""
    return int(recompute.partition(":")[2] or 1)


def _positions(table: Int[np.ndarray, "S L"], num_chunks: int) -> list[Int[np.ndarray, "S C"]]:
    """The layers at each position of a chunk."""
    return list(np.moveaxis(table.reshape(len(table), num_chunks, -1), -1, 0))


def _kinds_at(order: Sequence[str], cells: Int[np.ndarray, "S C"]) -> tuple[str, ...]:
    there = {order[layer] for layer in cells.ravel() if layer >= 0}
    return tuple(kind for kind in dict.fromkeys(order) if kind in there)


def cut(spans: Sequence[Span], layers: Int[Array, "L"], blocks: dict[str, PyTree]) -> tuple[list[Array], list[dict[str, PyTree]]]:
    """The layers of a chunk and the blocks of each kind, [L, ...], by span: each [n, ...], or [n, K, ...] of K that go together."""
    places = dict.fromkeys(blocks, 0)
    numbers, groups = [], []
    for span in spans:
        numbers.append(_part(layers, span.first, span))
        groups.append({kind: jax.tree.map(lambda a: _part(a, places[kind], span), blocks[kind]) for kind in span.kinds})  # noqa: B023
        places |= {kind: places[kind] + span.stop - span.first for kind in span.kinds}
    return numbers, groups


def _part(a: Array, first: int, span: Span) -> Array:
    number = span.stop - span.first
    own = a if len(a) == number else a[first : first + number]
    return own if span.every == 1 else own.reshape(-1, span.every, *a.shape[1:])


def join(spans: Sequence[Span], groups: Sequence[dict[str, PyTree]]) -> dict[str, PyTree]:
    """Blocks of each kind, [L, ...], from what `cut` made of them."""
    kinds = dict.fromkeys(kind for span in spans for kind in span.kinds)
    return {kind: _joined([(span, group[kind]) for span, group in zip(spans, groups, strict=True) if kind in group]) for kind in kinds}


def _joined(parts: list[tuple[Span, PyTree]]) -> PyTree:
    flat = [tree if span.every == 1 else jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), tree) for span, tree in parts]
    return flat[0] if len(flat) == 1 else jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *flat)
