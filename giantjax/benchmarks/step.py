"""The train step on this machine beside the same model in eager PyTorch: speed, time to the first step, memory.

Each side runs in a process of its own, in turn, so that neither is charged for the other's imports or memory.
"""

import importlib.util
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

from giantjax import command_line, runtime
from giantjax.config import ModelConfig, RunConfig
from giantjax.errors import InputError
from giantjax.planner.flops import num_parameters


@dataclass(frozen=True)
class Step:
    """Time the train step of gpt_tiny and of an 11M-parameter GPT, beside PyTorch where it is installed."""

    steps: int = 30
    """Steps timed in each process, after three that are not."""
    rounds: int = 2
    """Processes of each side."""
    only: Literal["giantjax", "pytorch"] | None = None
    """Run one side in this process and print its figures as JSON; what the benchmark calls itself with."""
    size: Literal["tiny", "11m"] = "tiny"
    """Model for `only`."""

    def __post_init__(self) -> None:
        if self.steps < 1 or self.rounds < 1:
            raise InputError(f"--steps is {self.steps} and --rounds {self.rounds}; each must be at least 1")


def config_of(size: str) -> RunConfig:
    """gpt_tiny, or 6 layers of 384 with a window of 256, both on byte vocabularies."""
    tiny = command_line.preset("gpt_tiny")
    if size == "tiny":
        return tiny
    model = ModelConfig(num_layers=6, hidden_size=384, num_heads=6, sequence_length=256, vocabulary_size=257, vocabulary_multiple=8)
    return replace(tiny, name="gpt_11m", model=model, training=replace(tiny.training, global_batch_size=8))


def step(arguments: Step) -> int:
    """Print the table."""
    if arguments.only:
        measure = {"giantjax": _giantjax, "pytorch": _pytorch}[arguments.only]
        print(json.dumps(measure(config_of(arguments.size), arguments.steps)))
        return 0
    sides = ["giantjax"] + (["pytorch"] if importlib.util.find_spec("torch") else [])
    table = Table("model", "side", "step", "tokens/s", "first step, cold", "first step, warm", "peak memory", box=None)
    for size in ("tiny", "11m"):
        config = config_of(size)
        found: dict[str, list[dict[str, float]]] = {side: [] for side in sides}
        # One process more, so that the first fills the compilation cache.
        for _ in range(arguments.rounds + 1):
            for side in sides:
                found[side].append(_child(side, size, arguments.steps))
        for side in sides:
            cold, *warm = found[side]
            seconds, first, memory = (statistics.median(one[name] for one in warm) for name in ("step_s", "first_s", "memory"))
            tokens = config.training.global_batch_size * config.model.sequence_length
            name = f"{config.name} ({num_parameters(config.model) / 1e6:.1f}M)"
            table.add_row(
                *(name, side, f"{1e3 * seconds:.0f} ms", f"{tokens / seconds:,.0f}"),
                *(f"{cold['first_s']:.1f} s", f"{first:.1f} s", f"{memory / 2**20:.0f} MiB"),
            )
        if len(sides) == 2:
            ratios = [
                statistics.median(ours[k] / theirs[k] for ours, theirs in zip(*found.values(), strict=True)) for k in found[sides[0]][0]
            ]
            table.add_row(
                "", "giantjax / pytorch", *(f"{ratios[0]:.2f}", f"{1 / ratios[0]:.2f}", "", f"{ratios[1]:.2f}", f"{ratios[2]:.2f}")
            )
    console = Console(highlight=False)
    console.print(table)
    console.print("step: median; first step: from the start of the process to the end of the first step, imports included")
    if len(sides) == 1:
        console.print("PyTorch is not installed, so only one side was measured; pip install -e '.[torch]' brings it")
    return 0


def _child(side: str, size: str, steps: int) -> dict[str, float]:
    command = [sys.executable, sys.argv[0], "step", "--only", side, "--size", size, "--steps", str(steps)]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def _timed(run_step: Callable[[], Any], steps: int, started: float) -> dict[str, float]:
    """Figures of a side whose `run_step` does one step and waits for it."""
    run_step()
    first = time.time() - started
    for _ in range(2):
        run_step()
    times = []
    for _ in range(steps):
        begin = time.perf_counter()
        run_step()
        times.append(time.perf_counter() - begin)
    # Linux counts ru_maxrss in KiB.
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"step_s": statistics.median(times), "first_s": first, "memory": memory}


def _process_start() -> float:
    import psutil

    return psutil.Process().create_time()


def _giantjax(config: RunConfig, steps: int) -> dict[str, float]:
    from giantjax.data.corpora import Synthetic
    from giantjax.data.loader import training_batches

    runtime.start(replace(config.runtime, num_cpu_devices=1))
    from giantjax.model.gpt import gpt
    from giantjax.parallel.mesh import build_mesh
    from giantjax.training.optimizer import build_optimizer
    from giantjax.training.state import init_state, layout_of
    from giantjax.training.step import build_train_step

    model = gpt(config.model)
    optimizer = build_optimizer(config, model.decays)
    layout = layout_of(model, optimizer, build_mesh(config.mesh))
    state = init_state(model, optimizer, layout, config.seed)
    train_step = build_train_step(model, optimizer, layout)
    batches = training_batches(
        Synthetic(0),
        seed=0,
        sequence_length=config.model.sequence_length,
        global_batch_size=config.training.global_batch_size,
        start_sample=0,
        vocabulary_size=config.model.vocabulary_size,
        prefetch=4,
    )

    def run_step() -> None:
        nonlocal state
        state, metrics = train_step(state, next(batches))
        metrics.loss.block_until_ready()

    figures = _timed(run_step, steps, _process_start())
    batches.close()
    return figures


def _pytorch(config: RunConfig, steps: int) -> dict[str, float]:
    import torch

    from giantjax.benchmarks.torch_gpt import GPT, adamw

    model = GPT(config.model)
    optimizer = adamw(model, config.optimizer)
    shape = (config.training.global_batch_size, config.model.sequence_length + 1)

    def run_step() -> None:
        tokens = torch.randint(0, config.model.vocabulary_size, shape)
        optimizer.zero_grad()
        model(tokens[:, :-1], tokens[:, 1:]).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.optimizer.clip_norm or float("inf"))
        optimizer.step()

    return _timed(run_step, steps, _process_start())
