"""How the gradients of a step are summed over the devices that hold the same parameter.

The sum crosses between nodes on `replica`, and for what all stages share on `pipe`. It is taken there of one share a device:
scattered over the axes inside a node first, gathered in the node afterwards. So each byte crosses once a node, not once a
device, and small gradients cross together, in buckets. Under ZeRO the gather is that of the updated parameters.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.xla_metadata import set_xla_metadata
from jax.sharding import PartitionSpec
from jax.tree_util import SequenceKey, tree_leaves_with_path
from jaxtyping import Array, PyTree

from giantjax.parallel.collectives import Compression, Errors, compressed_sum, padded_size
from giantjax.parallel.mesh import AXES
from giantjax.parallel.varying import varying

ACROSS = ("pipe", "replica")
"""The axes that cross between nodes, unless a mesh has them otherwise; then the sum is as right, and not as fast."""
REPLICA = "replica"
BUCKET_VALUES = 1 << 24
"""Gradients are put together up to this size, 64 MiB in fp32: latency is then far below transfer on any network."""


@dataclass(frozen=True)
class Bucket:
    """Gradients that are summed together, on two levels."""

    leaves: tuple[int, ...]
    """Places in the flattened tree of gradients."""
    inside: tuple[str, ...]
    across: tuple[str, ...]
    """Axes to sum over; `replica` last."""
    size: int
    """Values on a device, with padding that `inside` devices can share."""

    @property
    def owners(self) -> tuple[str, ...]:
        """The axes over which devices round differently: all but those summed over before."""
        return tuple(axis for axis in AXES if axis == REPLICA or axis not in self.across)


@dataclass(frozen=True)
class Reduction:
    """The plan of a step's sums; made by `plan_reduction`."""

    axes: tuple[tuple[str, ...], ...]
    """By leaf, the axes that it is summed over once `zero_dims` has been scattered."""
    zero_dims: tuple[int, ...]
    """By leaf, the dim scattered over `data`, or -1."""
    scattered: bool
    """Whether that has been done in every tick (ZeRO 2 and 3)."""
    parts: tuple[tuple[int, ...], ...]
    """Places of leaves that are summed together, in the order in which backward passes complete them."""
    buckets: tuple[Bucket, ...]
    compression: Compression
    degrees: dict[str, int]

    @property
    def compressed(self) -> tuple[Bucket, ...]:
        """The buckets whose values are rounded between nodes."""
        return tuple(bucket for bucket in self.buckets if self.compression != "none" and REPLICA in bucket.across)

    def errors(self) -> tuple[Any, ...]:
        """Shapes of the rounding errors of each compressed bucket, as `Errors`, a row a device that rounds for itself."""

        def row(bucket: Bucket, ways: int) -> Any:
            return jax.ShapeDtypeStruct((self._degree(bucket.owners), bucket.size // self._degree(bucket.inside) // ways), jnp.float32)

        return tuple(Errors(row(bucket, 1), row(bucket, self.degrees[REPLICA])) for bucket in self.compressed)

    def errors_specs(self) -> tuple[Any, ...]:
        """PartitionSpecs of `errors`."""
        return tuple(Errors(PartitionSpec(bucket.owners), PartitionSpec(bucket.owners)) for bucket in self.compressed)  # type: ignore[arg-type]

    def _degree(self, axes: Iterable[str]) -> int:
        return math.prod(self.degrees[axis] for axis in axes)


def axes_of(spec: PartitionSpec) -> set[str]:
    """The mesh axes that share an array."""
    return {axis for entry in spec for axis in ((entry,) if isinstance(entry, str) else entry or ())}


def plan_reduction(
    shapes: PyTree,
    specs: PyTree,
    zero_dims: PyTree,
    degrees: Mapping[str, int],
    compression: Compression = "none",
    scattered: bool = False,
) -> Reduction:
    """Which gradients are summed where.

    Args:
        shapes: of the parameters, whole.
        specs: PartitionSpec of each.
        zero_dims: the dim of each that ZeRO shares over `data`, or -1.
        degrees: of the mesh.
        compression: of what crosses on `replica`; where nothing does there is nothing to compress.
        scattered: whether gradients come as shares of what `zero_dims` says.

    What is in an entry of a list, as parts of the blocks are, shares no bucket with what is not, so that it need not wait for it.
    """
    compression = compression if degrees[REPLICA] > 1 else "none"
    leaves, zeros = jax.tree.leaves(shapes), tuple(jax.tree.leaves(zero_dims))
    shared = [axes_of(spec) for spec in jax.tree.leaves(specs, is_leaf=lambda value: isinstance(value, PartitionSpec))]
    shared = [axes | ({"data"} if dim >= 0 else set()) for axes, dim in zip(shared, zeros, strict=True)]
    sizes = [leaf.size // math.prod(degrees[axis] for axis in axes) for leaf, axes in zip(leaves, shared, strict=True)]
    summed = tuple(tuple(axis for axis in AXES if axis not in axes) for axes in shared)

    entries = [tuple(key.idx for key in path if isinstance(key, SequenceKey)) for path, _ in tree_leaves_with_path(shapes)]
    groups: dict[tuple[tuple[str, ...], tuple[int, ...]], list[int]] = {}
    for place, (axes, entry) in enumerate(zip(summed, entries, strict=True)):
        if _two_levels(axes, degrees, compression):
            groups.setdefault((axes, entry), []).append(place)
    buckets = []
    for (axes, _), places in groups.items():
        inside = tuple(axis for axis in axes if axis not in ACROSS)
        ways = math.prod(degrees[axis] for axis in inside)
        for members in _filled(places, sizes):
            size, rounds = sum(sizes[place] for place in members), compression != "none" and REPLICA in axes
            size = padded_size(size, ways, degrees[REPLICA]) if rounds else -(-size // ways) * ways
            buckets.append(Bucket(members, inside, tuple(axis for axis in axes if axis in ACROSS), size))
    parts: dict[tuple[int, ...], list[int]] = {}
    for place, entry in enumerate(entries):
        parts.setdefault(entry, []).append(place)
    # Backward passes go from the last part to the first; what all layers share is complete when they are.
    in_order = tuple(tuple(places) for _, places in sorted(parts.items(), reverse=True))
    return Reduction(summed, zeros, scattered, in_order, tuple(buckets), compression, dict(degrees))


def _two_levels(axes: tuple[str, ...], degrees: Mapping[str, int], compression: Compression) -> bool:
    inside, across = (math.prod(degrees[axis] for axis in axes if (axis in ACROSS) == crosses) for crosses in (False, True))
    return (inside > 1 and across > 1) or (compression != "none" and REPLICA in axes)


def _filled(places: list[int], sizes: list[int]) -> list[tuple[int, ...]]:
    """`places` in order, cut so that no bucket is above BUCKET_VALUES unless a single gradient is."""
    buckets: list[list[int]] = []
    for place in places:
        if buckets and sum(sizes[other] for other in buckets[-1]) + sizes[place] <= BUCKET_VALUES:
            buckets[-1].append(place)
        else:
            buckets.append([place])
    return [tuple(bucket) for bucket in buckets]


def reduce_gradients(plan: Reduction, grads: PyTree, errors: tuple[Errors, ...] = ()) -> tuple[PyTree, tuple[Errors, ...]]:
    """The sums of `grads` as `plan` says, and what rounding took off; call it inside a `shard_map` over all axes.

    Args:
        plan: from `plan_reduction`.
        grads: this device's gradients, varying over all axes.
        errors: rows of what rounding took off in the step before, or () where the plan compresses nothing.
    """
    leaves, structure = jax.tree.flatten(grads)
    rows = dict(zip(plan.compressed, errors, strict=True))
    after: dict[Bucket, Errors] = {}
    for part, following in zip(plan.parts, [*plan.parts[1:], ()], strict=True):
        with set_xla_metadata(_xla_gpu_collective_stream="p2p"):
            _reduce_part(plan, part, leaves, rows, after)
        # The next part's sum begins when this one's has ended, and this one's ends no sooner than the next part's gradients are
        # there: so it lies over their computation.
        if following:
            ended = varying([leaves[place].ravel()[0] for place in part])
            _, waited = lax.optimization_barrier((ended, [leaves[place] for place in following]))
            for place, leaf in zip(following, waited, strict=True):
                leaves[place] = leaf
    return jax.tree.unflatten(structure, leaves), tuple(after[bucket] for bucket in plan.compressed)


def _reduce_part(
    plan: Reduction, part: tuple[int, ...], leaves: list[Array], rows: dict[Bucket, Errors], after: dict[Bucket, Errors]
) -> None:
    """Put the sums in the places of the gradients of one part, and what rounding took off into `after`."""
    buckets = [bucket for bucket in plan.buckets if bucket.leaves[0] in part]
    bucketed = {place for bucket in buckets for place in bucket.leaves}
    for place in part:
        if plan.zero_dims[place] >= 0 and not plan.scattered:
            leaves[place] = lax.psum_scatter(leaves[place], "data", scatter_dimension=plan.zero_dims[place], tiled=True)
        if place not in bucketed:
            leaves[place] = lax.psum(leaves[place], plan.axes[place])
    for bucket in buckets:
        flat, errors = _sum_bucket(plan, bucket, [leaves[place] for place in bucket.leaves], rows.get(bucket))
        if errors is not None:
            after[bucket] = errors
        starts = np.cumsum([0, *(leaves[place].size for place in bucket.leaves)])
        for place, start in zip(bucket.leaves, starts, strict=False):
            leaves[place] = lax.dynamic_slice_in_dim(flat, int(start), leaves[place].size).reshape(leaves[place].shape)


def _sum_bucket(plan: Reduction, bucket: Bucket, grads: list[Array], errors: Errors | None) -> tuple[Array, Errors | None]:
    """The flat sum of a bucket over both levels, padding at its end."""
    flat = jnp.concatenate([grad.ravel() for grad in grads])
    flat = jnp.pad(flat, (0, bucket.size - flat.size))
    own = lax.psum_scatter(flat, bucket.inside, scatter_dimension=0, tiled=True) if bucket.inside else flat
    after = None
    if errors is None:
        own = lax.psum(own, bucket.across)
    else:
        assert plan.compression != "none"
        exact = tuple(axis for axis in bucket.across if axis != REPLICA)
        own = lax.psum(own, exact) if exact else own
        own, after = compressed_sum(own, REPLICA, plan.compression, jax.tree.map(lambda row: row[0], errors))
        after = jax.tree.map(lambda row: row[None], after)
    return (lax.all_gather(own, bucket.inside, tiled=True, to="invarying") if bucket.inside else own), after
