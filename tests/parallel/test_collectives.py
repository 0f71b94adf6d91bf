"""Collectives over two levels: each equals its flat twin."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from giantjax import overlap
from giantjax.hlo import parse
from giantjax.parallel import collectives
from giantjax.parallel.collectives import (
    BLOCK,
    LEVELS,
    Errors,
    all_gather,
    all_reduce,
    all_to_all,
    compressed_sum,
    padded_size,
    reduce_scatter,
)
from giantjax.traffic import traffic

SHAPES = [(2, 4), (4, 2), (8, 1), (1, 8)]
BOTH = ("across", "inside")
ROWS, SAME = PartitionSpec(BOTH), PartitionSpec()


def mesh_of(nodes: int, devices: int) -> Mesh:
    return Mesh(np.array(jax.devices()).reshape(nodes, devices), BOTH)


def on_devices(function: Callable[..., Any], mesh: Mesh, *arrays: np.ndarray, out: PartitionSpec = ROWS) -> Any:
    """`function` of each device's row of `arrays`."""
    body = lambda *rows: function(*(row[0] for row in rows))  # noqa: E731
    return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=PartitionSpec(mesh.axis_names), out_specs=out))(*arrays)


@pytest.mark.parametrize(("nodes", "devices"), SHAPES)
@pytest.mark.parametrize("shape", [(16, 3), (5,), (1,), (7, 9)])
def test_all_reduce(nodes: int, devices: int, shape: tuple[int, ...]) -> None:
    rows = np.random.default_rng(0).standard_normal((8, *shape), np.float32)
    found = on_devices(lambda x: all_reduce(x, "inside", "across"), mesh_of(nodes, devices), rows, out=SAME)
    np.testing.assert_allclose(found, rows.sum(0), atol=1e-5)


@pytest.mark.parametrize(("nodes", "devices"), SHAPES)
@pytest.mark.parametrize(
    ("ours", "flat"),
    [
        (reduce_scatter, lambda x: lax.psum_scatter(x, BOTH, scatter_dimension=0, tiled=True)),
        (all_to_all, lambda x: lax.all_to_all(x, BOTH, split_axis=0, concat_axis=0, tiled=True)),
    ],
)
def test_scatter_and_all_to_all(nodes: int, devices: int, ours: Any, flat: Any) -> None:
    rows = np.random.default_rng(1).standard_normal((8, 24, 3), np.float32)
    mesh = mesh_of(nodes, devices)
    found = on_devices(lambda x: ours(x, "inside", "across"), mesh, rows)
    np.testing.assert_allclose(found, on_devices(flat, mesh, rows), atol=1e-5)


@pytest.mark.parametrize(("nodes", "devices"), SHAPES)
def test_all_gather(nodes: int, devices: int) -> None:
    rows = np.random.default_rng(2).standard_normal((8, 5, 3), np.float32)
    found = on_devices(lambda x: all_gather(x, "inside", "across"), mesh_of(nodes, devices), rows, out=SAME)
    np.testing.assert_array_equal(found, rows.reshape(40, 3))


def test_a_dim_that_the_devices_do_not_divide_is_refused() -> None:
    for function in (reduce_scatter, all_to_all):
        with pytest.raises(ValueError, match="10 entries, which 2 nodes x 4 devices do not divide"):
            on_devices(lambda x, f=function: f(x, "inside", "across"), mesh_of(2, 4), np.zeros((8, 10), np.float32))


def summed(rows: np.ndarray, compression: Any, feedback: bool) -> np.ndarray:
    """The sums of rows [nodes, steps, n], step after step, each step's errors handed to the next or not at all: [steps, n]."""
    nodes = len(rows)

    def steps(own: Any) -> Any:
        first = Errors(own[0] * 0, lax.slice_in_dim(own[0], 0, own[0].size // nodes) * 0)

        def one(errors: Errors, x: Any) -> Any:
            total, left = compressed_sum(x, "across", compression, errors if feedback else None)
            return (left if feedback else errors), total

        return lax.scan(one, first, own)[1]

    mesh = Mesh(np.array(jax.devices()[:nodes]), ("across",))
    return np.asarray(on_devices(steps, mesh, rows, out=SAME))


ROUNDED = pytest.mark.parametrize(("compression", "unit"), [("bf16", 2**-8), ("int8", 0.5 / LEVELS)])
"""What rounding takes off a value at the most, relative to the largest of its block."""


@pytest.mark.parametrize("nodes", [2, 4])
@ROUNDED
def test_compressed_sum_is_close(nodes: int, compression: Any, unit: float) -> None:
    size = padded_size(1000, 1, nodes)
    assert size % (nodes * BLOCK) == 0 and size >= 1000
    rows = np.random.default_rng(3).standard_normal((nodes, 1, size), np.float32)
    error = np.abs(summed(rows, compression, feedback=True) - rows.sum(0))
    assert 0 < error.max() <= 2 * unit * nodes * np.abs(rows).max()


@ROUNDED
def test_errors_add_up_unless_they_are_fed_back(compression: Any, unit: float) -> None:
    """Along gradients that hardly change: with feedback all sums together stay one step's rounding off, without they drift away."""
    nodes, num_steps = 2, 120
    random = np.random.default_rng(4)
    gradients = random.standard_normal((nodes, 1, 4 * BLOCK)) * np.repeat(10.0 ** np.arange(4), BLOCK)
    rows = (gradients * (1 + 1e-4 * random.standard_normal((nodes, num_steps, 4 * BLOCK)))).astype(np.float32)
    exact = rows.sum(0, dtype=np.float64)
    fed, forgotten = (np.cumsum(summed(rows, compression, feedback) - exact, axis=0) for feedback in (True, False))
    # Two roundings, of summands and of sums, which are a little larger by what was left over.
    largest = np.abs(rows).max(1).reshape(nodes, 4, BLOCK).max(2).sum(0).repeat(BLOCK)
    assert (np.abs(fed) <= 2 * unit * 1.01 * largest).all()
    drift = np.linalg.norm(forgotten / largest, axis=1)
    for steps in (30, 60, 120):
        assert drift[steps - 1] == pytest.approx(steps * drift[0], rel=0.1)
    assert drift[-1] > 20 * np.linalg.norm(fed / largest, axis=1).max()


def test_zeros_and_large_values_pass() -> None:
    rows = np.zeros((2, 1, 2 * BLOCK), np.float32)
    rows[:, :, 3] = 3e30
    found = summed(rows, "int8", feedback=True)[0]
    assert np.isfinite(found).all() and found[3] == pytest.approx(6e30, rel=1e-2) and not found[BLOCK:].any()


NUM_VALUES = 960


@pytest.mark.parametrize(("nodes", "devices"), [(2, 4), (4, 2)])
@pytest.mark.parametrize(
    ("name", "inside", "across"),
    [
        ("all_reduce", lambda i, a: 2 * (i - 1) / i, lambda i, a: 2 / i * (a - 1) / a),
        ("reduce_scatter", lambda i, a: (i - 1) / i, lambda i, a: (a - 1) / a / i),
        ("all_gather", lambda i, a: (i - 1) / i, lambda i, a: (a - 1) / a / i),
        ("all_to_all", lambda i, a: (i - 1) / i, lambda i, a: (a - 1) / a),
    ],
)
def test_bytes_over_each_level(nodes: int, devices: int, name: str, inside: Any, across: Any) -> None:
    """What the compiled program sends, device by device, is what the table of the module says."""
    ours = getattr(collectives, name)
    size = NUM_VALUES // 8 if name == "all_gather" else NUM_VALUES
    body = lambda x: ours(x[0], "inside", "across")  # noqa: E731
    out = SAME if name in ("all_reduce", "all_gather") else ROWS
    step = jax.jit(jax.shard_map(body, mesh=mesh_of(nodes, devices), in_specs=ROWS, out_specs=out))
    compiled = step.lower(jax.ShapeDtypeStruct((8, size), jnp.float32)).compile()
    found = overlap.collectives(parse(compiled.as_text() or ""))
    sent = traffic(found, [place // devices for place in range(8)])
    np.testing.assert_allclose(sent.inside.sum() / 8, 4 * NUM_VALUES * inside(devices, nodes), rtol=1e-6)
    np.testing.assert_allclose(sent.across.sum() / 8, 4 * NUM_VALUES * across(devices, nodes), rtol=1e-6)


def test_compressed_bytes() -> None:
    """int8 and its scales, never fp32 values, cross between nodes."""
    mesh = Mesh(np.array(jax.devices()[:2]), ("across",))
    body = lambda x: compressed_sum(x[0], "across", "int8", None)[0]  # noqa: E731
    step = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=PartitionSpec("across"), out_specs=SAME))
    text = step.lower(jax.ShapeDtypeStruct((2, 64 * BLOCK), jnp.float32)).as_text()
    moved = [line for line in text.splitlines() if "all_to_all" in line or "all_gather" in line]
    assert len(moved) == 4 and sum("i8" in line for line in moved) == 2
