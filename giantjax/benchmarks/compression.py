"""What rounding gradients between nodes costs in loss: the same run with none, bf16 and int8, with and without feedback."""

import dataclasses
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from giantjax import command_line, runtime
from giantjax.config import MeshConfig, RunConfig, RuntimeConfig
from giantjax.errors import InputError
from giantjax.parallel.collectives import BYTES_A_VALUE, Compression


@dataclass(frozen=True)
class Compressed:
    """Train gpt_tiny on replicas whose gradients are rounded, and compare the losses."""

    steps: int = 500
    """Of each run."""
    replicas: int = 4
    """Nodes, simulated as one device each."""
    config: str = "gpt_tiny"
    """A shipped config, or the path of a Python file."""

    def __post_init__(self) -> None:
        if self.steps < 1 or self.replicas < 2:
            raise InputError(f"--steps is {self.steps} and --replicas {self.replicas}; they must be at least 1 and 2")


RUNS: tuple[tuple[Compression, bool], ...] = (("none", True), ("bf16", True), ("bf16", False), ("int8", True), ("int8", False))


def compression(arguments: Compressed) -> int:
    """Print the table."""
    base = command_line.preset(arguments.config)
    runtime.start(RuntimeConfig(num_cpu_devices=arguments.replicas))
    table = Table("rounding", "errors fed back", "bytes a value", "validation loss, nats", "difference", box=None)
    exact = 0.0
    for rounding, feedback in RUNS:
        training = dataclasses.replace(base.training, num_steps=arguments.steps, compression=rounding, precision="fp32")
        config = dataclasses.replace(base, training=training, mesh=MeshConfig(replica=arguments.replicas))
        loss = _final_loss(config, feedback)
        exact = loss if rounding == "none" else exact
        fed = "" if rounding == "none" else "yes" if feedback else "no"
        table.add_row(rounding, fed, f"{BYTES_A_VALUE[rounding]:.2f}", f"{loss:.5f}", f"{loss / exact - 1:+.3%}")
    console = Console(highlight=False)
    console.print(table)
    console.print(f"{base.name}, {arguments.steps} steps on {arguments.replicas} replicas; losses on the same held-out samples")
    return 0


def _final_loss(config: RunConfig, feedback: bool) -> float:
    """Loss on held-out data after training; without `feedback` what is rounded off is forgotten in each step."""
    from giantjax.data.sources import open_sources
    from giantjax.training.loop import Evaluation, assemble, batches_on_mesh
    from giantjax.training.state import init_state, without_errors
    from giantjax.training.step import build_eval_step, build_train_step

    train_data, validation_data = open_sources(config)
    parts = assemble(config)
    state = init_state(parts.model, parts.optimizer, parts.layout, config.seed)
    train_step = build_train_step(parts.model, parts.optimizer, parts.layout, num_microbatches=config.num_microbatches)
    batches = batches_on_mesh(parts, train_data, start_sample=0)
    for _ in range(config.training.num_steps):
        if not feedback:
            state = state._replace(feedback=without_errors(parts.layout))
        state, metrics = train_step(state, next(batches))
        # Simulated devices share one pool of threads: steps that pile up would wait for each other in collectives.
        metrics.loss.block_until_ready()
    evaluate = Evaluation(config, validation_data, build_eval_step(parts.model, parts.layout), parts.placement)
    return evaluate(state)
