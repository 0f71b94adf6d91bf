"""Sampling from a model on any mesh, without a key-value cache: each token looks at the whole window again."""

import dataclasses
from collections.abc import Generator

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from giantjax.model.gpt import GPT
from giantjax.parallel.mesh import AXES, BATCH_AXES
from giantjax.parallel.pipeline import run_schedule
from giantjax.parallel.schedule import forward_only
from giantjax.parallel.stages import Batch, Params
from giantjax.parallel.varying import varying, varying_axes
from giantjax.training.restore import Trained
from giantjax.training.state import Layout


def build_next_logits(model: GPT, layout: Layout, vocabulary_size: int) -> jax.stages.Wrapped:
    """parameters, tokens int32 [B, S], place -> fp32 logits [B, vocabulary_size] of what follows the token at `place`."""
    table = forward_only(len(layout.layers), 1, layout.num_chunks)

    def next_logits(params: Params, tokens: Int[Array, "B S"], place: Int[Array, ""]) -> Float[Array, "B V"]:
        def at_place(shared: Params, x: Array, batch: Batch, step: Array | None) -> tuple[Array, dict[str, Array]]:
            found = model.logits(shared, x)[:, place]
            if "tensor" in varying_axes(found) and lax.axis_size("tensor") > 1:
                found = lax.all_gather(found, "tensor", axis=1, tiled=True, to="invarying")
            return jnp.float32(0), {"logits": found[:, :vocabulary_size]}

        reading = dataclasses.replace(model, loss=at_place)
        # Devices along the batch axes all do the same; dividing by their number makes their sum one result.
        copies = jnp.float32(np.prod([lax.axis_size(axis) for axis in BATCH_AXES]))
        batch = {"tokens": tokens[None]}
        found = run_schedule(reading, table, layout.layers, "none", varying(params), batch, None, copies).metrics["logits"]
        return lax.psum(found, tuple(axis for axis in AXES if axis in varying_axes(found)))

    specs = (layout.params, PartitionSpec(), PartitionSpec())
    return jax.jit(jax.shard_map(next_logits, mesh=layout.mesh, in_specs=specs, out_specs=PartitionSpec()))


def generate(trained: Trained, prompt: Int[np.ndarray, "T"], *, temperature: float, seed: int) -> Generator[int, None, None]:
    """Token ids that follow `prompt`, one at a time, without end; temperature 0 takes the likeliest.

    The model sees the last sequence_length tokens. Token number i depends on (seed, i) and what came before.
    """
    sizes = trained.config.model
    length = sizes.sequence_length
    next_logits = build_next_logits(trained.model, trained.layout, sizes.vocabulary_size)

    @jax.jit
    def choose(logits: Float[Array, "1 V"], index: Int[Array, ""]) -> Int[Array, ""]:
        if temperature == 0:
            return jnp.argmax(logits[0])
        return jax.random.categorical(jax.random.fold_in(jax.random.key(seed), index), logits[0] / temperature)

    tokens = [int(token) for token in prompt]
    window = np.zeros((1, length), np.int32)
    index = 0
    while True:
        seen = tokens[-length:]
        # Places after the last hold anything: attention is causal, so they do not reach it.
        window[0, : len(seen)] = seen
        tokens.append(int(choose(next_logits(trained.params, window, np.int32(len(seen) - 1)), np.int32(index))))
        index += 1
        yield tokens[-1]
