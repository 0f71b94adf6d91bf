"""AdamW with decay on matrices only, clipping, and the learning-rate schedules."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, PyTree

from giantjax.config import RunConfig


@dataclass(frozen=True)
class Optimizer:
    """How gradients become updates."""

    transform: optax.GradientTransformation
    """Of clipped gradients; it must work element by element, since each device may hold a part of a parameter."""
    learning_rate: optax.Schedule
    """Steps taken -> learning rate of the next step, to report; `transform` applies it."""
    clip_norm: float | None = None
    """Gradients are scaled down to this global norm."""


def clipped(grads: PyTree, norm: Array, limit: float | None) -> PyTree:
    """Gradients of global norm `norm`, scaled down to `limit` where that is less (Pascanu et al., 2013)."""
    if limit is None:
        return grads
    scale = jnp.where(norm < limit, 1.0, limit / norm)
    return jax.tree.map(lambda g: g * scale, grads)


def learning_rate_schedule(config: RunConfig) -> optax.Schedule:
    """Steps taken so far -> learning rate of the next step.

    The warm-up rises linearly from 0, so that the first step of a run with warm-up has rate 0, as in Megatron. A run
    shorter than its warm-up ends inside it.
    """
    optimizer, total = config.optimizer, config.schedule_length
    peak, least, warmup = optimizer.learning_rate, optimizer.min_learning_rate, optimizer.warmup
    if optimizer.schedule == "wsd":
        decay = optimizer.decay or max(1, total // 5)
        start = max(warmup, total - decay)
        after = optax.join_schedules(
            [optax.constant_schedule(peak), optax.linear_schedule(peak, least, max(1, total - start))], [start - warmup]
        )
    else:
        decay = optimizer.decay or max(1, total - warmup)
        after = {
            "cosine": lambda: optax.cosine_decay_schedule(peak, decay, least / peak),
            "linear": lambda: optax.linear_schedule(peak, least, decay),
            "constant": lambda: optax.constant_schedule(peak),
        }[optimizer.schedule]()
    schedule = optax.join_schedules([optax.linear_schedule(0.0, peak, warmup), after], [warmup]) if warmup else after
    unit = config.training.global_batch_size if optimizer.unit == "samples" else 1
    return lambda count: jnp.asarray(schedule(count * unit), jnp.float32)


def build_optimizer(config: RunConfig, decays: PyTree) -> Optimizer:
    """AdamW (Loshchilov and Hutter, 2019); `decays` says which parameters decay."""
    optimizer, schedule = config.optimizer, learning_rate_schedule(config)
    transform = optax.chain(
        optax.scale_by_adam(optimizer.beta1, optimizer.beta2, optimizer.epsilon),
        optax.add_decayed_weights(optimizer.weight_decay, mask=decays),
        optax.scale_by_learning_rate(schedule),
    )
    return Optimizer(transform, schedule, optimizer.clip_norm)
