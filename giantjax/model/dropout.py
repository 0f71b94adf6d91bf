"""Dropout whose mask is a hash of where an element stands, not of the order in which devices draw numbers.

An element is dropped by a function of (seed, step, sample, layer, site, position, feature or head): any mesh,
any shard and any microbatching therefore drops the same elements. The hash chains the finaliser of MurmurHash3
(Appleby, 2011) over 32-bit counters, one round a counter, so that only the last round runs at full size.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, UInt32

# Sites of one layer; every call of `keep` names its own.
EMBEDDING, ATTENTION_WEIGHTS, ATTENTION_OUTPUT, FEEDFORWARD_OUTPUT = range(4)


class DropoutKey(NamedTuple):
    """What the masks of one microbatch depend on besides the place of an element."""

    step: UInt32[Array, ""]
    """Hash of the run's seed and the step."""
    sample: UInt32[Array, "B"]
    """Global index of each sample."""


def dropout_key(seed: int, step: Array, sample: UInt32[Array, "B"]) -> DropoutKey:
    """The key of one microbatch at one step."""
    return DropoutKey(_mix(jnp.uint32(seed), step), sample.astype(jnp.uint32))


def dropout(
    x: Float[Array, "B ..."], rate: float, key: DropoutKey | None, layer: Array | int, site: int, first: Array | int = 0
) -> Float[Array, "B ..."]:
    """`x` with elements dropped with probability `rate` and the others scaled by 1 / (1 - rate); `x` itself without a key.

    The dims of `x` after the first are counted: (position, feature) or (head, query, key). The first of them is counted
    from `first`, which is where a device's share of the positions or heads begins; the others from 0.
    """
    if key is None or rate == 0:
        return x
    hashed = _mix(_mix(_mix(key.step, jnp.uint32(site)), jnp.asarray(layer).astype(jnp.uint32)), key.sample)
    for dim, size in enumerate(x.shape[1:]):
        counter = jnp.arange(size, dtype=jnp.uint32)
        hashed = _mix(hashed[..., None], counter + jnp.asarray(first).astype(jnp.uint32) if dim == 0 else counter)
    kept = hashed >= jnp.uint32(round(rate * 2**32))
    return jnp.where(kept, x / (1 - rate), 0).astype(x.dtype)


def _mix(state: Array, counter: Array) -> Array:
    # The odd constant (2^32 / golden ratio) spreads small counters; the two rounds below are MurmurHash3's fmix32.
    h = state ^ (counter.astype(jnp.uint32) * jnp.uint32(0x9E3779B9) + jnp.uint32(0x7F4A7C15))
    h = (h ^ (h >> 16)) * jnp.uint32(0x85EBCA6B)
    h = (h ^ (h >> 13)) * jnp.uint32(0xC2B2AE35)
    return h ^ (h >> 16)
