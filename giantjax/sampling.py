"""Choosing a token by its logits."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Key


class Sampling(NamedTuple):
    """How tokens are chosen, in the order in which it is applied."""

    repetition_penalty: float = 1.0
    """As `penalised` says; 1 does nothing."""
    temperature: float = 1.0
    """Logits are divided by it; 0 takes the likeliest."""
    top_k: int | None = None
    """As `only_top_k` says; None does nothing."""
    top_p: float = 1.0
    """As `only_top_p` says; 1 does nothing."""


def penalised(logits: Float[Array, "B V"], seen: Bool[Array, "B V"], penalty: float) -> Float[Array, "B V"]:
    """Logits of tokens that were `seen` in a row's text divided by `penalty`, or multiplied where they are negative.

    CTRL (Keskar et al., 2019, section 4.1) divides them all, which makes tokens of negative logits likelier; multiplying those,
    as Hugging Face's transformers do, makes all of them less likely.
    """
    return jnp.where(seen, jnp.where(logits > 0, logits / penalty, logits * penalty), logits)


def only_top_k(logits: Float[Array, "B V"], k: int) -> Float[Array, "B V"]:
    """The k largest logits of each row, and those equal to the last of them; -inf in the place of the others (Fan et al., 2018)."""
    least = lax.top_k(logits, min(k, logits.shape[-1]))[0][:, -1:]
    return jnp.where(logits >= least, logits, -jnp.inf)


def only_top_p(logits: Float[Array, "B V"], p: float) -> Float[Array, "B V"]:
    """The fewest likeliest tokens of each row whose probabilities sum to at least `p`, and those as likely as the last of them; -inf in
    the place of the others (Holtzman et al., 2020).
    """
    ordered = jnp.sort(logits, axis=-1, descending=True)
    probabilities = jax.nn.softmax(ordered, axis=-1)
    before = jnp.cumsum(probabilities, axis=-1) - probabilities
    # The likeliest is kept whatever p is.
    kept = (before < p).at[:, 0].set(True)
    least = jnp.min(jnp.where(kept, ordered, jnp.inf), axis=-1, keepdims=True)
    return jnp.where(logits >= least, logits, -jnp.inf)


def choose(
    logits: Float[Array, "B V"], seen: Bool[Array, "B V"], keys: Key[Array, "B"], index: Int[Array, ""], sampling: Sampling
) -> Int[Array, "B"]:
    """The token `index` of each row's continuation, drawn from (the row's key, index), so that a row does not depend on others."""
    if sampling.repetition_penalty != 1:
        logits = penalised(logits, seen, sampling.repetition_penalty)
    if sampling.temperature == 0:
        return jnp.argmax(logits, axis=-1)
    logits = logits / sampling.temperature
    if sampling.top_k is not None:
        logits = only_top_k(logits, sampling.top_k)
    if sampling.top_p < 1:
        logits = only_top_p(logits, sampling.top_p)
    return jax.vmap(lambda key, row: jax.random.categorical(jax.random.fold_in(key, index), row))(keys, logits)
