"""Blocks of several kinds in one pipeline equal one device: an encoder-decoder, and two kinds whose weight gradients wait."""

import runpy
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding

from giantjax.errors import InputError
from giantjax.parallel.communication import ONE_DEVICE, Communication
from giantjax.parallel.product import product
from giantjax.parallel.pullback import Pullback
from giantjax.parallel.stages import Model
from giantjax.training.optimizer import Optimizer
from giantjax.training.profile import MICROBATCHES, measured_weights
from giantjax.training.state import abstract_state, layout_of
from giantjax.training.step import BATCH_SPEC, build_train_step
from tests.parallel.measured import assert_equal, measure
from tests.test_equivalence import Case, mesh_of

SCRIPT = runpy.run_path(str(Path(__file__).parents[2] / "docs" / "encoder_decoder.py"))
ORDER = ("encoder",) * 3 + ("decoder",) * 4
WIDTH, INNER, LENGTH = 8, 24, 4


# ---- the encoder-decoder of the docs ----


@lru_cache
def run(case: Case) -> Any:
    comm = Communication("tensor") if case.tensor > 1 else ONE_DEVICE
    return measure(SCRIPT["encoder_decoder"](comm, ORDER), case, SCRIPT["batch_of"](0, size=16))


@pytest.mark.parametrize(
    "case",
    [
        Case(pipe=2, data=2, tensor=2, microbatches=4),
        Case(pipe=4, data=2, microbatches=4, partition="manual:2,1,1,3", zero=1, recompute="full:2"),
        Case(pipe=4, tensor=2, microbatches=4, partition="type:decoder", skips_head=True),
        Case(pipe=2, tensor=2, microbatches=4, schedule="interleaved", chunks=2),
        Case(pipe=2, data=4, microbatches=2, schedule="interleaved", chunks=2, partition="manual:1,3,2,1", recompute="full"),
        Case(pipe=2, replica=2, data=2, microbatches=2, partition="parameters", zero=3),
    ],
    ids=str,
)
def test_equals_one_device(case: Case) -> None:
    assert_equal(run(case), run(Case()))


def test_the_documented_script_learns_to_write_backwards() -> None:
    measured = SCRIPT["main"]()
    assert measured[0][1] < 0.2
    assert measured[-1][0] < 0.1
    assert measured[-1][1] > 0.98


# ---- weight gradients that wait, and what slots keep ----


def two_kinds() -> Model:
    """Products with a copy of their weights, of two shapes."""

    def init(key: Any) -> Any:
        keys = jax.random.split(key, 4)
        draw = lambda key, *shape: 0.3 * jax.random.normal(key, shape)  # noqa: E731
        blocks = {
            "wide": {"up": draw(keys[0], 3, WIDTH, INNER), "down": draw(keys[1], 3, INNER, WIDTH)},
            "gated": {"gate": draw(keys[2], 2, WIDTH, WIDTH)},
        }
        return {"scale": jnp.ones(WIDTH), "out": draw(keys[3], WIDTH), "blocks": blocks}

    def wide(shared: Any, params: Any, x: Any, layer: Any, batch: Any, step: Any) -> Any:
        return x + product(jnp.tanh(product(x * shared["scale"], params["up"])), params["down"])

    def gated(shared: Any, params: Any, x: Any, layer: Any, batch: Any, step: Any) -> Any:
        return x * jax.nn.sigmoid(product(x, params["gate"]) + layer)

    def loss(shared: Any, x: Any, batch: Any, step: Any) -> Any:
        return jnp.sum(jnp.square(x @ shared["out"] - batch["y"])), {}

    blocks = {
        "wide": {"up": ("layers", "hidden", "inner"), "down": ("layers", "inner", "hidden")},
        "gated": {"gate": ("layers", "hidden", None)},
    }
    dims = {"scale": ("hidden",), "out": ("hidden",), "blocks": blocks}
    matrices = {"scale": False, "out": False, "blocks": jax.tree.map(lambda _: True, blocks, is_leaf=lambda x: isinstance(x, tuple))}
    order = ("wide", "gated", "wide", "gated", "wide")
    return Model(
        init,
        dims,
        matrices,
        lambda shared, batch, step: batch["x"],
        {"wide": wide, "gated": gated},
        loss,
        weight=lambda batch: jnp.float32(batch["y"].size),
        order=order,
        casts=matrices,
        dtype=jnp.float32,
    )


@lru_cache
def run_two_kinds(case: Case) -> Any:
    random = np.random.default_rng(0)
    batch = {"x": random.standard_normal((16, LENGTH, WIDTH), np.float32), "y": random.standard_normal((16, LENGTH), np.float32)}
    return measure(two_kinds(), case, batch)


@pytest.mark.parametrize(
    "case",
    [
        Case(pipe=2, data=2, microbatches=4, schedule="zero-bubble", partition="manual:2,3"),
        Case(pipe=3, data=2, microbatches=4, schedule="zero-bubble", skips_head=True, zero=2, recompute="full"),
    ],
    ids=str,
)
def test_weight_gradients_of_several_kinds_wait(case: Case) -> None:
    assert_equal(run_two_kinds(case), run_two_kinds(Case()))


def test_no_slot_keeps_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where stages choose between kinds neither."""
    kept, made = [], Pullback.__init__

    def watched(self: Pullback, *arguments: Any, **choices: Any) -> None:
        made(self, *arguments, **choices)
        kept.append([leaf.shape for leaf in self.leaves])

    monkeypatch.setattr(Pullback, "__init__", watched)
    for partition in ("manual:2,3", "manual:3,2"):
        model, optimizer = two_kinds(), Optimizer(optax.sgd(0.1), optax.constant_schedule(0.1), None)
        layout = layout_of(model, optimizer, mesh_of(2, 1, 1, 1), partition=partition)
        batch = {"x": jnp.zeros((6, LENGTH, WIDTH)), "y": jnp.zeros((6, LENGTH))}
        step = build_train_step(model, optimizer, layout, num_microbatches=2, skips_head=True)
        jax.eval_shape(step, abstract_state(layout), batch)
    assert len(kept) == 2
    weights = {(WIDTH, INNER), (INNER, WIDTH), (WIDTH, WIDTH)}
    assert not [shape for shapes in kept for shape in shapes if shape[-2:] in weights]


def test_each_kind_is_measured_by_itself() -> None:
    mesh = mesh_of(2, 1, 1, 2)
    batch = jax.device_put(SCRIPT["batch_of"](0, 2 * MICROBATCHES), NamedSharding(mesh, BATCH_SPEC))
    found = measured_weights(SCRIPT["encoder_decoder"](Communication("tensor"), ORDER), mesh, batch, head=True)
    assert found.blocks[:3] == found.blocks[:1] * 3 and found.blocks[3:] == found.blocks[3:4] * 4
    assert min(found.blocks) > 0 and found.blocks[0] != found.blocks[3] and found.last > 0


# ---- what does not fit together ----


@pytest.mark.parametrize("order", [("wide", "gated", "wide", "gated"), ("wide", "gated", "wide", "gated", "deep")])
def test_an_order_that_parameters_do_not_have(order: tuple[str, ...]) -> None:
    model, optimizer = replace(two_kinds(), order=order), Optimizer(optax.sgd(0.1), optax.constant_schedule(0.1), None)
    with pytest.raises(ValueError, match="the order of a model has blocks"):
        layout_of(model, optimizer, mesh_of(1, 1, 1, 1))


def test_a_type_that_no_block_has() -> None:
    model, optimizer = two_kinds(), Optimizer(optax.sgd(0.1), optax.constant_schedule(0.1), None)
    with pytest.raises(InputError, match="its blocks are called wide or gated"):
        layout_of(model, optimizer, mesh_of(2, 1, 1, 1), partition="type:transformer")
