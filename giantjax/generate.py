"""Sampling from a model, without a key-value cache: each token looks at the whole window again."""

from collections.abc import Generator

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from giantjax.config import RunConfig
from giantjax.model.gpt import Params, apply_blocks, gpt
from giantjax.model.loss import mask_padding


def generate(
    config: RunConfig, params: Params, prompt: Int[np.ndarray, "T"], *, temperature: float, seed: int
) -> Generator[int, None, None]:
    """Token ids that follow `prompt`, one at a time, without end; temperature 0 takes the likeliest.

    The model sees the last sequence_length tokens. Token number i depends on (seed, i) and what came before.
    """
    model, length = gpt(config.model), config.model.sequence_length

    @jax.jit
    def next_token(params: Params, window: Array, last: Array, index: Array) -> Array:
        # Positions after `last` hold anything: attention is causal, so they do not reach it.
        x = model.embed(params, {"tokens": window}, None)
        x = apply_blocks(model, params["blocks"], x, None, "none")
        logits = mask_padding(model.logits(params, x), config.model.vocabulary_size)[0, last]
        if temperature == 0:
            return jnp.argmax(logits)
        return jax.random.categorical(jax.random.fold_in(jax.random.key(seed), index), logits / temperature)

    tokens = [int(token) for token in prompt]
    window = np.zeros((1, length), np.int32)
    index = 0
    while True:
        seen = tokens[-length:]
        window[0, : len(seen)] = seen
        tokens.append(int(next_token(params, window, np.int32(len(seen) - 1), np.int32(index))))
        index += 1
        yield tokens[-1]
