"""Recompute policies change what the backward pass keeps and redoes, not what it finds."""

from collections import Counter
from collections.abc import Iterator

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import pytest

from giantjax.model.gpt import gpt
from giantjax.parallel.stages import apply_blocks
from tests.helpers import FORWARD, GRADIENT, cut_whole, loss_and_grads, loss_of, random_batch, random_params, relative_error, small_model

POLICIES = ["none", "selective", "full", "full:2", "full:3"]
# Sizes that differ from each other, so that a shape says what an array is.
LAYERS, SAMPLES, LENGTH, HIDDEN, HEADS, INNER = 5, 3, 7, 16, 2, 40
CONFIG = small_model(
    num_layers=LAYERS,
    hidden_size=HIDDEN,
    num_heads=HEADS,
    sequence_length=LENGTH,
    feedforward_size=INNER,
    attention_dropout=0.2,
    hidden_dropout=0.2,
)
MODEL = gpt(CONFIG)
BATCH = random_batch(CONFIG, SAMPLES)


@pytest.fixture(scope="module")
def key() -> np.int32:
    """The step, which dropout is drawn from."""
    return np.int32(5)


@pytest.fixture(scope="module")
def params():
    return random_params(MODEL)


@pytest.fixture(scope="module")
def plain(params, key):
    """Loss and gradients of a plain scan, which keeps all it has made."""

    def loss(params):
        def one(x, layer_and_block):
            return MODEL.block({}, layer_and_block[1], x, layer_and_block[0], BATCH, key), None

        x, _ = jax.lax.scan(one, MODEL.embed(params, BATCH, key), (jnp.arange(LAYERS), params["blocks"]))
        return MODEL.loss(params, x, BATCH, key)[0]

    return jax.jit(jax.value_and_grad(loss))(params)


@pytest.mark.parametrize("policy", POLICIES)
def test_loss_and_gradients_do_not_depend_on_the_policy(policy, params, key, plain):
    loss, grads = loss_and_grads(MODEL, policy)(params, BATCH, key)
    assert relative_error(loss, plain[0]) <= FORWARD
    assert relative_error(grads, plain[1]) <= GRADIENT


def matrix_products(jaxpr: jax.extend.core.Jaxpr, times: int = 1) -> Iterator[tuple[str, int]]:
    """Every matrix product as ("core" of attention, which has batch dims, or "dense", number of executions)."""
    for equation in jaxpr.eqns:
        repeats = times * (equation.params["length"] if equation.primitive.name == "scan" else 1)
        if equation.primitive.name == "dot_general":
            yield ("core" if equation.params["dimension_numbers"][1][0] else "dense"), repeats
        for inner in jax.extend.core.jaxprs_in_params(equation.params):
            yield from matrix_products(inner, repeats)


@pytest.mark.parametrize(
    ("policy", "dtype", "redone_dense", "redone_core_a_layer"),
    # A layer has four dense products and two in the core, scores and context. The context is kept by name. A layer made
    # again by itself stops before its last product, which nothing in its backward pass needs.
    [
        ("none", "float32", 0, 0),
        ("none", "bfloat16", 0, 0),
        ("selective", "bfloat16", 0, 1),
        ("full", "bfloat16", 3 * LAYERS, 2),
        ("full:2", "bfloat16", 4 * (LAYERS - 1) + 3, 2),  # the last is by itself
        ("full:3", "bfloat16", 4 * LAYERS, 2),
    ],
)
def test_products_redone_in_the_backward_pass(policy, dtype, redone_dense, redone_core_a_layer, params, key):
    model = gpt(CONFIG, jnp.dtype(dtype))
    traced = jax.make_jaxpr(jax.grad(lambda params: loss_of(model, params, BATCH, key, policy)))(params)
    found: Counter[str] = Counter()
    for kind, number in matrix_products(traced.jaxpr):
        found[kind] += number
    head = 3
    # Forward once, backward twice.
    assert found == {"dense": head + LAYERS * 3 * 4 + redone_dense, "core": LAYERS * (3 * 2 + redone_core_a_layer)}


@pytest.mark.parametrize(
    ("policy", "elements_a_token"),
    [
        ("none", LAYERS * (6 * HIDDEN + INNER + HEADS * LENGTH)),
        ("selective", LAYERS * (6 * HIDDEN + INNER)),
        ("full", LAYERS * HIDDEN),
        ("full:2", 3 * HIDDEN),
        ("full:3", 2 * HIDDEN),
    ],
)
def test_what_is_kept_for_the_backward_pass(policy, elements_a_token, params, key):
    """Input, query, key, value, context, residual (6 hidden) and up-projection; `full:K` ceil(layers / K) inputs."""

    def residuals(params):
        x = MODEL.embed(params, BATCH, key)
        spans, layers, blocks = cut_whole(params, policy)
        _, pullback = jax.vjp(lambda blocks, x: apply_blocks(MODEL, {}, spans, layers, blocks, x, BATCH, key, policy), blocks, x)
        return jax.tree.leaves(pullback)

    kept = [leaf for leaf in jax.eval_shape(residuals, params) if SAMPLES in leaf.shape and LENGTH in leaf.shape]
    assert sum(leaf.size for leaf in kept) == SAMPLES * LENGTH * elements_a_token
    assert not any(leaf.dtype == np.bool_ for leaf in kept), "dropout masks are made again, not kept"
