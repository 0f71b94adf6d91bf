"""AdamW with clipping, decay on matrices only, and the learning-rate schedules."""

import jax.numpy as jnp
import optax
from jaxtyping import PyTree

from giantjax.config import RunConfig


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


def build_optimizer(config: RunConfig, decays: PyTree) -> optax.GradientTransformation:
    """AdamW (Loshchilov and Hutter, 2019) after global-norm clipping; `decays` says which parameters decay."""
    optimizer = config.optimizer
    return optax.chain(
        optax.clip_by_global_norm(optimizer.clip_norm) if optimizer.clip_norm is not None else optax.identity(),
        optax.scale_by_adam(optimizer.beta1, optimizer.beta2, optimizer.epsilon),
        optax.add_decayed_weights(optimizer.weight_decay, mask=decays),
        optax.scale_by_learning_rate(learning_rate_schedule(config)),
    )
