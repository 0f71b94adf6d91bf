"""The state as it lies on disk: layers in order, no padding, so that a checkpoint does not know its mesh.

Only the leaves that differ are converted, one at a time, when a checkpoint is written or read.
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, PyTree

from giantjax.parallel.stages import BLOCKS, Model, by_kind, from_kinds, is_in_order, shared_of, to_device_layout, to_disk_layout
from giantjax.training.optimizer import Optimizer
from giantjax.training.state import Layout, TrainState, abstract_state


@dataclass(frozen=True, eq=False)
class Form:
    """How one leaf differs on disk."""

    layers: Any
    """The layer table where the leaf is stacked by layer and the table pads or reorders; else None."""
    sizes: tuple[tuple[int, int], ...]
    """(dim, size without padding) of dims that are padded on devices."""

    @property
    def differs(self) -> bool:
        """Whether there is anything to convert."""
        return self.layers is not None or bool(self.sizes)

    def to_disk(self, x: Array) -> Array:
        """The leaf without padding."""
        if self.layers is not None:
            x = to_disk_layout(x, self.layers)
        for dim, size in self.sizes:
            x = jax.lax.slice_in_dim(x, 0, size, axis=dim)
        return x

    def to_device(self, x: Array, shape: tuple[int, ...]) -> Array:
        """The leaf padded with zeros to `shape`."""
        if self.layers is not None:
            x = to_device_layout(x, self.layers)
        return jnp.pad(x, [(0, to - have) for have, to in zip(x.shape, shape, strict=True)])


def disk_forms(model: Model, optimizer: Optimizer, layout: Layout) -> TrainState:
    """The form of each leaf of the state."""

    def form(table: Any, dims: tuple[str, ...], leaf: jax.ShapeDtypeStruct) -> Form:
        sizes = [(place, model.sizes[dim]) for place, dim in enumerate(dims) if dim in model.sizes]
        padded = tuple((place, size) for place, size in sizes if leaf.shape[place] != size)
        return Form(table, padded)

    def forms(dims: PyTree, shapes: PyTree, table: Any = None) -> PyTree:
        return jax.tree.map(functools.partial(form, table), dims, shapes, is_leaf=lambda value: isinstance(value, tuple))

    same, shapes = Form(None, ()), layout.shapes.params
    dims, stacked = by_kind(model, model.dims[BLOCKS]), by_kind(model, shapes[BLOCKS])
    blocks = {kind: forms(dims[kind], stacked[kind], None if is_in_order(table) else table) for kind, table in layout.tables.items()}
    params = forms(shared_of(model.dims), shared_of(shapes)) | {BLOCKS: from_kinds(model, blocks)}
    moments = optax.tree_map_params(
        optimizer.transform, lambda _, form: form, layout.shapes.optimizer, params, transform_non_params=lambda _: same
    )
    others = jax.tree.map(lambda _: same, (layout.shapes.feedback, layout.shapes.scaling))
    return TrainState(same, params, moments, *others)


def to_disk(state: PyTree, forms: PyTree) -> PyTree:
    """`state`, or a part of it, as it is written; leaves that do not differ are the same arrays."""
    return jax.tree.map(lambda form, x: jax.jit(form.to_disk)(x) if form.differs else x, forms, state)


def to_device(state: PyTree, forms: PyTree, like: PyTree) -> PyTree:
    """What was read, as `like` (shapes, types, shardings) says."""

    def convert(form: Form, x: Array, leaf: jax.ShapeDtypeStruct) -> Array:
        if not form.differs:
            return x.astype(leaf.dtype)
        return jax.jit(lambda x: form.to_device(x, leaf.shape).astype(leaf.dtype), out_shardings=leaf.sharding)(x)

    return jax.tree.map(convert, forms, state, like)


def abstract_disk_state(layout: Layout, forms: TrainState) -> TrainState:
    """Shapes, types and shardings in which orbax reads the state: a dim whose size no longer divides is not shared."""

    def abstract(form: Form, leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        if not form.differs:
            return leaf
        shape = jax.eval_shape(form.to_disk, leaf).shape
        assert isinstance(leaf.sharding, NamedSharding)
        spec = [axes if shape[dim] == leaf.shape[dim] else None for dim, axes in enumerate(leaf.sharding.spec)]
        return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=NamedSharding(layout.mesh, PartitionSpec(*spec)))

    return jax.tree.map(abstract, forms, abstract_state(layout))


__all__ = ["Form", "abstract_disk_state", "disk_forms", "to_device", "to_disk"]
