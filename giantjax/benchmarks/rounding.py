"""Train steps that round gradients between nodes in one way or another, and how far what they sum drifts from the exact sum."""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from giantjax.config import RunConfig
from giantjax.data.sources import open_sources
from giantjax.parallel import collectives
from giantjax.parallel.collectives import LEVELS, Compression
from giantjax.training.loop import Evaluation, batches_on_mesh
from giantjax.training.parts import Parts, assemble
from giantjax.training.state import TrainState, abstract_state, init_state, layout_of
from giantjax.training.step import StepMetrics, build_eval_step, build_train_step


class Rounding(NamedTuple):
    """How gradients are rounded; what is not the default is no option of training."""

    compression: Compression = "none"
    feedback: bool = True
    """Whether what is rounded off comes with the next step."""
    levels: int = LEVELS
    """Of int8 on each side of zero."""


EXACT = Rounding()


@dataclass(frozen=True)
class Trainer:
    """The train step as it ships, with one rounding of gradients; its optimizer also sums the gradients that it is given."""

    parts: Parts
    step: Any
    """Compiled: state, batch -> state, metrics."""
    evaluation: Any
    """parameters, batch -> sum of losses, weight."""
    feedback: bool

    def start(self, seed: int) -> TrainState:
        """The state before the first step."""
        return init_state(self.parts.model, self.parts.optimizer, self.parts.layout, seed)

    def batches(self, seed: int) -> Iterator[dict[str, jax.Array]]:
        """The run's batches: the same for every rounding."""
        config = dataclasses.replace(self.parts.config, seed=seed)
        return batches_on_mesh(self.parts._replace(config=config), open_sources(config)[0], start_sample=0)

    def after(self, state: TrainState, batch: dict[str, jax.Array]) -> tuple[TrainState, StepMetrics]:
        """The next state, and what the step reports."""
        if not self.feedback:
            state = state._replace(feedback=jax.tree.map(jnp.zeros_like, state.feedback))
        # Simulated devices share one pool of threads: steps that pile up would wait for each other in collectives.
        return jax.block_until_ready(self.step(state, batch))

    def losses(self, seed: int) -> tuple[list[float], float]:
        """A whole run: the loss of each step, and that on held-out samples after the last."""
        config, state, found = self.parts.config, self.start(seed), []
        for _, batch in zip(range(config.training.num_steps), self.batches(seed), strict=False):
            state, metrics = self.after(state, batch)
            found.append(float(metrics.loss))
        return found, Evaluation(config, open_sources(config)[1], self.evaluation, self.parts.placement)(state)


def trainers(config: RunConfig, roundings: Sequence[Rounding]) -> dict[Rounding, Trainer]:
    """A trainer for each rounding; those that differ in feedback alone share a program."""
    kinds = {one._replace(feedback=True) for one in roundings}
    made = {kind: _trainer(config, kind) for kind in kinds}
    return {one: dataclasses.replace(made[one._replace(feedback=True)], feedback=one.feedback) for one in roundings}


def _trainer(config: RunConfig, rounding: Rounding) -> Trainer:
    training = dataclasses.replace(config.training, compression=rounding.compression)
    parts = assemble(dataclasses.replace(config, training=training))
    optimizer = dataclasses.replace(parts.optimizer, transform=_summing(parts.optimizer.transform))
    layout = layout_of(parts.model, optimizer, parts.layout.mesh, compression=rounding.compression)
    parts = parts._replace(optimizer=optimizer, layout=layout)
    batch = next(batches_on_mesh(parts, open_sources(config)[0], start_sample=0))
    with _levels(rounding.levels):
        step = build_train_step(parts.model, optimizer, layout).lower(abstract_state(layout), batch).compile()
    return Trainer(parts, step, build_eval_step(parts.model, layout), rounding.feedback)


@contextlib.contextmanager
def _levels(number: int) -> Iterator[None]:
    """Programs traced meanwhile have int8 of so many levels."""
    collectives.LEVELS = number
    try:
        yield
    finally:
        collectives.LEVELS = LEVELS


def _summing(transform: optax.GradientTransformation) -> optax.GradientTransformation:
    """`transform`, whose state also holds the sum of all gradients it was given."""

    def init(params: Any) -> Any:
        return transform.init(params), jax.tree.map(jnp.zeros_like, params)

    def update(grads: Any, state: Any, params: Any = None) -> Any:
        updates, inner = transform.update(grads, state[0], params)
        return updates, (inner, jax.tree.map(jnp.add, state[1], grads))

    return optax.GradientTransformation(init, update)


def drift(found: Mapping[Rounding, Trainer], marks: Sequence[int]) -> dict[Rounding, list[float]]:
    """How far the sum of all gradients so far is from that of exact ones, after the steps `marks`; for exact ones, its norm.

    All see the parameters and samples of one run that is trained with exact gradients, so nothing differs but the rounding. In
    units of one gradient: the root mean square of their norms up to there.
    """
    exact, states = found[EXACT], {one: trainer.start(0) for one, trainer in found.items()}
    squares, drifts = 0.0, {one: list[float]() for one in found}
    for number, batch in zip(range(1, max(marks) + 1), exact.batches(0), strict=False):
        for one in found.keys() - {EXACT}:
            same = states[one]._replace(params=jax.tree.map(jnp.copy, states[EXACT].params))
            states[one], _ = found[one].after(same, batch)
        states[EXACT], metrics = exact.after(states[EXACT], batch)
        squares += float(metrics.grad_norm) ** 2
        if number in marks:
            for one, state in states.items():
                away = _sum(state) - (0 if one == EXACT else _sum(states[EXACT]))
                drifts[one].append(float(np.linalg.norm(away) / np.sqrt(squares / number)))
    return drifts


def _sum(state: TrainState) -> np.ndarray:
    """Of all gradients so far, in one array."""
    return np.concatenate([leaf.ravel() for leaf in jax.tree.leaves(jax.device_get(state.optimizer[1]))], dtype=np.float64)
