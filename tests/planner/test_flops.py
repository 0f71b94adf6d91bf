"""Counts of the planner against the model itself."""

import dataclasses

import jax
import pytest

from giantjax.config import MeshConfig
from giantjax.model.gpt import gpt
from giantjax.parallel.mesh import build_mesh
from giantjax.planner.flops import num_parameters
from giantjax.planner.memory import checkpoint_bytes, memory_need
from giantjax.training.optimizer import build_optimizer
from giantjax.training.state import layout_of
from tests.helpers import run_config, small_model


@pytest.mark.parametrize("tensor", [1, 4])
@pytest.mark.parametrize("head", ["tied", "untied"])
@pytest.mark.parametrize("feedforward_size", [None, 40])
def test_parameters_are_counted_exactly(head, tensor, feedforward_size):
    config = small_model(num_layers=3, head=head, feedforward_size=feedforward_size)
    shapes = jax.eval_shape(gpt(config, tensor=tensor).init, jax.random.key(0))
    assert num_parameters(config, tensor) == sum(leaf.size for leaf in jax.tree.leaves(shapes))


def test_state_takes_twelve_bytes_a_parameter():
    config = run_config(small_model(), num_steps=10, batch_size=8)
    model = gpt(config.model)
    state = layout_of(model, build_optimizer(config, model.decays), build_mesh(config.mesh)).shapes
    counters = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state) if leaf.ndim == 0)
    actual = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state)) - counters
    assert actual == 12 * num_parameters(config.model) == memory_need(config, "fp32").state == checkpoint_bytes(config)
    assert memory_need(config, "bf16").state == actual
    spread = dataclasses.replace(config, mesh=MeshConfig(data=8))
    assert memory_need(spread, "fp32").state == actual
