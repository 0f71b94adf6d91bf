"""fp16: the scale's rules, one decision over all devices, what is skipped, and how well it trains."""

import dataclasses
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding

from giantjax.config import LossScaleConfig
from giantjax.errors import TrainingFault
from giantjax.training.loss_scale import initial_scale, next_scale
from giantjax.training.optimizer import Optimizer
from giantjax.training.precision import resolve_precision
from giantjax.training.state import init_state, layout_of
from giantjax.training.step import BATCH_SPEC, build_train_step
from tests.helpers import relative_error
from tests.test_equivalence import Case, batch_of, mesh_of, model_of
from tests.training.runs import changed, measured, small_run, train_here, write_corpus


def scales(config: LossScaleConfig, overflows: str) -> list[float]:
    """The scale after each step; `x` is an overflow, `.` is none."""
    state, found = initial_scale(config), []
    for step in overflows:
        state = next_scale(config, state, jnp.bool_(step == "."))
        found.append(float(state.scale))
    assert int(state.skipped) == overflows.count("x")
    assert int(state.in_a_row) == len(overflows) - len(overflows.rstrip("x"))
    return found


@pytest.mark.parametrize(
    ("changes", "overflows", "expected"),
    [
        ({}, "......", [8, 8, 16, 16, 16, 32]),
        ({}, "x.....", [8, 8, 8, 16, 16, 16]),
        ({}, "xxx...", [8, 4, 2, 2, 2, 4]),
        # Patience is not renewed by good steps, only by growth.
        ({}, "x.x.xx", [8, 8, 4, 4, 2, 1]),
        ({}, "...x..", [8, 8, 16, 16, 16, 16]),
        ({"floor": 4.0}, "xxxx", [8, 4, 4, 4]),
        ({"ceiling": 20.0}, "......", [8, 8, 16, 16, 16, 20]),
        ({"hysteresis": 1}, "xx", [4, 2]),
        ({"static": 64.0}, "xx....", [64] * 6),
    ],
)
def test_rules_of_the_scale(changes: dict[str, Any], overflows: str, expected: list[float]) -> None:
    config = dataclasses.replace(LossScaleConfig(initial=8.0, growth_interval=3), **changes)
    assert scales(config, overflows) == expected


class Device:
    def __init__(self, capability: str | None):
        self.platform, self.device_kind = ("gpu" if capability else "cpu"), "some GPU"
        self.compute_capability = capability


@pytest.mark.parametrize(
    ("capability", "expected"), [(None, "fp32"), ("6.1", "fp32"), ("7.0", "fp16"), ("7.5", "fp16"), ("8.0", "bf16"), ("9.0", "bf16")]
)
def test_auto(capability: str | None, expected: str) -> None:
    device: Any = Device(capability)
    assert resolve_precision("auto", device)[0] == expected
    assert resolve_precision("fp16", device)[0] == "fp16"


@lru_cache
def program(case: Case, scale: float) -> Any:
    model = model_of(case)
    optimizer = Optimizer(optax.adamw(1e-2), optax.constant_schedule(1e-2), 1.0)
    scaling = LossScaleConfig(initial=scale, growth_interval=5) if case.dtype == "float16" else None
    mesh = mesh_of(case.pipe, case.replica, case.data, case.tensor)
    layout = layout_of(model, optimizer, mesh, case.zero, case.compression, scaling)  # type: ignore[arg-type]
    return model, optimizer, layout, build_train_step(model, optimizer, layout, num_microbatches=case.microbatches)


def trained(case: Case, steps: int, scale: float = 2.0**12) -> tuple[list[float], Any]:
    model, optimizer, layout, step = program(case, scale)
    state, losses = jax.block_until_ready(init_state(model, optimizer, layout, 0)), []
    batch = jax.block_until_ready(jax.device_put(batch_of(), NamedSharding(layout.mesh, BATCH_SPEC)))
    for _ in range(steps):
        state, metrics = step(state, batch)
        losses.append(float(metrics.loss))
    return losses, state


ONE = Case(dtype="float16", dropout=0.0)
MESHES = [
    dataclasses.replace(ONE, pipe=2, data=2, tensor=2, microbatches=4, zero=2),
    dataclasses.replace(ONE, pipe=2, replica=2, data=2, microbatches=2, zero=3, compression="int8"),
]


@pytest.mark.parametrize("case", [ONE, *MESHES], ids=str)
def test_fp16_follows_fp32(case: Case) -> None:
    wide, (narrow, state) = trained(dataclasses.replace(ONE, dtype="float32"), 12)[0], trained(case, 12)
    assert relative_error(narrow, wide) < 0.02
    # It has grown meanwhile, and nothing was skipped: the loss is reported without it.
    assert float(state.scaling.scale) > 2.0**12 and int(state.scaling.skipped) == 0


@pytest.mark.parametrize("case", MESHES, ids=str)
def test_an_overflow_on_one_stage_skips_the_step_on_all(case: Case) -> None:
    step = program(case, 2.0**12)[-1]
    _, state = trained(case, 2)
    bias = state.params["blocks"]["feedforward"]["down"]["bias"]
    # The last layer, hence the last stage, alone: 1e5 is more than fp16 holds.
    poisoned = jax.device_put(np.asarray(bias) + 1e5 * (np.arange(4) == 3)[:, None], bias.sharding).astype(bias.dtype)
    state.params["blocks"]["feedforward"]["down"]["bias"] = poisoned
    before = jax.device_get(state)
    after, metrics = step(state, batch_of())
    assert not np.isfinite(metrics.grad_norm)
    assert (int(metrics.skipped), int(metrics.skipped_in_a_row)) == (1, 1)
    for part in ("params", "optimizer", "feedback"):
        same = jax.tree.map(np.array_equal, jax.device_get(getattr(after, part)), getattr(before, part))
        assert jax.tree.all(same), part
    for leaf in jax.tree.leaves(after.params):
        pieces: dict[Any, np.ndarray] = {}
        for shard in leaf.addressable_shards:
            assert np.array_equal(pieces.setdefault(str(shard.index), np.asarray(shard.data)), shard.data)
    assert int(after.step) == int(before.step) + 1


def test_a_run_skips_reports_resumes_and_stops(tmp_path: Any) -> None:
    """At a scale far too large: it falls to what fp16 holds, as the records say, in one run or in two."""
    corpus = write_corpus(tmp_path / "corpus")
    wild = {"training.precision": "fp16", "training.num_steps": 12, "training.eval_every": 0, "checkpoint.every": 4}
    wild |= {"loss_scale.initial": 2.0**24, "loss_scale.hysteresis": 1, "loss_scale.growth_interval": 100}
    whole = small_run(tmp_path / "whole", corpus, **wild)
    assert train_here(whole) == 0
    records = measured(whole)
    skipped = [record["skipped"] for record in records]
    assert 0 < skipped[-1] < 12 and skipped == sorted(skipped)
    assert records[-1]["loss_scale"] == 2.0 ** (24 - skipped[-1])
    assert [record["consumed_samples"] for record in records] == [8 * step for step in range(1, 13)]
    # A skipped step does not move the schedule of the learning rate.
    assert records[skipped[-1]]["learning_rate"] == records[0]["learning_rate"]
    halves = changed(whole, **{"run_dir": str(tmp_path / "halves"), "training.num_steps": 4})
    assert train_here(halves) == 0
    halves = changed(halves, **{"training.num_steps": 12})
    assert train_here(halves) == 0
    assert measured(halves) == records
    stuck = changed(whole, **{"run_dir": str(tmp_path / "stuck"), "loss_scale.static": 2.0**40, "loss_scale.skip_limit": 5})
    with pytest.raises(TrainingFault, match="at step 5 gradients overflowed for the 5th time in a row"):
        train_here(stuck)
