"""Learning-rate schedules at their corners, and weight decay where it belongs."""

import json
import math

import jax
import numpy as np
import optax
import pytest

from giantjax.training.optimizer import build_optimizer, clipped, learning_rate_schedule
from tests.helpers import relative_error, run_config, small_model

PEAK, LEAST = 1e-3, 1e-4


def rates(counts, *, num_steps: int = 100, batch_size: int = 8, **optimizer) -> list[float]:
    """Learning rate of the next step after each of `counts` steps."""
    config = run_config(small_model(), num_steps=num_steps, batch_size=batch_size, learning_rate=PEAK, min_learning_rate=LEAST, **optimizer)
    schedule = jax.jit(learning_rate_schedule(config))
    return [float(schedule(np.int32(count))) for count in counts]


@pytest.mark.parametrize(
    ("options", "corners"),
    [
        (dict(schedule="cosine", warmup=20), {60: (PEAK + LEAST) / 2, 40: LEAST + (PEAK - LEAST) * (1 + math.sqrt(0.5)) / 2, 100: LEAST}),
        (dict(schedule="linear", warmup=20), {60: (PEAK + LEAST) / 2, 40: PEAK - (PEAK - LEAST) / 4, 100: LEAST}),
        (dict(schedule="constant", warmup=20), {60: PEAK, 100: PEAK}),
        # The decay is the last fifth of the run.
        (dict(schedule="wsd", warmup=20), {60: PEAK, 80: PEAK, 90: (PEAK + LEAST) / 2, 100: LEAST}),
        (dict(schedule="wsd", warmup=20, decay=40), {60: PEAK, 80: (PEAK + LEAST) / 2, 100: LEAST}),
        (dict(schedule="cosine", warmup=20, decay=40), {40: (PEAK + LEAST) / 2, 60: LEAST, 80: LEAST, 100: LEAST}),
        (dict(schedule="linear", warmup=20, decay=40), {40: (PEAK + LEAST) / 2, 60: LEAST, 80: LEAST, 100: LEAST}),
    ],
)
def test_rates_at_the_corners(options, corners):
    corners = {0: 0.0, 1: PEAK / 20, 10: PEAK / 2, 19: PEAK * 19 / 20, 20: PEAK} | corners
    assert rates(corners, **options) == pytest.approx(list(corners.values()), rel=1e-5)


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant", "wsd"])
def test_without_warmup_the_first_step_has_the_peak_rate(schedule):
    assert rates([0, 100], schedule=schedule) == pytest.approx([PEAK, PEAK if schedule == "constant" else LEAST], rel=1e-5)


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant", "wsd"])
def test_a_run_shorter_than_its_warmup_ends_inside_it(schedule):
    assert rates(range(6), num_steps=5, schedule=schedule, warmup=10) == pytest.approx([PEAK * n / 10 for n in range(6)], rel=1e-5)


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant", "wsd"])
@pytest.mark.parametrize("decay", [None, 30])
def test_counting_samples_agrees_with_counting_steps(schedule, decay):
    in_steps = rates(range(101), schedule=schedule, warmup=20, decay=decay)
    in_samples = rates(range(101), schedule=schedule, unit="samples", warmup=20 * 8, decay=decay and decay * 8)
    assert in_samples == pytest.approx(in_steps, rel=1e-5)


def test_rates_equal_megatrons(shared):
    log = json.loads((shared / "data/megatron/train_golden/log.json").read_text())["log"]
    config = run_config(small_model(), num_steps=60, batch_size=8, learning_rate=3e-3, min_learning_rate=3e-4, warmup=10)
    found = [float(learning_rate_schedule(config)(entry["iter"] - 1)) for entry in log]
    assert found == pytest.approx([entry["lr"] for entry in log], rel=1e-6, abs=1e-9)


def test_one_step_is_adamw_by_its_formula():
    config = run_config(
        small_model(), num_steps=10, batch_size=8, learning_rate=0.1, schedule="constant", weight_decay=0.5, epsilon=1e-3, clip_norm=2.0
    )
    optimizer = build_optimizer(config, {"matrix": True, "vector": False})
    transform, limit = optimizer.transform, optimizer.clip_norm
    update = jax.jit(lambda grads, state, params: transform.update(clipped(grads, optax.global_norm(grads), limit), state, params))
    params = {"matrix": np.array([[1.0, -2.0]], np.float32), "vector": np.array([3.0], np.float32)}
    grads = [{"matrix": np.array([[3.0, 0.0]]), "vector": np.array([4.0])}, {"matrix": np.array([[0.5, 0.5]]), "vector": np.array([-1.0])}]
    state, expected = transform.init(params), {name: np.asarray(p, np.float64) for name, p in params.items()}
    first, second = ({name: np.zeros(p.shape) for name, p in params.items()} for _ in range(2))
    for count, grad in enumerate(grads, start=1):
        updates, state = update(jax.tree.map(np.float32, grad), state, params)
        params = jax.tree.map(np.add, params, jax.device_get(updates))
        # Only the first gradient, of norm 5, is clipped.
        norm = math.sqrt(sum(float(np.sum(g**2)) for g in grad.values()))
        for name, decay in (("matrix", 0.5), ("vector", 0.0)):
            scaled = grad[name] * min(1, 2 / norm)
            first[name] = 0.9 * first[name] + 0.1 * scaled
            second[name] = 0.95 * second[name] + 0.05 * scaled**2
            direction = first[name] / (1 - 0.9**count) / (np.sqrt(second[name] / (1 - 0.95**count)) + 1e-3)
            expected[name] = expected[name] - 0.1 * (direction + decay * expected[name])
        assert relative_error(params, expected) <= 1e-6
