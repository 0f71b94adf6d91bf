"""What a train step turns into its successor, and how it lies on the mesh."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Int, PyTree

from giantjax.config import LossScaleConfig
from giantjax.errors import TrainingFault
from giantjax.parallel.collectives import Compression
from giantjax.parallel.gradients import Reduction, plan_reduction
from giantjax.parallel.sharding import partition_specs, shardings
from giantjax.parallel.spans import kind_tables, part_sizes
from giantjax.parallel.stages import BLOCKS, Model, Params, by_kind, deal, from_kinds, order_of, to_device_layout
from giantjax.parallel.zero import Zero
from giantjax.training.loss_scale import initial_scale
from giantjax.training.optimizer import Optimizer

PARTS = 4
"""Parts that a chunk's layers are cut into where gradients cross between nodes: the sums of the first begin while those of the
last are still computed. Each part is a loop of its own in the program."""


class TrainState(NamedTuple):
    """Parameters, optimizer state and the number of steps taken."""

    step: PyTree
    """int32 scalar."""
    params: PyTree
    """fp32, as the model made them."""
    optimizer: PyTree
    """Of optax."""
    feedback: PyTree = ()
    """What compression took off the last gradients, a row a device; nothing where none is compressed."""
    scaling: PyTree = ()
    """The `LossScale`; nothing where the loss is not scaled."""


@dataclass(frozen=True, eq=False)
class Layout:
    """Where the state of a model lies on a mesh; made by `layout_of`."""

    mesh: Mesh
    layers: Int[np.ndarray, "S L"]
    """Layers of each stage, chunk after chunk."""
    tables: dict[str, Int[np.ndarray, "S K"]]
    """Of each kind of block which ones each stage holds, chunk after chunk; of one kind the same."""
    num_chunks: int
    """Model chunks on each stage."""
    num_parts: int
    """Parts of each chunk whose gradients are summed over devices one by one."""
    params: Params
    """PartitionSpec of each parameter."""
    zero_stage: int
    """0 where the data axis has nobody to share with."""
    zero_dims: Params
    """For each parameter the dim that ZeRO shares over the data axis, or -1."""
    reduction: Reduction
    """How gradients are summed."""
    state: TrainState
    """PartitionSpec of each leaf of the state."""
    shapes: TrainState
    """Shape and type of each leaf of the state, on the devices."""
    loss_scale: LossScaleConfig | None
    """How the loss is scaled; None where it is not."""

    @property
    def shardings(self) -> TrainState:
        """Of each leaf of the state."""
        return shardings(self.mesh, self.state)

    @property
    def zero(self) -> Zero | None:
        """What devices share while the model runs; None below ZeRO 2."""
        if self.zero_stage < 2:
            return None
        dims = jax.tree.map(lambda dim, leaf: dim - leaf.ndim if dim >= 0 else 0, self.zero_dims, self.shapes.params)
        return Zero(3 if self.zero_stage == 3 else 2, dims)


def layout_of(
    model: Model,
    optimizer: Optimizer,
    mesh: Mesh,
    zero_stage: int = 0,
    compression: Compression = "none",
    loss_scale: LossScaleConfig | None = None,
    num_chunks: int = 1,
    partition: str = "uniform",
) -> Layout:
    """Parameters lie as the sharding table says; moments as their parameter, and under ZeRO shared over `data` too.

    Under ZeRO 3 parameters are shared over `data` like moments.

    `compression` is of the gradients that cross between nodes, on the mesh axis `replica`. `loss_scale` is for models that compute
    in fp16. `partition` deals the blocks to stages and their chunks, as `giantjax.parallel.partition` says; what `profile` measured
    comes as `manual`.
    """
    table = deal(model, partition, mesh.shape["pipe"], num_chunks)
    # A single stage has its chunks one after the other, which is one.
    num_chunks = num_chunks if len(table) > 1 else 1
    order = order_of(model)
    tables = kind_tables(order, table, num_chunks)
    shapes = jax.eval_shape(lambda: _new_state(model, optimizer, tables, jax.random.key(0)))
    params = partition_specs(model.dims)
    zero_stage = zero_stage if mesh.shape["data"] > 1 else 0
    zero_dims = jax.tree.map(
        lambda leaf, spec, dims: _zero_dim(leaf.shape, spec, [dim in model.sizes for dim in dims], mesh) if zero_stage else -1,
        shapes.params,
        params,
        model.dims,
    )
    moment_specs = jax.tree.map(_shared_over_data, params, zero_dims, is_leaf=_is_spec)
    params = moment_specs if zero_stage == 3 else params
    moments = optax.tree_map_params(
        optimizer.transform, lambda _, spec: spec, shapes.optimizer, moment_specs, transform_non_params=lambda _: PartitionSpec()
    )
    num_parts = min(PARTS, table.shape[1] // num_chunks) if mesh.shape["replica"] > 1 else 1
    sizes, room = part_sizes(order, table, num_chunks, num_parts), num_chunks * len(table)

    def in_parts(tree: Params, change: Callable[[PyTree, int], PyTree] = lambda tree, _: tree) -> Params:
        blocks = by_kind(model, tree[BLOCKS])
        return tree | {BLOCKS: [{kind: change(blocks[kind], size * room) for kind, size in part.items()} for part in sizes]}

    stacked = in_parts(shapes.params, lambda tree, size: jax.tree.map(lambda x: jax.ShapeDtypeStruct((size, *x.shape[1:]), x.dtype), tree))
    reduction = plan_reduction(stacked, in_parts(params), in_parts(zero_dims), dict(mesh.shape), compression, zero_stage >= 2)
    errors = reduction.errors()
    scaling = jax.eval_shape(lambda: initial_scale(loss_scale)) if loss_scale else ()
    same = jax.tree.map(lambda _: PartitionSpec(), scaling)
    specs = TrainState(PartitionSpec(), params, moments, reduction.errors_specs(), same)
    shapes = shapes._replace(feedback=errors, scaling=scaling)
    return Layout(mesh, table, tables, num_chunks, num_parts, params, zero_stage, zero_dims, reduction, specs, shapes, loss_scale)


def _is_spec(value: object) -> bool:
    return isinstance(value, PartitionSpec)


def _zero_dim(shape: tuple[int, ...], spec: PartitionSpec, padded: Sequence[bool], mesh: Mesh) -> int:
    """The dim that `data` divides, beside `tensor` or alone; -1 where there is none.

    The first, so that a share lies in one piece, and nothing is transposed for the sake of a collective; but none that is padded, for
    on disk it need not divide.
    """
    ways = {None: mesh.shape["data"], "tensor": mesh.shape["data"] * mesh.shape["tensor"]}
    axes = [*spec, *[None] * (len(shape) - len(spec))]
    possible = [axis in ways and size % ways[axis] == 0 for axis, size in zip(axes, shape, strict=True)]
    return next((dim for dim, fits in enumerate(possible) if fits and not padded[dim]), -1)


def _shared_over_data(spec: PartitionSpec, dim: int) -> PartitionSpec:
    if dim < 0:
        return spec
    axes = [*spec, *[None] * (dim + 1 - len(spec))]
    axes[dim] = (axes[dim], "data") if axes[dim] else "data"
    return PartitionSpec(*axes)


def _new_state(model: Model, optimizer: Optimizer, tables: dict[str, Int[np.ndarray, "S K"]], key: Array) -> TrainState:
    params = model.init(key)
    blocks = {kind: to_device_layout(stacked, tables[kind]) for kind, stacked in by_kind(model, params[BLOCKS]).items()}
    params = params | {BLOCKS: from_kinds(model, blocks)}
    return TrainState(jnp.int32(0), params, optimizer.transform.init(params))


def init_state(model: Model, optimizer: Optimizer, layout: Layout, seed: int) -> TrainState:
    """The state before the first step, made on the devices that hold it: the same numbers on any mesh."""

    def make(key: Array) -> TrainState:
        return _new_state(model, optimizer, layout.tables, key)._replace(feedback=_zeros(layout), scaling=_first_scale(layout))

    return jax.jit(make, out_shardings=layout.shardings)(jax.random.key(seed))


def without_errors(layout: Layout) -> PyTree:
    """The `feedback` of a state that has yet to round a gradient."""
    return jax.jit(lambda: _zeros(layout), out_shardings=layout.shardings.feedback)()


def first_scale(layout: Layout) -> PyTree:
    """The `scaling` of a state before the first step."""
    return jax.jit(lambda: _first_scale(layout), out_shardings=layout.shardings.scaling)()


def _first_scale(layout: Layout) -> PyTree:
    return initial_scale(layout.loss_scale) if layout.loss_scale else ()


def _zeros(layout: Layout) -> PyTree:
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), layout.shapes.feedback)


def abstract_state(layout: Layout) -> TrainState:
    """Shapes, types and shardings of the state."""
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), layout.shapes, layout.shardings
    )


def check_finite(state: TrainState, step: int) -> None:
    """Make sure that the state after `step` holds neither NaN nor infinity, so that no checkpoint ever does.

    Raises:
        TrainingFault: a leaf does; the sentence names it.
    """
    finite = jax.device_get(_finite(state))
    bad = [jax.tree_util.keystr(path) for path, whole in jax.tree_util.tree_leaves_with_path(finite) if not whole]
    if bad:
        raise TrainingFault(
            f"after step {step} arrays of the state are not finite ({len(bad)} of them, {bad[0]} the first), so it is not saved; "
            "a lower optimizer.learning_rate or a longer optimizer.warmup is the usual remedy"
        )


@jax.jit
def _finite(state: TrainState) -> PyTree:
    return jax.tree.map(lambda leaf: jnp.isfinite(leaf).all(), state)
