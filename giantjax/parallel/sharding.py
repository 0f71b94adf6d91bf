"""One table from the dims of parameters and batches to mesh axes."""

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from giantjax.errors import did_you_mean
from giantjax.parallel.mesh import BATCH_AXES

MeshAxes = str | tuple[str, ...] | None

TABLE: dict[str, MeshAxes] = {
    "batch": BATCH_AXES,
    "layers": "pipe",
    "vocabulary": "tensor",
    "position": None,
    "hidden": None,
    "qkv": None,
    "heads": "tensor",
    "head": None,
    "inner": "tensor",
}
"""Which mesh axes share each dim; None is replicated."""


def partition_spec(dims: tuple[str | None, ...]) -> PartitionSpec:
    """How an array with these dims lies on the mesh; a dim without a name is not shared.

    Raises:
        ValueError: a dim is not in the table.
    """
    for dim in dims:
        if dim is not None and dim not in TABLE:
            raise ValueError(f"the sharding table has no dim {dim!r}{did_you_mean(dim, TABLE)}")
    return PartitionSpec(*(dim and TABLE[dim] for dim in dims))


def partition_specs(dims: PyTree) -> PyTree:
    """`partition_spec` of every tuple of dims in a tree."""
    return jax.tree.map(partition_spec, dims, is_leaf=lambda value: isinstance(value, tuple))


def shardings(mesh: Mesh, specs: PyTree) -> PyTree:
    """`specs` as shardings of `mesh`."""
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=lambda value: isinstance(value, PartitionSpec))
