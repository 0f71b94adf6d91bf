"""The executor knows no GPT: another model, with masks passed along and two ties, and a script of one's own."""

import runpy
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from giantjax.parallel.communication import ONE_DEVICE, Communication, column_parallel, own_part, row_parallel
from giantjax.parallel.stages import Model
from tests.parallel.measured import assert_equal, measure
from tests.test_equivalence import Case

LAYERS, LENGTH, WIDTH, HEADS, TOKENS, BATCH = 6, 16, 32, 4, 50, 8


class Stream(NamedTuple):
    """The boundary: activations, the mask of real positions, and how many layers have run."""

    x: Any
    mask: Any
    depth: Any


def masked_model(comm: Communication) -> Model:
    """A bidirectional encoder that predicts tokens at random places.

    Two weights are tied: the table of tokens, looked up on the first stage and multiplied by on the last, and the bias by
    distance, which every layer adds to its scores and the last stage to its logits.
    """

    def init(key: Any) -> Any:
        names = ("table", "bias", "qkv", "output", "gain")
        keys = dict(zip(names, jax.random.split(key, len(names)), strict=True))
        draw = lambda name, *shape: 0.1 * jax.random.normal(keys[name], shape)  # noqa: E731
        blocks = {
            "qkv": draw("qkv", LAYERS, WIDTH, 3, HEADS, WIDTH // HEADS),
            "output": draw("output", LAYERS, HEADS, WIDTH // HEADS, WIDTH),
            "gain": 1 + draw("gain", LAYERS, WIDTH),
        }
        return {"table": draw("table", TOKENS, WIDTH), "distance": {"bias": draw("bias", 2 * LENGTH)}, "blocks": blocks}

    def embed(shared: Any, batch: Any, step: Any) -> Stream:
        own = own_part(comm, LENGTH // (1 if comm.axis is None else jax.lax.axis_size(comm.axis)))
        return Stream(shared["table"][batch["tokens"][:, own]], batch["mask"][:, own], jnp.int32(0))

    def block(shared: Any, params: Any, stream: Stream, layer: Any, batch: Any, step: Any) -> Stream:
        x = stream.x * jax.lax.rsqrt(jnp.mean(stream.x**2, -1, keepdims=True) + 1e-5) * params["gain"]
        qkv = column_parallel(comm, x, lambda x: jnp.einsum("bsh,hcnd->bscnd", x, params["qkv"]))
        seen = comm.gather_sequence(stream.mask)
        distance = jnp.arange(LENGTH)[:, None] - jnp.arange(LENGTH) + LENGTH - 1
        scores = jnp.einsum("bqnd,bknd->bnqk", qkv[:, :, 0], qkv[:, :, 1]) + shared["distance"]["bias"][distance]
        weights = jax.nn.softmax(jnp.where(seen[:, None, None], scores, -1e9))
        context = jnp.einsum("bnqk,bknd->bqnd", weights, qkv[:, :, 2])
        y = row_parallel(comm, context, lambda context: jnp.einsum("bqnd,ndh->bqh", context, params["output"]))
        # The depth is what a model of its own would make its scale of.
        return Stream(stream.x + y / (1 + stream.depth), stream.mask, stream.depth + 1)

    def loss(shared: Any, stream: Stream, batch: Any, step: Any) -> Any:
        own = own_part(comm, stream.x.shape[1])
        logits = stream.x @ shared["table"].T + shared["distance"]["bias"][own][:, None]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"][:, own])
        right = jnp.sum((jnp.argmax(logits, -1) == batch["targets"][:, own]) * stream.mask)
        return jnp.sum(losses * stream.mask), {"accuracy": right.astype(jnp.float32), "depth": stream.depth * jnp.sum(stream.mask)}

    dims = {
        "table": (None, "hidden"),
        "distance": {"bias": (None,)},
        "blocks": {
            "qkv": ("layers", "hidden", "qkv", "heads", "head"),
            "output": ("layers", "heads", "head", "hidden"),
            "gain": ("layers", "hidden"),
        },
    }
    decays = jax.tree.map(lambda _: True, dims, is_leaf=lambda names: isinstance(names, tuple))
    return Model(init, dims, decays, embed, block, loss, weight=lambda batch: jnp.sum(batch["mask"]).astype(jnp.float32))


@lru_cache
def run(case: Case) -> Any:
    model = masked_model(Communication("tensor") if case.tensor > 1 else ONE_DEVICE)
    rng = np.random.default_rng(0)
    batch = {
        "tokens": rng.integers(0, TOKENS, (BATCH, LENGTH), np.int32),
        "targets": rng.integers(0, TOKENS, (BATCH, LENGTH), np.int32),
        "mask": rng.random((BATCH, LENGTH)) < np.linspace(0.2, 1, BATCH)[:, None],
    }
    return measure(model, case, batch)


@pytest.mark.parametrize(
    "case",
    [
        Case(pipe=2, tensor=2, data=2, microbatches=4, zero=3),
        Case(pipe=4, data=2, microbatches=2, schedule="gpipe", zero=1, recompute="full:2"),
        Case(pipe=2, tensor=4, microbatches=8, recompute="full"),
    ],
    ids=str,
)
def test_a_model_with_masks_and_two_ties_equals_one_device(case: Case) -> None:
    found = run(case)
    assert_equal(found, run(Case()))
    assert found[0][0][2]["depth"] == pytest.approx(LAYERS)


def test_the_documented_script_trains() -> None:
    losses = runpy.run_path(str(Path(__file__).parents[2] / "docs" / "own_model.py"))["main"]()
    assert losses[-1] < 0.1 * losses[0]
