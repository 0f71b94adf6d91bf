"""How likely a model finds texts, row by row of a batch, on any mesh."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jaxtyping import Array, Float

from giantjax.data.loader import Batch
from giantjax.model.loss import cross_entropy, is_likeliest
from giantjax.parallel.communication import Communication
from giantjax.parallel.mesh import AXES, BATCH_AXES
from giantjax.parallel.pipeline import run_schedule
from giantjax.parallel.schedule import forward_only
from giantjax.parallel.stages import Params
from giantjax.parallel.varying import varying, varying_axes
from giantjax.training.restore import Trained
from giantjax.training.step import BATCH_SPEC


class Scorer(NamedTuple):
    """A model that says how likely texts are; made by `build_scorer`."""

    trained: Trained
    batch_size: int
    """Rows of a batch."""
    score: Callable[[Params, dict[str, Array]], tuple[Array, Array]]
    """parameters, batch -> of each row the sum of losses over its unmasked positions, and at how many of them no token is likelier than
    the target."""


def build_scorer(trained: Trained, batch_size: int) -> Scorer:
    """The scorer of a model from `load_trained`; `batch_size` is rounded up to what its mesh divides.

    On a pipeline each device's rows are as many microbatches as there are stages, if they divide.
    """
    layout, sizes = trained.layout, trained.config.model
    ways = math.prod(layout.mesh.shape[axis] for axis in BATCH_AXES)
    rows = -(-batch_size // ways)
    num_microbatches = math.gcd(rows, len(layout.layers))
    table = forward_only(len(layout.layers), num_microbatches, layout.num_chunks)
    comm = Communication("tensor" if layout.mesh.shape["tensor"] > 1 else None)

    def loss(shared: Params, x: Array, batch: dict[str, Array], step: Array | None) -> tuple[Array, dict[str, Array]]:
        logits, counted = trained.model.logits(shared, x), batch["loss_mask"] > 0
        losses = cross_entropy(logits, batch["targets"], sizes.vocabulary_size, comm)
        likeliest = is_likeliest(logits, batch["targets"], sizes.vocabulary_size, comm)
        of_rows = (jnp.sum(jnp.where(counted, losses, 0), axis=1), jnp.sum(counted & likeliest, axis=1).astype(jnp.float32))
        # Microbatches are added up, so each leaves zeros in the places of the others' rows.
        found = [jnp.zeros(rows, jnp.float32).at[batch["row"]].set(values) for values in of_rows]
        return jnp.float32(0), {"losses": found[0], "hits": found[1]}

    model = dataclasses.replace(trained.model, loss=loss)

    def local(params: Params, batch: dict[str, Array]) -> tuple[Array, Array]:
        batch = batch | {"row": jnp.arange(rows)}
        batches = jax.tree.map(lambda a: a.reshape(num_microbatches, -1, *a.shape[1:]), batch)
        metrics = run_schedule(model, table, layout.layers, "none", varying(params), batches, None, jnp.float32(1)).metrics
        apart = lambda x: tuple(axis for axis in AXES if axis in varying_axes(x) and axis not in BATCH_AXES)  # noqa: E731
        whole = {name: lax.psum(x, apart(x)) for name, x in metrics.items()}
        return whole["losses"], whole["hits"]

    specs = (layout.params, BATCH_SPEC)
    score = jax.jit(jax.shard_map(local, mesh=layout.mesh, in_specs=specs, out_specs=BATCH_SPEC))
    return Scorer(trained, rows * ways, score)


def scores(scorer: Scorer, batches: Iterable[Batch], advance: Callable[[int], None]) -> Float[np.ndarray, "N 2"]:
    """(sum of losses, hits) of each row of all batches, in order; `advance` is told how many positions of each batch are done."""
    placement = NamedSharding(scorer.trained.layout.mesh, BATCH_SPEC)
    found: list[np.ndarray] = []
    running = None
    for batch in itertools.chain(batches, [None]):
        # Read one batch late: the device never waits, and no more than two hold memory.
        done, running = running, batch and (scorer.score(scorer.trained.params, jax.device_put(batch, placement)), batch)
        if done:
            found.append(np.stack(jax.device_get(done[0]), axis=1).astype(np.float64))
            advance(int(done[1]["loss_mask"].sum()))
    return np.concatenate(found)
