"""Sums of gradients over two levels: what goes in which bucket, and what rounding between nodes does to training."""

import dataclasses
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from giantjax.parallel.collectives import BLOCK
from giantjax.parallel.gradients import BUCKET_VALUES, plan_reduction
from giantjax.parallel.sharding import partition_specs
from giantjax.training.disk import to_disk
from giantjax.training.state import abstract_state, init_state, without_errors
from giantjax.training.step import build_train_step
from tests.helpers import relative_error
from tests.test_equivalence import Case, batch_of, program

DEGREES = {"pipe": 2, "replica": 2, "data": 2, "tensor": 2}


def plan(compression: Any = "none", degrees: dict[str, int] = DEGREES, zero_dim: int = -1, **sizes: tuple[tuple[str, int], ...]) -> Any:
    """The plan for parameters given by (dim, size) pairs."""
    dims = {name: tuple(dim for dim, _ in pairs) for name, pairs in sizes.items()}
    shapes = {name: jax.ShapeDtypeStruct(tuple(size for _, size in pairs), jnp.float32) for name, pairs in sizes.items()}
    return plan_reduction(shapes, partition_specs(dims), {name: zero_dim for name in sizes}, degrees, compression)


def test_what_is_shared_alike_crosses_together() -> None:
    found = plan(
        norm=(("layers", 4), ("hidden", 6)), kernel=(("layers", 4), ("inner", 8), ("hidden", 6)), table=(("vocabulary", 10), ("hidden", 6))
    )
    # In the order of names: kernel, norm, table.
    assert [bucket.leaves for bucket in found.buckets] == [(0,), (1,), (2,)]
    kernel, norm, table = found.buckets
    assert (kernel.inside, kernel.across) == (("data",), ("replica",))
    assert (norm.inside, norm.across) == (("data", "tensor"), ("replica",))
    assert (table.inside, table.across) == (("data",), ("pipe", "replica"))
    assert norm.size == 2 * 2 * 2 * BLOCK


def test_buckets_are_cut_by_size() -> None:
    half = (("layers", 4), ("hidden", BUCKET_VALUES // 4))
    found = plan(a=half, b=half, c=half, d=(("layers", 2), ("hidden", 2)), e=(("layers", 2), ("hidden", 2 * BUCKET_VALUES)))
    assert [bucket.leaves for bucket in found.buckets] == [(0, 1), (2, 3), (4,)]


def test_one_level_needs_no_bucket() -> None:
    kernel = (("layers", 4), ("hidden", 6))
    assert not plan(degrees=DEGREES | {"data": 1, "tensor": 1}, a=kernel).buckets
    assert not plan(degrees=DEGREES | {"replica": 1}, a=kernel).buckets
    # Compression needs one, but only where something crosses.
    assert plan("int8", DEGREES | {"data": 1, "tensor": 1}, a=kernel).errors()[0].sent.shape == (4, 2 * BLOCK)
    assert not plan("int8", DEGREES | {"replica": 1, "data": 4}, a=kernel).errors()
    # What ZeRO has scattered already is shared once.
    assert plan(zero_dim=1, a=kernel).buckets[0].inside == ("tensor",)


CASES = [
    Case(pipe=2, replica=2, data=2, microbatches=2, dropout=0.0, zero=1),
    Case(replica=4, tensor=2, dropout=0.0, head="untied"),
]


@lru_cache
def trained(case: Case, num_steps: int = 6, feedback: bool = True) -> Any:
    """Losses, first gradients, and the last state."""
    model, optimizer, layout, forms = program(case)
    state = init_state(model, optimizer, layout, 0)
    step = build_train_step(model, optimizer, layout, num_microbatches=case.microbatches)
    losses, gradients = [], None
    for number in range(num_steps):
        state = state if feedback else state._replace(feedback=without_errors(layout))
        state, metrics = step(state, batch_of())
        losses.append(float(metrics.loss))
        if number == 0:
            gradients = jax.device_get(to_disk(state._replace(feedback=()), forms).optimizer["last"])
    return losses, gradients, state


@pytest.mark.parametrize("compression", ["bf16", "int8"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_compressed_gradients_are_close(case: Case, compression: str) -> None:
    losses, gradients, _ = trained(case)
    found, rounded, state = trained(dataclasses.replace(case, compression=compression))
    assert relative_error(rounded, gradients) > 0
    # Clipping scales all gradients alike, so what is rounded is within two levels of the largest of its block.
    largest = jax.tree.map(lambda a, b: float(np.abs(a - b).max() / np.abs(b).max()), rounded, gradients)
    without_key_bias = {path: value for path, value in jax.tree_util.tree_leaves_with_path(largest) if "bias" not in str(path)}
    assert max(without_key_bias.values()) < {"bf16": 2**-7, "int8": 0.1}[compression]
    assert relative_error(found, losses) < {"bf16": 1e-3, "int8": 5e-3}[compression]
    for errors in state.feedback:
        assert float(jnp.abs(errors.sent).max()) > 0 and float(jnp.abs(errors.summed).max()) > 0


def test_the_feedback_is_part_of_the_state() -> None:
    case = dataclasses.replace(CASES[0], compression="int8")
    layout = program(case).layout
    shapes = jax.tree.map(lambda leaf: leaf.shape, abstract_state(layout).feedback)
    assert shapes == jax.tree.map(lambda leaf: leaf.shape, without_errors(layout))
    # Blocks are each stage's own; what stages share they round alike.
    assert {rows.sent.shape[0] for rows in layout.shapes.feedback} == {8, 4}
    assert trained(case, feedback=False)[0][1:] != trained(case)[0][1:]
