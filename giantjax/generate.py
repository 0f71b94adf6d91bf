"""Sampling from a model on any mesh, several texts at a time."""

import zlib
from collections.abc import Generator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from giantjax.decode import Decoder, Window
from giantjax.sampling import Sampling, choose


def generate(
    decoder: Decoder, prompts: Sequence[Sequence[int] | Int[np.ndarray, "T"]], sampling: Sampling
) -> Generator[Int[np.ndarray, "B"], None, None]:
    """Token ids that follow each of B prompts, one of each at a time, without end.

    Token number i of a text is drawn from (seed, prompt, i) and what comes before it; how many other texts there are matters only as
    far as rounding does. The model sees the last sequence_length tokens of a prompt; a text that has grown to that length goes on from
    the last half of it, as `Window` says.

    Args:
        decoder: from `build_decoder`.
        prompts: token ids of each, one at least.
        sampling: how tokens are chosen.
    """
    texts = [[int(token) for token in prompt] for prompt in prompts]
    window = Window(decoder, texts)

    @jax.jit
    def pick(logits: Float[Array, "B V"], seen: Bool[Array, "B V"], salt: Array, index: Int[Array, ""]) -> tuple[Array, Array]:
        tokens = choose(logits, seen, salt, index, sampling)
        return tokens, seen.at[jnp.arange(tokens.size), tokens].set(True)

    logits = window.next_logits()
    first, salt = np.zeros(logits.shape, bool), np.zeros(len(logits), np.uint32)
    for row, text in enumerate(texts):
        first[row, text] = True
        # Of its own, lest all texts be drawn by the same numbers, and the same beside other prompts.
        salt[row] = zlib.crc32(np.array(text, np.int32).tobytes())
    seen, index = jnp.asarray(first), 0
    while True:
        found, seen = pick(logits, seen, salt, np.int32(index))
        tokens = np.asarray(found)[: len(texts)]
        yield tokens
        window.append(tokens)
        logits, index = window.next_logits(), index + 1
