"""A trained model out of a run directory, on the mesh it was trained on or on one device."""

import dataclasses
from typing import NamedTuple

import optax

from giantjax.checkpoint import load_params
from giantjax.config import MeshConfig, PipelineConfig, RunConfig, RuntimeConfig
from giantjax.model.gpt import GPT, model_on_mesh
from giantjax.parallel.mesh import build_mesh
from giantjax.parallel.stages import Params
from giantjax.training.disk import abstract_disk_state, disk_forms, to_device
from giantjax.training.optimizer import Optimizer
from giantjax.training.precision import DTYPES
from giantjax.training.run_directory import RunDirectory, read_record
from giantjax.training.state import Layout, abstract_state, layout_of


class Trained(NamedTuple):
    """A model with its parameters."""

    config: RunConfig
    model: GPT
    layout: Layout
    params: Params
    step: int


def load_trained(run: RunDirectory, mesh: MeshConfig | None = None) -> Trained:
    """The newest checkpoint of a run on `mesh`, by default one device.

    Raises:
        InputError: the directory holds no run or no whole checkpoint, or the mesh does not fit the devices.
    """
    config = read_record(run, run.config, RunConfig)
    config = dataclasses.replace(config, mesh=mesh or MeshConfig(), pipeline=PipelineConfig(), runtime=RuntimeConfig())
    model = model_on_mesh(config, DTYPES["fp32"])
    nothing = Optimizer(optax.identity(), optax.constant_schedule(0.0))
    layout = layout_of(model, nothing, build_mesh(config.mesh))
    forms = disk_forms(model, nothing, layout)
    step, params = load_params(run.checkpoints, config, abstract_disk_state(layout, forms).params)
    return Trained(config, model, layout, to_device(params, forms.params, abstract_state(layout).params), step)
