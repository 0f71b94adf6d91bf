"""Decoding with a cache: token by token it gives what one pass over the whole text gives, on any mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from giantjax.config import MeshConfig, RunConfig
from giantjax.decode import build_decoder
from giantjax.errors import InputError
from giantjax.kernels.attention import cached_attention, causal_attention
from giantjax.model.gpt import gpt
from giantjax.training.restore import Trained, load_trained
from giantjax.training.run_directory import directory_of
from tests.helpers import FORWARD, logits_of, relative_error
from tests.training.runs import small_run, train_here, write_corpus

pytestmark = pytest.mark.xdist_group("decode")

MESHES = {"one": MeshConfig(), "pipe-tensor": MeshConfig(pipe=2, tensor=2), "all-axes": MeshConfig(pipe=2, tensor=2, data=2)}


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> RunConfig:
    """Of three layers, so that two stages have not the same number."""
    folder = tmp_path_factory.mktemp("decode")
    changes = {"training.num_steps": 1, "training.eval_every": 0, "model.num_layers": 3}
    config = small_run(folder / "run", write_corpus(folder / "corpus"), **changes)
    assert train_here(config) == 0
    return config


def enlarged(run: RunConfig, mesh: MeshConfig | None = None) -> Trained:
    """The run's model with parameters so large that tokens depend on those before them."""
    trained = load_trained(directory_of(run), mesh)
    return trained._replace(params=jax.tree.map(lambda leaf: 4 * leaf, trained.params))


@pytest.mark.parametrize("mesh", MESHES.values(), ids=MESHES)
def test_cached_decoding_is_full_recomputation(run, mesh):
    """Prompts of different lengths at once, and then token after token up to the last position."""
    size = run.model.vocabulary_size
    tokens = np.random.default_rng(0).integers(0, size, (4, 16)).astype(np.int32)
    one = enlarged(run)
    whole = jax.jit(lambda params: logits_of(gpt(run.model), params, {"tokens": jnp.asarray(tokens)}))(one.params)
    wanted = np.asarray(whole)[..., :size]
    decoder, rows = build_decoder(enlarged(run, mesh)), np.arange(4)
    held, counts = np.zeros(4, np.int32), np.array([5, 1, 7, 3], np.int32)
    logits, cache = decoder.step(decoder.trained.params, decoder.new_cache(4), tokens[:, :8], held, counts)
    assert relative_error(logits, wanted[rows, counts - 1]) < FORWARD
    held = counts
    while (held < 16).any():
        left = (held < 16).astype(np.int32)
        latest = tokens[rows, np.minimum(held, 15)][:, None]
        logits, cache = decoder.step(decoder.trained.params, cache, latest, held, left)
        going = left == 1
        assert relative_error(np.asarray(logits)[going], wanted[rows, np.minimum(held, 15)][going]) < FORWARD
        held = held + left


def test_a_row_that_reads_nothing_is_left_as_it_is(run):
    decoder = build_decoder(enlarged(run))
    cache = decoder.step(decoder.trained.params, decoder.new_cache(2), np.ones((2, 8), np.int32), np.zeros(2, np.int32), np.full(2, 8))[1]
    before = jax.device_get(cache)
    after = jax.device_get(decoder.step(decoder.trained.params, cache, np.ones((2, 1), np.int32), np.full(2, 8), np.array([0, 1]))[1])
    for old, new in zip(before, after, strict=True):
        np.testing.assert_array_equal(new[:, 0], old[:, 0])
        assert (new[:, 1, 8] != old[:, 1, 8]).any()
        np.testing.assert_array_equal(np.delete(new[:, 1], 8, axis=1), np.delete(old[:, 1], 8, axis=1))


def test_heads_and_layers_of_the_cache_are_shared(run):
    decoder = build_decoder(enlarged(run, MeshConfig(pipe=2, tensor=2, data=2)))
    cache = decoder.new_cache(4)
    layers = -(-run.model.num_layers // 2)
    assert {shard.data.shape for array in cache for shard in array.addressable_shards} == {(layers, 2, 16, 1, 16)}


def test_a_mesh_without_its_devices_is_refused(run):
    with pytest.raises(InputError, match="this job has 8 of kind CPU"):
        load_trained(directory_of(run), MeshConfig(pipe=2, tensor=2, data=4))


def test_cached_attention_is_causal_attention():
    random = np.random.default_rng(2)
    q, k, v = (random.standard_normal((3, 9, 2, 4), np.float32) for _ in range(3))
    whole = jax.jit(causal_attention)(q, k, v)
    places = np.array([[0, 1], [4, 5], [7, 8]])
    rows = np.arange(3)[:, None]
    later = np.arange(9)[None, :, None, None] > places[:, -1][:, None, None, None]
    # What lies beyond the last position may be anything that is finite.
    found = jax.jit(cached_attention)(q[rows, places], np.where(later, 1e3, k), np.where(later, 1e3, v), places)
    assert relative_error(found, np.asarray(whole)[rows, places]) < FORWARD
