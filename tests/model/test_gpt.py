"""The model as a function: what its loss depends on, how it starts, what its options mean."""

import functools
import math
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import erf

from giantjax.config import ModelConfig
from giantjax.model.gpt import gpt
from giantjax.model.layers import FeedForward
from giantjax.model.loss import mask_padding
from giantjax.parallel.communication import ONE_DEVICE
from giantjax.parallel.stages import Model, Params, apply_blocks
from tests.helpers import (
    FORWARD,
    GRADIENT,
    cut_whole,
    last_stream,
    logits_of,
    loss_and_grads,
    loss_of,
    random_batch,
    random_params,
    relative_error,
    small_model,
)

CONFIG = small_model()
MODEL = gpt(CONFIG)
LOSS_AND_GRADS = loss_and_grads(MODEL)


@functools.cache
def initial_params(config: ModelConfig, tensor: int = 1) -> Params:
    return jax.device_get(jax.jit(gpt(config, tensor=tensor).init)(jax.random.key(0)))


@pytest.fixture(scope="module")
def params() -> Params:
    return random_params(MODEL)


@pytest.mark.parametrize("rate", [0.0, 0.3])
def test_loss_at_a_position_has_no_gradient_into_later_positions(params, rate):
    config = replace(CONFIG, attention_dropout=rate, hidden_dropout=rate)
    model, batch, positions = gpt(config), random_batch(config, 3), jnp.arange(config.sequence_length)
    step = jnp.int32(5) if rate else None

    def loss_at(x, position):
        only = jnp.broadcast_to(positions == position, batch["loss_mask"].shape).astype(jnp.float32)
        x = apply_blocks(model, params, *cut_whole(params), x, batch, step, "none")
        return model.loss(params, x, batch | {"loss_mask": only}, step)[0]

    x = model.embed(params, batch, None)
    gradients_TBSH = jax.jit(jax.vmap(jax.grad(loss_at), (None, 0)))(x, positions)
    largest_TS = np.max(np.abs(gradients_TBSH), axis=(1, 3))
    assert np.all(largest_TS[np.triu_indices_from(largest_TS, 1)] == 0)
    assert np.all(largest_TS[np.tril_indices_from(largest_TS)] > 0)


@pytest.mark.parametrize("target", [0, -1, CONFIG.vocabulary_size, 10**6], ids=["real", "negative", "padding", "beyond"])
def test_masked_positions_may_hold_any_target(params, target):
    batch = random_batch(CONFIG, 3)
    batch["loss_mask"] = np.random.default_rng(1).integers(0, 2, batch["loss_mask"].shape).astype(np.float32)
    changed = batch | {"targets": np.where(batch["loss_mask"] == 0, np.int32(target), batch["targets"])}
    assert relative_error(LOSS_AND_GRADS(params, changed), LOSS_AND_GRADS(params, batch)) == 0


def test_fractional_masks_weigh_the_loss(params):
    batch = random_batch(CONFIG, 3)
    first, second = (np.random.default_rng(seed).random(batch["loss_mask"].shape, np.float32) for seed in (1, 2))
    separately = [LOSS_AND_GRADS(params, batch | {"loss_mask": mask})[0] for mask in (first, second)]
    both = LOSS_AND_GRADS(params, batch | {"loss_mask": 0.25 * first + 2 * second})[0]
    assert relative_error(both, 0.25 * separately[0] + 2 * separately[1]) <= FORWARD


def test_padded_batch_rows_add_nothing(params):
    batch = random_batch(CONFIG, 3)
    rows = {name: np.concatenate([array, array[:2]]) for name, array in batch.items()}
    rows["loss_mask"][3:] = 0
    loss, grads = LOSS_AND_GRADS(params, rows)
    expected_loss, expected_grads = LOSS_AND_GRADS(params, batch)
    assert relative_error(loss, expected_loss) <= FORWARD
    assert relative_error(grads, expected_grads) <= GRADIENT


@pytest.mark.parametrize("head", ["tied", "untied"])
def test_padded_vocabulary_equals_the_unpadded_one(head):
    size = CONFIG.vocabulary_size
    padded, bare = gpt(replace(CONFIG, head=head)), gpt(replace(CONFIG, head=head, vocabulary_multiple=1))
    batch, params = random_batch(CONFIG, 3), random_params(padded)

    def cut(tree: Params) -> Params:
        return jax.tree.map(lambda a: a[:size] if a.shape[0] == CONFIG.padded_vocabulary() else a, tree)

    def padding(tree: Params) -> list[jax.Array]:
        return [a[size:] for a in jax.tree.leaves(tree) if a.shape[0] == CONFIG.padded_vocabulary()]

    loss, grads = loss_and_grads(padded)(params, batch)
    expected_loss, expected_grads = loss_and_grads(bare)(cut(params), batch)
    assert relative_error(loss, expected_loss) <= FORWARD
    assert relative_error(cut(grads), expected_grads) <= GRADIENT
    assert len(padding(grads)) == (2 if head == "untied" else 1)
    assert all(np.all(rows == 0) for rows in padding(grads))


def test_padding_never_wins_however_large_its_weights(params):
    size, batch = CONFIG.vocabulary_size, random_batch(CONFIG, 3)
    token = params["embedding"]["token"]
    loud = params | {"embedding": params["embedding"] | {"token": token.at[size:].set(100 * jnp.abs(token[:1]) + 100)}}
    logits = jax.jit(lambda params, batch: logits_of(MODEL, params, batch))(loud, batch)
    assert np.any(np.argmax(logits, -1) >= size), "the padding would win if it were not masked"
    masked = mask_padding(logits, size)
    assert np.all(np.isneginf(masked[..., size:])) and np.array_equal(masked[..., :size], logits[..., :size])
    assert relative_error(LOSS_AND_GRADS(loud, batch)[0], LOSS_AND_GRADS(params, batch)[0]) == 0


def test_blocks_are_stacked_by_layer_and_start_apart():
    init = initial_params(CONFIG)
    leading = {leaf.shape[0] for leaf in jax.tree.leaves(init["blocks"])}
    assert leading == {CONFIG.num_layers}
    kernels = [
        leaf for leaf, decays in zip(jax.tree.leaves(init["blocks"]), jax.tree.leaves(MODEL.decays["blocks"]), strict=True) if decays
    ]
    assert len(kernels) == 4
    assert all(not np.any(kernel[0] == kernel[1]) for kernel in kernels)


def test_stacked_blocks_run_in_layer_order(params):
    batch = random_batch(CONFIG, 3)
    x = MODEL.embed(params, batch, None)
    block = jax.jit(MODEL.block)
    for layer in range(CONFIG.num_layers):
        x = block({}, jax.tree.map(lambda a, layer=layer: a[layer], params["blocks"]), x, layer, batch, None)
    assert relative_error(jax.jit(partial(last_stream, MODEL))(params, batch), x) <= FORWARD


def test_a_layer_starts_the_same_whatever_the_depth():
    few, many = initial_params(CONFIG)["blocks"], initial_params(replace(CONFIG, num_layers=5))["blocks"]
    many = jax.tree.map(lambda a: a[:2], many)
    # Projections into the residual stream are scaled by the depth, and by nothing else.
    for dense in (many["attention"]["output"], many["feedforward"]["down"]):
        dense["kernel"] = dense["kernel"] * math.sqrt(5 / 2)
    assert relative_error(many, few) <= 1e-6


def test_start_does_not_depend_on_vocabulary_padding():
    config, size = replace(CONFIG, head="untied"), CONFIG.vocabulary_size
    one, four = initial_params(config), initial_params(config, tensor=4)
    assert four["embedding"]["token"].shape[0] == 256 and four["head"]["output"].shape[0] == 256
    assert np.array_equal(one["embedding"]["token"][:size], four["embedding"]["token"][:size])
    assert np.array_equal(one["head"]["output"][:size], four["head"]["output"][:size])
    assert relative_error(four["blocks"], one["blocks"]) == 0
    assert not np.any(one["embedding"]["token"][:size] == one["head"]["output"][:size])
    assert not np.any(four["embedding"]["token"][size:])


def test_spread_of_initial_weights():
    config = small_model(num_layers=8, hidden_size=64, sequence_length=128, vocabulary_size=256, head="untied", init_std=0.03)
    params = initial_params(config)
    blocks = params["blocks"]
    straight = [blocks["attention"]["qkv"], blocks["feedforward"]["up"]]
    into_residual = [blocks["attention"]["output"], blocks["feedforward"]["down"]]
    for kernel in [dense["kernel"] for dense in straight] + [*params["embedding"].values(), params["head"]["output"]]:
        assert np.std(kernel) == pytest.approx(0.03, rel=0.05) and abs(np.mean(kernel)) < 0.03 * 0.05
    for dense in into_residual:
        assert np.std(dense["kernel"]) == pytest.approx(0.03 / math.sqrt(2 * 8), rel=0.05)
    assert all(np.all(dense["bias"] == 0) for dense in straight + into_residual)
    for norm in (blocks["attention_norm"], blocks["feedforward_norm"], params["head"]["norm"]):
        assert np.all(norm["scale"] == 1) and np.all(norm["bias"] == 0)


def test_tied_head_is_the_untied_one_with_equal_weights(params):
    untied, batch = gpt(replace(CONFIG, head="untied")), random_batch(CONFIG, 3)
    assert "output" not in params["head"]
    same = params | {"head": params["head"] | {"output": params["embedding"]["token"]}}
    loss, grads = loss_and_grads(untied)(same, batch)
    tied_loss, tied_grads = LOSS_AND_GRADS(params, batch)
    assert relative_error(loss, tied_loss) <= FORWARD
    assert relative_error(grads["embedding"]["token"] + grads["head"]["output"], tied_grads["embedding"]["token"]) <= GRADIENT
    other = same | {"head": same["head"] | {"output": same["head"]["output"][::-1]}}
    assert relative_error(loss_and_grads(untied)(other, batch)[0], loss) > FORWARD


@pytest.mark.parametrize("activation", ["gelu-tanh", "gelu-erf"])
def test_activation_is_the_gelu_it_is_named_after(activation):
    x = np.linspace(-6, 6, 480).reshape(3, 10, 16)
    exactly = 0.5 * x * (1 + erf(x / math.sqrt(2)))
    by_tanh = 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    right, wrong = (by_tanh, exactly) if activation == "gelu-tanh" else (exactly, by_tanh)
    layer = FeedForward(small_model(hidden_size=16, feedforward_size=16, activation=activation), ONE_DEVICE, jax.random.key(0))
    layer.up.kernel[...] = layer.down.kernel[...] = jnp.eye(16)
    y = layer(jnp.asarray(x, jnp.float32))
    assert relative_error(y, right) <= FORWARD
    assert relative_error(y, wrong) > FORWARD


def test_every_dim_of_a_parameter_has_a_name():
    for config in (CONFIG, replace(CONFIG, head="untied")):
        model: Model = gpt(config)
        shapes = jax.eval_shape(model.init, jax.random.key(0))
        jax.tree.map(lambda leaf, dims: pytest.fail(f"{dims} of {leaf.shape}") if len(dims) != leaf.ndim else None, shapes, model.dims)


def test_dropout_changes_the_loss_by_step_and_only_with_a_key(params):
    config: ModelConfig = replace(CONFIG, attention_dropout=0.2, hidden_dropout=0.2)
    model, batch = gpt(config), random_batch(config, 3)
    loss = jax.jit(lambda params, batch, step=None: loss_of(model, params, batch, step))
    dropped = [float(loss(params, batch, np.int32(step))) for step in (0, 0, 1)]
    assert dropped[0] == dropped[1] != dropped[2]
    assert relative_error(loss(params, batch), LOSS_AND_GRADS(params, batch)[0]) <= FORWARD
