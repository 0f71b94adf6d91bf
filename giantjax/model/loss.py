"""Cross-entropy over a padded vocabulary that devices may share."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from giantjax.parallel.communication import ONE_DEVICE, Communication, own_part


def mask_padding(logits: Float[Array, "B S v"], vocabulary_size: int, comm: Communication = ONE_DEVICE) -> Float[Array, "B S v"]:
    """Logits whose padded vocabulary entries are -inf, so that they never win a softmax."""
    return jnp.where(own_part(comm, logits.shape[-1]) < vocabulary_size, logits, -jnp.inf)


def cross_entropy(
    logits: Float[Array, "B S v"], targets: Int[Array, "B S"], vocabulary_size: int, comm: Communication = ONE_DEVICE
) -> Float[Array, "B S"]:
    """-log softmax(logits)[target] of every position, in nats, fp32, the same on every device.

    Each device holds `v` entries of the vocabulary in order, and three numbers a position cross between devices: the
    largest logit, the sum of exponentials, and the logit of the target (Shoeybi et al., 2019).
    """
    logits = mask_padding(logits.astype(jnp.float32), vocabulary_size, comm)
    largest = comm.largest(jnp.max(logits, axis=-1))
    total = comm.reduce(jnp.sum(jnp.exp(logits - largest[..., None]), axis=-1))
    # A gather of one logit a position, and its transpose a scatter, are slow on accelerators and order-dependent;
    # a comparison fuses into the reduction.
    hit = own_part(comm, logits.shape[-1]) == targets[..., None]
    target_logit = comm.reduce(jnp.sum(jnp.where(hit, logits, 0), axis=-1))
    return jnp.log(total) + largest - target_logit


def is_likeliest(
    logits: Float[Array, "B S v"], targets: Int[Array, "B S"], vocabulary_size: int, comm: Communication = ONE_DEVICE
) -> Bool[Array, "B S"]:
    """Whether no token is likelier than the target, at every position, the same on every device."""
    logits = mask_padding(logits.astype(jnp.float32), vocabulary_size, comm)
    hit = own_part(comm, logits.shape[-1]) == targets[..., None]
    target_logit = comm.reduce(jnp.sum(jnp.where(hit, logits, 0), axis=-1))
    return target_logit >= comm.largest(jnp.max(logits, axis=-1))
