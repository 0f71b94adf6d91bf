"""What a run is made of, from its configuration: its model, its layout on a mesh, its step."""

import dataclasses
from pathlib import Path
from typing import NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding

from giantjax.config import RunConfig
from giantjax.model.gpt import GPT, model_on_mesh, whole_head
from giantjax.parallel.mesh import build_mesh
from giantjax.parallel.nodes import Nodes
from giantjax.parallel.stages import Model
from giantjax.training.disk import disk_forms
from giantjax.training.optimizer import Optimizer, build_optimizer
from giantjax.training.precision import DTYPES, resolve_precision
from giantjax.training.profile import Profile, profile_of
from giantjax.training.state import Layout, TrainState, layout_of
from giantjax.training.step import BATCH_SPEC, build_train_step


class Parts(NamedTuple):
    """What a run is made of, before it has a state."""

    config: RunConfig
    """With the precision resolved, and the partition if it was measured."""
    reason: str
    """Why that precision."""
    model: GPT
    """With the head whole, as evaluation runs it."""
    optimizer: Optimizer
    layout: Layout
    forms: TrainState
    profile: Profile | None
    """What a partition by measured times was made of."""

    @property
    def placement(self) -> NamedSharding:
        """Of batches."""
        return NamedSharding(self.layout.mesh, BATCH_SPEC)


def assemble(config: RunConfig, nodes: Nodes | None = None, partition: Path | None = None) -> Parts:
    """The parts of the run that `config` describes, on the devices there are; its measured partition may be on record at a path."""
    mesh = build_mesh(config.mesh, nodes)
    precision, reason = resolve_precision(config.training.precision, jax.local_devices()[0])
    config = dataclasses.replace(config, training=dataclasses.replace(config.training, precision=precision))
    model = model_on_mesh(whole_head(config), DTYPES[precision])
    optimizer = build_optimizer(config, model.decays)
    profile = None
    if config.pipeline.partition == "profile":
        profile = profile_of(config, model, mesh, partition)
        config = dataclasses.replace(config, pipeline=dataclasses.replace(config.pipeline, partition=profile.partition))
    layout = layout_of_run(config, model, optimizer, mesh)
    return Parts(config, reason, model, optimizer, layout, disk_forms(model, optimizer, layout), profile)


def layout_of_run(config: RunConfig, model: Model, optimizer: Optimizer, mesh: Mesh) -> Layout:
    """Where the state of a run lies; its precision is resolved, and its partition measured."""
    return layout_of(
        model,
        optimizer,
        mesh,
        config.training.zero_stage,
        config.training.compression,
        config.loss_scale if config.training.precision == "fp16" else None,
        num_chunks=config.pipeline.num_chunks,
        partition=config.pipeline.partition,
    )


def train_step_of_run(config: RunConfig, optimizer: Optimizer, layout: Layout) -> jax.stages.Wrapped:
    """The train step of a run, whose model may share its head, which evaluation does not; its precision is resolved."""
    return build_train_step(
        model_on_mesh(config, DTYPES[config.training.precision]),
        optimizer,
        layout,
        num_microbatches=config.num_microbatches,
        schedule=config.pipeline.schedule,
        recompute=config.training.recompute,
        skips_head=config.pipeline.head == "last",
    )
