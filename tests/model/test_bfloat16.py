"""Computing in bf16: what stays fp32."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import pytest

from giantjax.model.gpt import Params, gpt
from tests.helpers import logits_of, loss_and_grads, loss_of, random_batch, random_params, relative_error, small_model

CONFIG = small_model(head="untied")
MODEL, NARROW = gpt(CONFIG), gpt(CONFIG, jnp.bfloat16)
BATCH = random_batch(CONFIG, 8)


@pytest.fixture(scope="module")
def params() -> Params:
    return random_params(MODEL)


@pytest.fixture(scope="module")
def narrow(params):
    return loss_and_grads(NARROW)(params, BATCH)


def test_parameters_logits_loss_and_gradients_are_fp32(params):
    assert {leaf.dtype for leaf in jax.tree.leaves(jax.eval_shape(NARROW.init, jax.random.key(0)))} == {jnp.dtype("float32")}
    assert jax.eval_shape(lambda: NARROW.embed(params, BATCH, None)).dtype == jnp.bfloat16
    assert jax.eval_shape(lambda: logits_of(NARROW, params, BATCH)).dtype == jnp.float32
    found = jax.eval_shape(jax.value_and_grad(lambda params: loss_of(NARROW, params, BATCH)), params)
    assert {leaf.dtype for leaf in jax.tree.leaves(found)} == {jnp.dtype("float32")}


def test_loss_is_close_to_that_of_fp32(params, narrow):
    wide = loss_and_grads(MODEL)(params, BATCH)
    assert 0 < relative_error(narrow[0], wide[0]) < 2e-3
    # Every gradient is that of fp32 to a few units of bf16's 2^-8.
    assert relative_error(narrow[1], wide[1]) < 10 * 2**-8


def share_of_bf16_values(array: jax.Array) -> float:
    return float(np.mean(array == array.astype(jnp.bfloat16).astype(jnp.float32)))


def test_gradients_of_kernels_are_not_rounded_to_bf16(narrow):
    """By chance one fp32 value in 65,536 is a bf16 value too."""
    grads, blocks = narrow[1], narrow[1]["blocks"]
    kernels = [blocks["attention"][name]["kernel"] for name in ("qkv", "output")]
    kernels += [blocks["feedforward"][name]["kernel"] for name in ("up", "down")]
    assert max(map(share_of_bf16_values, kernels)) < 0.01
    assert share_of_bf16_values(grads["head"]["output"][: CONFIG.vocabulary_size]) < 0.01


def test_gradient_of_the_tied_embedding_is_not_rounded_to_bf16(params):
    model = gpt(replace(CONFIG, head="tied"), jnp.bfloat16)
    tied = params | {"head": {"norm": params["head"]["norm"]}}
    grads = loss_and_grads(model)(tied, BATCH)[1]
    assert share_of_bf16_values(grads["embedding"]["token"][: CONFIG.vocabulary_size]) < 0.01


def transcendentals(jaxpr: jax.extend.core.Jaxpr) -> Iterator[tuple[str, jnp.dtype]]:
    for equation in jaxpr.eqns:
        if equation.primitive.name in ("exp", "log", "rsqrt"):
            operand: Any = equation.invars[0].aval
            yield equation.primitive.name, operand.dtype
        for inner in jax.extend.core.jaxprs_in_params(equation.params):
            yield from transcendentals(inner)


def test_softmax_layer_norm_and_loss_are_computed_in_fp32(params):
    traced = jax.make_jaxpr(jax.grad(lambda params: loss_of(NARROW, params, BATCH)))(params)
    found = set(transcendentals(traced.jaxpr))
    assert found == {(name, jnp.dtype("float32")) for name in ("exp", "log", "rsqrt")}
