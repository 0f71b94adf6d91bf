"""Dropout masks: right on average, functions of where an element stands and of nothing else."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from giantjax.model.dropout import ATTENTION_OUTPUT, ATTENTION_WEIGHTS, EMBEDDING, FEEDFORWARD_OUTPUT, dropout, dropout_key

SITES = [EMBEDDING, ATTENTION_WEIGHTS, ATTENTION_OUTPUT, FEEDFORWARD_OUTPUT]


def kept(shape, rate: float = 0.5, seed: Any = 0, step: Any = 0, samples: Any = (0,), layer: Any = 0, site: Any = EMBEDDING):
    """Which elements of arrays `[samples, *shape]` stay."""
    return _kept(shape, rate, seed, jnp.asarray(step, jnp.int32), jnp.asarray(samples, jnp.uint32), layer, site)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _kept(shape, rate, seed, step, samples, layer, site):
    return dropout(jnp.ones((len(samples), *shape)), rate, dropout_key(seed, step, samples), layer, site) > 0


def z_score(counts: np.ndarray, expected: float, variance_factor: float = 1.0) -> float:
    """How many standard deviations the chi-square of `counts` lies from its mean."""
    chi_square = np.sum((counts - expected) ** 2) / (expected * variance_factor)
    return float((chi_square - counts.size) / np.sqrt(2 * counts.size))


@pytest.mark.parametrize("rate", [0.001, 0.1, 0.5, 0.9])
def test_dropped_fraction(rate):
    mask = np.asarray(kept((512, 512), rate, samples=range(4)))
    deviation = abs(np.mean(~mask) - rate) / np.sqrt(rate * (1 - rate) / mask.size)
    assert deviation < 4


def test_kept_elements_are_scaled_so_that_the_expectation_stays():
    x = jnp.asarray(np.random.default_rng(0).standard_normal((1, 8, 16)), jnp.float32)
    many = jnp.broadcast_to(x, (20_000, 8, 16))
    y = np.asarray(dropout(many, 0.2, dropout_key(0, jnp.int32(0), jnp.arange(len(many), dtype=jnp.uint32)), 0, EMBEDDING))
    assert np.all((y == 0) | (np.abs(y / x - 1.25) < 1e-6))
    # The standard deviation of a mean of n is |x| sqrt(rate / (1 - rate) / n).
    deviations = np.abs(y.mean(0) - x[0]) / (np.abs(x[0]) * np.sqrt(0.25 / len(many)))
    assert np.max(deviations) < 5


def test_without_a_key_or_a_rate_nothing_happens():
    x = jnp.arange(6.0).reshape(1, 2, 3)
    assert dropout(x, 0.5, None, 0, EMBEDDING) is x
    assert dropout(x, 0.0, dropout_key(0, jnp.int32(0), jnp.zeros(1, jnp.uint32)), 0, EMBEDDING) is x


def test_a_sample_has_the_same_mask_in_any_batch_and_length():
    shape = (4, 16, 32)
    batch = kept(shape, samples=[7, 2**32 - 1, 3, 12], step=5, layer=2)
    for index, sample in enumerate([7, 2**32 - 1, 3, 12]):
        assert np.array_equal(kept(shape, samples=[sample], step=5, layer=2)[0], batch[index])
    assert np.array_equal(kept((4, 9, 32), samples=[3], step=5, layer=2)[0], batch[2, :, :9])


def test_a_mask_does_not_depend_on_compilation_or_type():
    x = jnp.ones((2, 8, 16))
    key = dropout_key(3, jnp.int32(4), jnp.arange(2, dtype=jnp.uint32))
    eager = dropout(x, 0.3, key, 2, ATTENTION_OUTPUT)
    compiled = jax.jit(lambda x, key, layer: dropout(x, 0.3, key, layer, ATTENTION_OUTPUT))(x, key, jnp.int32(2))
    narrow = dropout(x.astype(jnp.bfloat16), 0.3, key, 2, ATTENTION_OUTPUT)
    assert narrow.dtype == jnp.bfloat16
    assert np.array_equal(eager, compiled) and np.array_equal(eager > 0, narrow > 0)


def test_gradient_passes_where_elements_are_kept():
    x = jnp.ones((2, 8, 16))
    key = dropout_key(3, jnp.int32(4), jnp.arange(2, dtype=jnp.uint32))
    y, pullback = jax.vjp(lambda x: dropout(x, 0.3, key, 2, EMBEDDING), x)
    assert np.array_equal(pullback(jnp.ones_like(x))[0], y)


def test_masks_of_different_seeds_steps_samples_layers_and_sites_are_uncorrelated():
    """All pairs of 1,024 masks, swapped and shifted counters among them."""
    shape, values = (64, 64), jnp.asarray([0, 1, 2, 1_000_003], jnp.uint32)
    grid = [axis.ravel() for axis in jnp.meshgrid(values, values, values, values, jnp.asarray(SITES), indexing="ij")]
    each = jax.vmap(lambda seed, step, sample, layer, site: kept(shape, 0.5, seed, step, sample[None], layer, site)[0])
    signs = np.where(np.asarray(jax.jit(each)(*grid)), np.float32(1), np.float32(-1)).reshape(len(grid[0]), -1)
    # Of independent masks, correlation times the root of the size is normal with deviation 1.
    normal = (signs @ signs.T / np.sqrt(signs.shape[1]))[np.triu_indices(len(signs), 1)]
    assert np.max(np.abs(normal)) < 6
    assert np.mean(normal**2) == pytest.approx(1, abs=0.02)


def test_neighbours_in_a_mask_are_uncorrelated():
    signs = np.where(np.asarray(kept((256, 1024)))[0], 1.0, -1.0)
    for down in range(4):
        for right in range(-4, 5):
            if down or right > 0:
                product = signs[down:] * np.roll(signs, -right, axis=1)[: len(signs) - down]
                assert abs(product.sum()) / np.sqrt(product.size) < 5, (down, right)
    square = signs[:, :256]
    upper = np.triu_indices(256, 1)
    assert abs((square * square.T)[upper].sum()) / np.sqrt(len(upper[0])) < 5


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_every_head_position_and_feature_is_dropped_alike(rate):
    mask = ~np.asarray(kept((16, 64, 128), rate, samples=range(8), site=ATTENTION_WEIGHTS))
    for dim in range(4):
        counts = np.moveaxis(mask, dim, 0).reshape(mask.shape[dim], -1).sum(1)
        assert abs(z_score(counts, rate * mask.size / mask.shape[dim], 1 - rate)) < 5


@pytest.mark.parametrize("dim", [1, 2], ids=["positions", "features"])
def test_every_pattern_of_eight_neighbours_is_as_likely(dim):
    bits = np.moveaxis(np.asarray(kept((512, 512), samples=range(4))), dim, -1)
    patterns = np.bincount(np.packbits(bits, axis=-1).ravel(), minlength=256)
    assert abs(z_score(patterns, patterns.sum() / 256)) < 5
