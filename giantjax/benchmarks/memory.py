"""The memory and traffic that the planner estimates, beside those of programs compiled for GPUs that are not here.

The compiled figures are kept in a CSV file, so that the estimate can be held against them in a moment.
"""

import csv
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from giantjax import command_line, runtime
from giantjax.benchmarks.cells import read_cells
from giantjax.cluster import Cluster, cluster_of_name
from giantjax.config import ModelConfig, RunConfig, RuntimeConfig
from giantjax.errors import InputError
from giantjax.planner.automatic import with_plan
from giantjax.planner.cost import step_cost
from giantjax.planner.plan import GIANTJAX, Plan
from giantjax.planner.stage_memory import stage_memory

MESH = ("pipe", "replica", "data", "tensor")
COUNTS = (*MESH, "microbatch_size", "num_microbatches", "zero_stage")
WORDS = ("schedule", "recompute", "compression")
FIGURES = ("memory_bytes", "argument_bytes", "network_bytes", "compile_s")
COLUMNS = ("config", "cluster", *COUNTS[:6], *WORDS[:2], "zero_stage", "compression", "held_out", *FIGURES)


@dataclass(frozen=True)
class Estimates:
    """Hold the planner's estimate of memory and traffic against compiled programs."""

    data: str
    """CSV file of plans and what they compiled to; tests/planner/compiled.csv is the one that the constants are fitted to."""
    compile: str = "none"
    """none reads the figures of the file; missing compiles the plans that have none and adds theirs; all compiles every plan anew."""

    def __post_init__(self) -> None:
        if self.compile not in ("none", "missing", "all"):
            raise InputError(f"--compile is {self.compile!r}; it must be none, missing or all")


@dataclass(frozen=True)
class Compiled:
    """A plan and what its program takes; figures of 0 are unknown."""

    config: str
    cluster: str
    plan: Plan
    held_out: bool
    """Whether the constants were fitted without it."""
    memory_bytes: int = 0
    """Of one GPU: arguments, outputs that do not take their place, temporary."""
    argument_bytes: int = 0
    """Of `memory_bytes`, state and batch."""
    network_bytes: int = 0
    """Between nodes a step, all GPUs together."""
    compile_s: float = 0.0

    @property
    def run(self) -> RunConfig:
        """The preset with this plan and the batch that it makes."""
        config = with_plan(command_line.preset(self.config), self.plan)
        return replace(config, training=replace(config.training, global_batch_size=self.plan.samples))

    @property
    def model(self) -> ModelConfig:
        """Of the preset."""
        return command_line.preset(self.config).model

    @property
    def target(self) -> Cluster:
        """Of the name."""
        return cluster_of_name(self.cluster)

    @property
    def memory_error(self) -> float:
        """Estimate over compiled program, less 1."""
        return max(stage.program for stage in stage_memory(self.model, self.plan, GIANTJAX)) / self.memory_bytes - 1

    @property
    def network_error(self) -> float:
        """The same of bytes between nodes."""
        return step_cost(self.model, self.plan, self.target, GIANTJAX).network_bytes / self.network_bytes - 1


def read_compiled(path: Path) -> list[Compiled]:
    """The plans of a file.

    Raises:
        InputError: it cannot be read, or a column or a number is missing.
    """
    rows = read_cells(path, COLUMNS)
    try:
        return [_compiled(cells) for _, cells in rows]
    except ValueError as error:
        raise InputError(f"{path} cannot be read as a table of compiled plans: {error}") from error


def _compiled(cells: dict[str, str]) -> Compiled:
    plan = Plan(**{name: int(cells[name]) for name in COUNTS}, **{name: cells[name] for name in WORDS})  # type: ignore[arg-type]
    memory, arguments, network = (int(cells[name] or 0) for name in FIGURES[:3])
    held_out, seconds = bool(int(cells["held_out"])), float(cells["compile_s"] or 0)
    return Compiled(cells["config"], cells["cluster"], plan, held_out, memory, arguments, network, seconds)


def write_compiled(path: Path, plans: Sequence[Compiled]) -> None:
    """The inverse of `read_compiled`."""
    with path.open("w", newline="", encoding="utf-8") as file:
        table = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        table.writeheader()
        for one in plans:
            cells: dict[str, Any] = {name: getattr(one.plan, name) for name in (*COUNTS, *WORDS)}
            cells |= {name: getattr(one, name) or "" for name in FIGURES}
            table.writerow(cells | {"config": one.config, "cluster": one.cluster, "held_out": int(one.held_out)})


def compiled_anew(one: Compiled) -> Compiled:
    """`one` with the figures of its program, compiled here in 16 bits.

    Raises:
        InputError: this installation cannot compile for its GPUs.
    """
    # Imported here: it starts JAX.
    from giantjax.compile_check import compile_plan

    report = compile_plan(one.run, one.target, compute="fp16" if one.target.gpu.family == "V100" else "bf16")
    return replace(
        one,
        memory_bytes=report.memory.total,
        argument_bytes=report.memory.arguments,
        network_bytes=round(report.network_bytes),
        compile_s=round(report.compile_s, 1),
    )


def estimates(arguments: Estimates) -> int:
    """Print the table, plan by plan, and how far off the estimate is."""
    path = Path(arguments.data)
    plans = read_compiled(path)
    if arguments.compile != "none":
        runtime.start(RuntimeConfig(num_cpu_devices=1, compilation_cache="off"))
        for place, one in enumerate(plans):
            if arguments.compile == "all" or not one.memory_bytes:
                plans[place] = compiled_anew(one)
                # After each, so that what was compiled is not lost.
                write_compiled(path, plans)
    known = [one for one in plans if one.memory_bytes]
    if not known:
        raise InputError(f"{path} has no plan with figures; --compile missing adds them")
    show(known)
    return 0


def show(plans: Sequence[Compiled]) -> None:
    """The table, then the errors of fitted and held-out plans."""
    titles = (
        "model",
        "cluster",
        "p x r x d x t",
        "microbatches",
        "recompute",
        "ZeRO",
        "compression",
        "compiled",
        "estimate",
        "between nodes",
    )
    table = Table(*titles, "estimate", "fitted", box=None)
    for one in plans:
        plan = one.plan
        table.add_row(
            *(one.config, one.cluster, "x".join(str(getattr(plan, axis)) for axis in MESH)),
            f"{plan.num_microbatches} of {plan.microbatch_size}" + ("" if plan.schedule == "1f1b" else f" {plan.schedule}"),
            *(plan.recompute, str(plan.zero_stage), plan.compression, f"{one.memory_bytes / 1e9:.2f} GB", f"{one.memory_error:+.1%}"),
            *(f"{one.network_bytes / 1e9:.4g} GB", f"{one.network_error:+.1%}", "no" if one.held_out else "yes"),
        )
    Console(highlight=False, width=160).print(table)
    for words, kind in (("fitted", False), ("held out", True)):
        some = [one for one in plans if one.held_out == kind]
        if some:
            memory, network = ([abs(getattr(one, name)) for one in some] for name in ("memory_error", "network_error"))
            print(
                f"{words}: {len(some)} plans; memory {sum(memory) / len(some):.1%} off on average, {max(memory):.1%} at most; "
                f"bytes between nodes {sum(network) / len(some):.1%}, {max(network):.1%}"
            )
