"""Sampling from a model on any mesh, several texts at a time."""

import functools
import zlib
from collections.abc import Generator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key

from giantjax.decode import Decoder, Window
from giantjax.sampling import Sampling, choose


def generate(
    decoder: Decoder, prompts: Sequence[Sequence[int] | Int[np.ndarray, "T"]], sampling: Sampling, seed: int
) -> Generator[Int[np.ndarray, "B"], None, None]:
    """Token ids that follow each of B prompts, one of each at a time, without end.

    Token number i of a text is drawn from (seed, prompt, i) and what comes before it; how many other texts there are matters only as
    far as rounding does. The model sees the last sequence_length tokens of a prompt; a text that has grown to that length goes on from
    the last half of it, as `Window` says.

    Args:
        decoder: from `build_decoder`.
        prompts: token ids of each, one at least.
        sampling: how tokens are chosen.
        seed: from 0 up to 2**32.
    """
    texts = [[int(token) for token in prompt] for prompt in prompts]
    window = Window(decoder, texts)
    logits = window.next_logits()
    contained, salts = np.zeros(logits.shape, bool), np.zeros(logits.shape[0], np.uint32)
    for row, text in enumerate(texts):
        contained[row, text] = True
        # Of the prompt alone: others are drawn by other numbers, and it is by the same beside any others.
        salts[row] = zlib.crc32(np.array(text, np.int32).tobytes())
    keys = jax.vmap(functools.partial(jax.random.fold_in, jax.random.key(seed)))(salts)
    seen, index = jnp.asarray(contained), 0
    while True:
        found, seen = _choose(logits, seen, keys, np.int32(index), sampling)
        tokens = np.asarray(found)[: len(texts)]
        yield tokens
        window.append(tokens)
        logits, index = window.next_logits(), index + 1


@functools.partial(jax.jit, static_argnames="sampling")
def _choose(
    logits: Float[Array, "B V"], seen: Bool[Array, "B V"], keys: Key[Array, "B"], index: Int[Array, ""], sampling: Sampling
) -> tuple[Int[Array, "B"], Bool[Array, "B V"]]:
    """Tokens, and which tokens each row has with them."""
    tokens = choose(logits, seen, keys, index, sampling)
    return tokens, seen.at[jnp.arange(tokens.size), tokens].set(True)
