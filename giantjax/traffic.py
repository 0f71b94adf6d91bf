"""Bytes that collectives move inside and between nodes: counted in a compiled program, and foretold from a layout.

A collective of a group is taken to run around a ring that enters and leaves each node once, as NCCL lays it; hops and
all-to-alls go straight from source to target. Devices are named by their place in the mesh.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Float

from giantjax.config import RunConfig
from giantjax.overlap import HOPS, Collective
from giantjax.parallel.collectives import BYTES_A_VALUE
from giantjax.parallel.gradients import axes_of as shared_axes
from giantjax.parallel.mesh import AXES
from giantjax.parallel.placement import INSIDE
from giantjax.training.state import Layout

Nodes = Sequence[int]
"""The node of each place in the mesh."""


class Traffic(NamedTuple):
    """Bytes each device sends in a step."""

    inside: Float[np.ndarray, "devices"]
    """To its own node."""
    across: Float[np.ndarray, "devices"]
    """To another node."""


def ring_edges(kind: str, group: Sequence[int], nodes: Nodes, num_bytes: float) -> Iterator[tuple[int, int, float]]:
    """(source, target, bytes) of one collective in which each member puts in `num_bytes`."""
    size = len(group)
    if kind == "all-to-all":
        yield from ((a, b, num_bytes / size) for a, b in itertools.permutations(group, 2))
        return
    shares = {"all-reduce": 2 * (size - 1) / size, "reduce-scatter": (size - 1) / size, "all-gather": size - 1, "collective-broadcast": 1}
    ring = sorted(group, key=lambda place: nodes[place])
    yield from ((a, b, shares[kind] * num_bytes) for a, b in zip(ring, ring[1:] + ring[:1], strict=True) if a != b)


def traffic(collectives: Iterable[Collective], nodes: Nodes) -> Traffic:
    """What the collectives of a program send in one run of it; what is received is not counted again."""
    inside, across = np.zeros(len(nodes)), np.zeros(len(nodes))
    for each in collectives:
        if each.kind in HOPS:
            edges = [(a, b, float(each.num_bytes)) for a, b in each.pairs if a != b and each.kind != "recv"]
        else:
            groups = each.groups or (tuple(range(len(nodes))),)
            edges = [edge for group in groups for edge in ring_edges(each.kind, group, nodes, each.num_bytes)]
        for source, target, num_bytes in edges:
            (inside if nodes[source] == nodes[target] else across)[source] += each.times * num_bytes
    return Traffic(inside, across)


class Foretold(NamedTuple):
    """Bytes that must cross nodes in a step, in total."""

    boundaries: float
    """Each microbatch's boundary once per pair of neighbouring stages and direction, each device its slice."""
    gradients: float
    """fp32 gradients of parameters that several nodes hold: of k nodes each sends 2 (k - 1) / k of them, however many of its
    devices hold them too, and under ZeRO as gradients out and parameters back."""

    head: float = 0.0
    """Where all stages share the head, each microbatch's last boundary summed over stages, and its cotangents, each device its slice."""

    @property
    def total(self) -> float:
        """All."""
        return self.boundaries + self.gradients + self.head


def foretell(config: RunConfig, layout: Layout, nodes: Nodes, width: int) -> Foretold:
    """The bytes that the mesh alone says, for boundaries of `width` bytes an element."""
    degrees = {axis: layout.mesh.shape[axis] for axis in AXES}
    where = np.asarray(nodes).reshape(list(degrees.values()))
    crossings = int((where[1:] != where[:-1]).sum())
    model = config.model
    piece = config.microbatch_size * model.sequence_length * model.hidden_size * width / config.mesh.tensor
    gradients = 0.0
    specs = jax.tree.leaves(layout.params, is_leaf=lambda value: isinstance(value, PartitionSpec))
    for leaf, spec in zip(jax.tree.leaves(layout.shapes.params), specs, strict=True):
        shared = shared_axes(spec)
        own = 4.0 * leaf.size / math.prod(degrees[axis] for axis in shared)
        others = [axis for axis in AXES if axis not in shared]
        if layout.reduction.compression == "none":
            gradients += 2 * own * _crossings(where, others)
        else:  # fp32 over stages first, then rounded over replicas
            gradients += 2 * own * _crossings(where, [axis for axis in others if axis != "replica"])
            rounded = own * BYTES_A_VALUE[layout.reduction.compression] / 4
            gradients += 2 * rounded * _crossings(where, ["replica"]) / math.prod(degrees[axis] for axis in others if axis in INSIDE)
    around = int((where[0] != where[-1]).sum()) if config.pipeline.num_chunks > 1 else 0
    messages = config.num_microbatches * config.pipeline.num_chunks
    head = 0.0
    if config.pipeline.head == "shared" and config.mesh.pipe > 1:
        stages = np.moveaxis(where, AXES.index("pipe"), 0).reshape(config.mesh.pipe, -1)
        nodes_of_rings = [len(set(ring)) for ring in stages.T.tolist()]
        ends = sum(number for number in nodes_of_rings if number > 1)
        head = 4 * config.num_microbatches * piece * ends * (config.mesh.pipe - 1) / config.mesh.pipe
    return Foretold(2 * (crossings + around) * messages * piece, gradients, head)


def _crossings(where: np.ndarray, axes: Sequence[str]) -> int:
    """Over all groups of devices that differ along `axes` only: their nodes but one."""
    places = [AXES.index(axis) for axis in axes]
    groups = np.moveaxis(where, places, range(len(places))).reshape(math.prod(where.shape[place] for place in places), -1)
    return sum(len(set(group)) - 1 for group in groups.T.tolist())


def axes_of(collective: Collective, degrees: dict[str, int]) -> tuple[str, ...]:
    """The mesh axes along which the devices that talk differ."""
    every = (tuple(range(math.prod(degrees.values()))),)
    members = np.array([[*pair] for pair in collective.pairs] or [list(group) for group in collective.groups or every])
    places = np.stack(np.unravel_index(members, [degrees[axis] for axis in AXES]))
    return tuple(axis for axis, place in zip(AXES, places, strict=True) if (place != place[:, :1]).any())


__all__ = ["Foretold", "Traffic", "axes_of", "foretell", "ring_edges", "traffic"]
