"""What a model comes to on a mesh, to be held against one device."""

from typing import Any

import jax
import optax

from giantjax.parallel.stages import Model
from giantjax.training.disk import disk_forms, to_disk
from giantjax.training.optimizer import Optimizer
from giantjax.training.state import init_state, layout_of
from giantjax.training.step import build_eval_step, build_train_step
from tests.helpers import FORWARD, GRADIENT, relative_error
from tests.test_equivalence import Case, mesh_of, recording


def measure(model: Model, case: Case, batch: Any) -> Any:
    """Losses and metrics of three steps, an evaluation, the first gradients and the last parameters, in the layout of the disk."""
    optimizer = Optimizer(recording(optax.adam(1e-2, eps=1e-3)), optax.constant_schedule(1e-2), clip_norm=0.1)
    mesh = mesh_of(case.pipe, case.replica, case.data, case.tensor)
    layout = layout_of(model, optimizer, mesh, case.zero, num_chunks=case.chunks, partition=case.partition)
    forms = disk_forms(model, optimizer, layout)
    state = init_state(model, optimizer, layout, 0)
    step = build_train_step(
        model,
        optimizer,
        layout,
        num_microbatches=case.microbatches,
        schedule=case.schedule,
        recompute=case.recompute,
        skips_head=case.skips_head,
    )
    total, weight = build_eval_step(model, layout, num_microbatches=case.microbatches)(state.params, batch)
    measured, gradients = [], None
    for number in range(3):
        state, metrics = step(state, batch)
        measured.append(jax.device_get((metrics.loss, metrics.grad_norm, metrics.reported)))
        gradients = gradients if number else jax.device_get(to_disk(state, forms).optimizer["last"])
    return measured, float(total / weight), gradients, jax.device_get(to_disk(state, forms).params)


def assert_equal(found: Any, expected: Any) -> None:
    """Make sure that two measurements agree."""
    assert relative_error([one[0] for one in found[0]], [one[0] for one in expected[0]]) <= FORWARD
    assert relative_error([one[1:] for one in found[0]], [one[1:] for one in expected[0]]) <= GRADIENT
    assert relative_error(found[1], expected[1]) <= FORWARD
    assert relative_error(found[2], expected[2]) <= GRADIENT
    assert relative_error(found[3], expected[3]) <= GRADIENT
