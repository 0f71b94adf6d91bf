"""Cross-entropy over a padded vocabulary."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def mask_padding(logits: Float[Array, "B S V"], vocabulary_size: int) -> Float[Array, "B S V"]:
    """Logits whose padded vocabulary entries are -inf, so that they never win a softmax."""
    if logits.shape[-1] == vocabulary_size:
        return logits
    return jnp.where(jnp.arange(logits.shape[-1]) < vocabulary_size, logits, -jnp.inf)


def cross_entropy(logits: Float[Array, "B S V"], targets: Int[Array, "B S"], vocabulary_size: int) -> Float[Array, "B S"]:
    """-log softmax(logits)[target] of every position, in nats, fp32."""
    logits = mask_padding(logits.astype(jnp.float32), vocabulary_size)
    # A gather of one logit a position, and its transpose a scatter, are slow on accelerators and order-dependent;
    # a comparison fuses into the reduction.
    hit = jnp.arange(logits.shape[-1]) == targets[..., None]
    target_logit = jnp.sum(jnp.where(hit, logits, 0), axis=-1)
    return jax.nn.logsumexp(logits, axis=-1) - target_logit
