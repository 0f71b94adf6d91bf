"""Loss scaling for fp16: gradients too small for it are multiplied into its range, and a step that overflows is skipped.

Micikevicius et al., 2018; the rules of growth and hysteresis are those of Megatron-LM's DynamicGradScaler. What is scaled is
the mean loss of a microbatch, so that the same scale suits any number of microbatches and devices.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32

from giantjax.config import LossScaleConfig


class LossScale(NamedTuple):
    """The scale and what decides about its next change; scalars, the same on all devices."""

    scale: Float32[Array, ""]
    good_steps: Int32[Array, ""]
    """Steps without overflow since the scale last changed, or since the last overflow."""
    patience: Int32[Array, ""]
    """Overflows until the scale falls."""
    skipped: Int32[Array, ""]
    """Steps skipped in the whole run."""
    in_a_row: Int32[Array, ""]
    """Steps skipped since the last that was not."""


def initial_scale(config: LossScaleConfig) -> LossScale:
    """The scale before the first step."""
    scale = config.initial if config.static is None else config.static
    return LossScale(jnp.float32(scale), jnp.int32(0), jnp.int32(config.hysteresis), jnp.int32(0), jnp.int32(0))


def next_scale(config: LossScaleConfig, before: LossScale, finite: Bool[Array, ""]) -> LossScale:
    """The scale after a step whose gradients were all `finite`, or one that is skipped for some were not.

    After `hysteresis` overflows, and then at each, the scale falls by `backoff`; after `growth_interval` good steps in a row it
    grows by `growth`, and the patience is renewed. It stays within `floor` and `ceiling`.
    """
    good = jnp.where(finite, before.good_steps + 1, 0)
    patience = jnp.where(finite, before.patience, jnp.maximum(before.patience - 1, 0))
    grows = good == config.growth_interval
    scale = before.scale
    if config.static is None:
        falling = jnp.maximum(scale * config.backoff, config.floor)
        growing = jnp.minimum(scale * config.growth, config.ceiling)
        scale = jnp.where(finite, jnp.where(grows, growing, scale), jnp.where(patience == 0, falling, scale))
    return LossScale(
        scale,
        jnp.where(grows, 0, good),
        jnp.where(grows, config.hysteresis, patience),
        before.skipped + jnp.where(finite, 0, 1),
        jnp.where(finite, 0, before.in_a_row + 1),
    )
