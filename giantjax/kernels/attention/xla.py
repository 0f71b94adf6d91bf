"""Causal attention in plain XLA operations: the specification, and what runs on a CPU."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float


def causal_attention(
    query: Float[Array, "B S N D"],
    key: Float[Array, "B S N D"],
    value: Float[Array, "B S N D"],
    drop: Callable[[Float[Array, "B N S S"]], Float[Array, "B N S S"]] = lambda weights: weights,
) -> Float[Array, "B S N D"]:
    """softmax(q k^T / sqrt(D)) v over the keys at or before each query (Vaswani et al., 2017).

    Scores and softmax are fp32 whatever the inputs are; `drop` is applied to the attention weights. The weights
    carry the checkpoint name `attention_weights`.
    """
    scores_BNST = jnp.einsum("bsnd,btnd->bnst", query, key, preferred_element_type=jnp.float32)
    scores_BNST = scores_BNST * (query.shape[-1] ** -0.5)
    length = query.shape[1]
    causal_ST = jnp.tril(jnp.ones((length, length), bool))
    weights_BNST = jax.nn.softmax(jnp.where(causal_ST, scores_BNST, -jnp.inf), axis=-1)
    weights_BNST = checkpoint_name(weights_BNST.astype(value.dtype), "attention_weights")
    return jnp.einsum("bnst,btnd->bsnd", drop(weights_BNST), value)
