"""The train step: the same numbers however the batch is spread, and its collectives."""

import functools
import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from giantjax.config import RunConfig
from giantjax.model.gpt import Params, gpt
from giantjax.planner.flops import num_parameters
from giantjax.training.optimizer import learning_rate_schedule
from giantjax.training.state import TrainState
from giantjax.training.step import build_eval_step
from tests.helpers import (
    FORWARD,
    GRADIENT,
    Curves,
    loss_of,
    program,
    random_batch,
    random_params,
    relative_error,
    run_config,
    small_model,
    train,
)

NUM_STEPS, BATCH_SIZE, CLIP = 3, 32, 0.1


def config_of(data: int, num_microbatches: int, rate: float = 0.0) -> RunConfig:
    # Adam divides by the root of the second moment plus epsilon; where a gradient is 0 but for rounding, as those of key
    # biases are, a small epsilon would turn the rounding into whole steps.
    return run_config(
        small_model(attention_dropout=rate, hidden_dropout=rate),
        num_steps=NUM_STEPS,
        batch_size=BATCH_SIZE,
        data=data,
        num_microbatches=num_microbatches,
        learning_rate=1e-2,
        epsilon=1e-3,
        clip_norm=CLIP,
    )


def uneven_batch(step: int) -> dict[str, Any]:
    """The first shard of eight is all masked, later rows are masked less and less; every mask is its own."""
    batch = random_batch(small_model(), BATCH_SIZE, seed=step)
    chance = np.linspace(0, 1, BATCH_SIZE)[:, None]
    mask = np.random.default_rng(100 + step).random(batch["loss_mask"].shape) < chance
    mask[: BATCH_SIZE // 8] = False
    first = np.uint32(step * BATCH_SIZE)
    return batch | {"loss_mask": mask.astype(np.float32), "sample": first + np.arange(BATCH_SIZE, dtype=np.uint32)}


@functools.cache
def start() -> Params:
    return random_params(gpt(small_model()))


@functools.cache
def trained(data: int, num_microbatches: int, rate: float) -> tuple[Curves, TrainState]:
    config = config_of(data, num_microbatches, rate)
    return train(config, start(), [uneven_batch(step) for step in range(NUM_STEPS)])


EVERY_WAY = [(data, num_microbatches, 0.1) for data in (1, 2, 8) for num_microbatches in (1, 2, 4)]


@pytest.mark.parametrize(("data", "num_microbatches", "rate"), [*EVERY_WAY, (2, 2, 0.0), (8, 4, 0.0)])
def test_training_is_the_same_on_any_number_of_devices_and_microbatches(data, num_microbatches, rate):
    expected, expected_state = trained(1, 1, rate)
    found, state = trained(data, num_microbatches, rate)
    assert relative_error(found.loss, expected.loss) <= FORWARD
    assert relative_error(found.grad_norm, expected.grad_norm) <= GRADIENT
    assert relative_error(state, expected_state) <= GRADIENT
    assert np.min(found.grad_norm) > 2 * CLIP, "clipping must be at work"


def test_dropout_and_steps_make_a_difference():
    plain, dropped = trained(1, 1, 0.0), trained(1, 1, 0.1)
    assert relative_error(dropped[0].loss, plain[0].loss) > 100 * FORWARD
    assert len(set(plain[0].loss)) == NUM_STEPS


def test_step_counts_and_reports_its_learning_rate():
    metrics, state = trained(1, 1, 0.1)
    assert state.step == NUM_STEPS
    expected = jax.vmap(learning_rate_schedule(config_of(1, 1)))(np.arange(NUM_STEPS))
    assert metrics.learning_rate.tolist() == pytest.approx(expected.tolist(), rel=1e-6)
    assert len(set(metrics.learning_rate)) == NUM_STEPS


def test_reported_loss_and_norm_are_of_the_mean_over_unmasked_positions():
    batch, metrics = uneven_batch(0), trained(2, 2, 0.0)[0]

    def mean(params):
        return loss_of(gpt(small_model()), params, batch) / jnp.sum(batch["loss_mask"])

    loss, grads = jax.jit(jax.value_and_grad(mean))(start())
    assert relative_error(metrics.loss[0], loss) <= FORWARD
    norm = np.sqrt(sum(np.sum(np.square(leaf, dtype=np.float64)) for leaf in jax.tree.leaves(grads)))
    assert relative_error(metrics.grad_norm[0], norm) <= GRADIENT


def test_all_masked_batch_only_decays_matrices():
    config, batch = config_of(2, 2), uneven_batch(0)
    decays = program(config).model.decays
    metrics, state = train(config, start(), [batch | {"loss_mask": np.zeros_like(batch["loss_mask"])}])
    assert metrics.loss == [0] and metrics.grad_norm == [0]
    factor = 1 - float(metrics.learning_rate[0]) * config.optimizer.weight_decay
    decayed = jax.tree.map(lambda leaf, decays: leaf * factor if decays else leaf, start(), decays)
    assert relative_error(state.params, decayed) <= 1e-6
    unmoved = jax.tree.map(lambda before, after, decays: decays or np.array_equal(before, after), start(), state.params, decays)
    assert all(jax.tree.leaves(unmoved))


def test_weight_decay_is_for_matrices():
    decays = jax.tree.leaves_with_path(gpt(small_model(head="untied")).decays)
    names = {jax.tree_util.keystr(path[-1:], simple=True): value for path, value in decays}
    assert names == {"kernel": True, "token": True, "position": True, "output": True, "bias": False, "scale": False}


@pytest.mark.parametrize("data", [1, 8])
def test_evaluation_is_the_loss_without_dropout(data):
    config, batch = config_of(data, 1, 0.1), uneven_batch(0)
    model, layout = program(config).model, program(config).layout
    evaluate = build_eval_step(model, layout)
    losses, count = evaluate(start(), batch)
    assert count == np.sum(batch["loss_mask"])
    assert relative_error(losses, jax.jit(functools.partial(loss_of, model))(start(), batch)) <= FORWARD
    assert relative_error(losses / count, trained(2, 2, 0.0)[0].loss[0]) <= FORWARD


COLLECTIVES = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute|collective-broadcast"


def computations(text: str) -> dict[str, str]:
    """The text of every computation of an HLO module, by name."""
    found = re.finditer(r"^(?:ENTRY )?%?([\w.\-]+) \(.*?\{\n(.*?)^\}", text, re.MULTILINE | re.DOTALL)
    return {match[1]: match[2] for match in found}


def reachable(name: str, bodies: dict[str, str]) -> set[str]:
    """`name` and all computations it calls, directly or not."""
    seen, waiting = set(), [name]
    while waiting:
        current = waiting.pop()
        if current not in seen:
            seen.add(current)
            waiting += [called for called in re.findall(r"%([\w.\-]+)", bodies[current]) if called in bodies]
    return seen


def collectives(body: str) -> Iterator[tuple[str, int]]:
    """Kind and number of elements of every collective of two devices or more in the text of a computation."""
    for shapes, kind, rest in re.findall(rf"= (.*?) ({COLLECTIVES})(?:-start)?\((.*)", body):
        if not re.search(r"replica_groups=(\{(\{\d+\},?)+\}|\[\d+,1\])", rest):
            dims = re.findall(r"\w+\[([\d,]*)\]", shapes)
            yield kind, sum(int(np.prod([int(size) for size in dim.split(",") if size])) for dim in dims)


@pytest.fixture(scope="module")
def compiled() -> jax.stages.Compiled:
    trainer = program(config_of(8, 4, 0.1))
    return trainer.step.lower(trainer.place(start()), trainer.place_batch(uneven_batch(0))).compile()


@pytest.mark.xdist_group("compiled train step")
def test_gradients_are_reduced_once_after_the_microbatches(compiled):
    bodies = computations(compiled.as_text())
    loops = set(re.findall(r"body=%([\w.\-]+)", compiled.as_text()))
    assert loops, "the microbatches are a loop"
    in_loops = set().union(*(reachable(loop, bodies) for loop in loops))
    assert [found for name in in_loops for found in collectives(bodies[name])] == []
    outside = [found for name in bodies.keys() - in_loops for found in collectives(bodies[name])]
    assert {kind for kind, _ in outside} == {"all-reduce"}
    # Besides the gradients, the loss, the number of unmasked positions, and squares for the norm.
    assert 2 <= sum(size for _, size in outside) - num_parameters(config_of(8, 4).model) <= 6


@pytest.mark.xdist_group("compiled train step")
def test_state_is_updated_in_place(compiled):
    """The state is donated: its memory is the next state's."""
    trainer = program(config_of(8, 4, 0.1))
    state = trainer.place(start())
    assert compiled.memory_analysis().alias_size_in_bytes >= 12 * num_parameters(small_model())
    trainer.step(state, trainer.place_batch(uneven_batch(0)))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))
