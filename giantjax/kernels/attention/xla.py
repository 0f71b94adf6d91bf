"""Causal attention in plain XLA operations: the specification, and what runs on a CPU."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int


def causal_attention(
    query: Float[Array, "B S N D"],
    key: Float[Array, "B S N D"],
    value: Float[Array, "B S N D"],
    drop: Callable[[Float[Array, "B N S S"]], Float[Array, "B N S S"]] = lambda weights: weights,
    segment: Int[Array, "B S"] | None = None,
) -> Float[Array, "B S N D"]:
    """softmax(q k^T / sqrt(D)) v over the keys at or before each query (Vaswani et al., 2017), with `segment` those of its segment.

    Scores and softmax are fp32 whatever the inputs are; `drop` is applied to the attention weights. The weights
    carry the checkpoint name `attention_weights`, and the backward pass needs nothing else of the softmax.
    """
    scores_BNST = jnp.einsum("bsnd,btnd->bnst", query, key, preferred_element_type=jnp.float32)
    scores_BNST = scores_BNST * (query.shape[-1] ** -0.5)
    length = query.shape[1]
    seen = jnp.tril(jnp.ones((length, length), bool))
    if segment is not None:
        seen = seen & (segment[:, None, :, None] == segment[:, None, None, :])
    weights_BNST = _softmax(jnp.where(seen, scores_BNST, -jnp.inf), value.dtype)
    return jnp.einsum("bnst,btnd->bsnd", drop(weights_BNST), value)


def cached_attention(
    query: Float[Array, "B T N D"], key: Float[Array, "B S N D"], value: Float[Array, "B S N D"], position: Int[Array, "B T"]
) -> Float[Array, "B T N D"]:
    """What `causal_attention` gives for queries at `position` of a sequence whose keys and values are all there, up to them at least."""
    scores_BNTS = jnp.einsum("btnd,bsnd->bnts", query, key, preferred_element_type=jnp.float32)
    scores_BNTS = scores_BNTS * (query.shape[-1] ** -0.5)
    seen = jnp.arange(key.shape[1]) <= position[:, None, :, None]
    weights_BNTS = jax.nn.softmax(jnp.where(seen, scores_BNTS, -jnp.inf), axis=-1).astype(value.dtype)
    return jnp.einsum("bnts,bsnd->btnd", weights_BNTS, value)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _softmax(scores: Float[Array, "B N S T"], dtype: jnp.dtype) -> Float[Array, "B N S T"]:
    """Softmax over the last dim of fp32 scores, as `dtype`."""
    return _softmax_forward(scores, dtype)[0]


def _softmax_forward(scores: Array, dtype: jnp.dtype) -> tuple[Array, Array]:
    # JAX's own softmax keeps its fp32 result, which no name reaches: a policy that saves the named copy makes it again.
    weights = checkpoint_name(jax.nn.softmax(scores, axis=-1).astype(dtype), "attention_weights")
    return weights, weights


def _softmax_backward(dtype: jnp.dtype, weights: Array, cotangent: Array) -> tuple[Array]:
    wide, dy = weights.astype(jnp.float32), cotangent.astype(jnp.float32)
    return (wide * (dy - jnp.sum(wide * dy, axis=-1, keepdims=True)),)


_softmax.defvjp(_softmax_forward, _softmax_backward)
