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

from giantjax.config import recompute_interval


class Span(NamedTuple):
    """Positions [first, stop) of every chunk."""

    first: int
    stop: int
    part: int
    """Of the parts whose gradients are summed over devices one by one."""
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
    order: Sequence[str], table: Int[np.ndarray, "S L"], num_chunks: int, recompute: str = "none", skips: bool = False, num_parts: int = 1
) -> list[Span]:
    """The spans of a chunk.

    Args:
        order: the kind of each block of the model.
        table: layers of each stage, chunk after chunk; -1 is padding.
        num_chunks: chunks on each stage.
        recompute: the policy; `full:K` makes K blocks again together.
        skips: whether stages without a block skip it.
        num_parts: a chunk is cut into so many parts first.
    """
    positions = []
    for part, cells in _positions(table, num_chunks, num_parts):
        padded = bool((cells < 0).any())
        positions.append((part, _kinds_at(order, cells), padded and skips, padded))
    spans: list[Span] = []
    for (part, kinds, _), found in itertools.groupby(positions, key=lambda position: position[:3]):
        run, first = list(found), spans[-1].stop if spans else 0
        stop, padded = first + len(run), any(position[3] for position in run)
        every = min(recompute_interval(recompute), len(run))
        whole = first + len(run) // every * every
        cuts = [(first, whole, every)] + ([(whole, stop, stop - whole)] if whole < stop else [])
        spans += [Span(first, stop, part, every, kinds, padded, skips) for first, stop, every in cuts]
    return spans


def kind_tables(order: Sequence[str], table: Int[np.ndarray, "S L"], num_chunks: int) -> dict[str, Int[np.ndarray, "S K"]]:
    """Of each kind, which of its blocks each stage holds, chunk after chunk; -1 is padding.

    A stage has room for one at each position at which any stage has one.
    """
    number = {kind: np.cumsum([one == kind for one in order]) - 1 for kind in dict.fromkeys(order)}
    tables = {}
    for kind, numbers in number.items():
        held = [cells for _, cells in _positions(table, num_chunks) if kind in _kinds_at(order, cells)]
        own = [np.where((cells >= 0) & (np.array(order)[cells] == kind), numbers[cells], -1) for cells in held]
        tables[kind] = np.stack(own, axis=-1).reshape(len(table), -1).astype(np.int32)
    return tables


def part_sizes(order: Sequence[str], table: Int[np.ndarray, "S L"], num_chunks: int, num_parts: int) -> list[dict[str, int]]:
    """Positions of each part of a chunk that have room for each kind; kinds without any are left out."""
    sizes: list[dict[str, int]] = [{} for _ in range(num_parts)]
    for part, cells in _positions(table, num_chunks, num_parts):
        for kind in _kinds_at(order, cells):
            sizes[part][kind] = sizes[part].get(kind, 0) + 1
    return sizes


def _positions(table: Int[np.ndarray, "S L"], num_chunks: int, num_parts: int = 1) -> list[tuple[int, Int[np.ndarray, "S C"]]]:
    """The part of each position of a chunk, of which none has more than one more than another, and the layers there."""
    cells = np.moveaxis(table.reshape(len(table), num_chunks, -1), -1, 0)
    ends = np.linspace(0, len(cells), num_parts + 1).round().astype(int)
    parts = np.repeat(np.arange(num_parts), np.diff(ends))
    return list(zip(parts.tolist(), cells, strict=True))


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


def join(spans: Sequence[Span], groups: Sequence[dict[str, PyTree]]) -> list[dict[str, PyTree]]:
    """Part by part the blocks of each kind, [L, ...], from what `cut` made of them; kinds that a part does not have are left out."""
    parts: list[dict[str, list[PyTree]]] = [{} for _ in range(spans[-1].part + 1)]
    for span, group in zip(spans, groups, strict=True):
        for kind, tree in group.items():
            flat = tree if span.every == 1 else jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), tree)
            parts[span.part].setdefault(kind, []).append(flat)
    return [{kind: _concatenated(trees) for kind, trees in part.items()} for part in parts]


def join_parts(parts: Sequence[dict[str, PyTree]], num_chunks: int) -> dict[str, PyTree]:
    """Blocks of each kind, chunk after chunk, [C x L, ...], from those of each part of all chunks."""
    kinds = dict.fromkeys(kind for part in parts for kind in part)
    chunked = [jax.tree.map(lambda a: a.reshape(num_chunks, -1, *a.shape[1:]), part) for part in parts]
    whole = {kind: _concatenated([part[kind] for part in chunked if kind in part], axis=1) for kind in kinds}
    return jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), whole)


def _concatenated(trees: Sequence[PyTree], axis: int = 0) -> PyTree:
    return trees[0] if len(trees) == 1 else jax.tree.map(lambda *leaves: jnp.concatenate(leaves, axis), *trees)
