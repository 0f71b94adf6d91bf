"""The pipeline compiled for GPUs that are not here: memory, bytes between nodes, and how much of each hop lies over compute."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Console
from rich.table import Table

from giantjax import command_line, runtime
from giantjax.cluster import Cluster, cluster_of_name
from giantjax.config import MeshConfig, RunConfig, RuntimeConfig
from giantjax.errors import InputError
from giantjax.planner.automatic import plan_of
from giantjax.planner.memory import in_words
from giantjax.planner.plan import GIANTJAX
from giantjax.planner.search import price


@dataclass(frozen=True)
class Pipeline:
    """Compile a run for clusters that are not here; read memory, traffic and overlap out of the result."""

    config: str = "gpt13b"
    """A shipped config, or the path of a Python file."""
    target: tuple[str, ...] = ("a100x4-tcp100", "v100x4-tcp100")
    """Clusters to compile for."""
    mesh: tuple[str, ...] = ("4x1x1x8", "4x1x2x4")
    """PIPExREPLICAxDATAxTENSOR; the product is the number of GPUs."""
    schedule: tuple[str, ...] = ("1f1b", "1f1b+shared", "interleaved:2", "interleaved:2+shared", "zero-bubble", "gpipe")
    """Pipeline schedules, with their chunks, and what computes the head: SCHEDULE[:CHUNKS][+last|+shared]."""
    recompute: tuple[str, ...] = ("none", "selective", "full")
    """Recompute policies of the first schedule. Others are compiled with the first; GPipe, which keeps every microbatch, with the last."""
    zero_stage: int = 0
    """What the data axis shards."""
    products: tuple[str, ...] = ("triton", "cublas")
    """What computes matrix products; of the second only the first policy is compiled."""

    def __post_init__(self) -> None:
        for name in ("target", "mesh", "schedule", "recompute", "products"):
            if not getattr(self, name):
                raise InputError(f"--{name} is empty; name at least one")
        for words in self.schedule:
            name, number, head = _parts(words)
            if not number.isdecimal() or head not in ("everywhere", "last", "shared"):
                raise InputError(f"--schedule {words} is not SCHEDULE[:CHUNKS][+last|+shared], such as interleaved:2+shared")
        for words in self.mesh:
            parts = words.split("x")
            if len(parts) != 4 or not all(part.isdecimal() and int(part) for part in parts):
                raise InputError(f"--mesh {words} is not PIPExREPLICAxDATAxTENSOR, such as 4x1x2x4")


def pipeline(arguments: Pipeline) -> int:
    """Print the table."""
    base = command_line.preset(arguments.config)
    # Compiled programs are timed, so none is taken from a cache.
    runtime.start(RuntimeConfig(num_cpu_devices=1, compilation_cache="off"))
    from giantjax.compile_check import compile_lowered, lower_plan
    from giantjax.compile_report import Report

    titles = [
        "cluster",
        "mesh",
        "microbatch",
        "schedule",
        "recompute",
        "products",
        "memory",
        "of",
        "boundaries",
        "head",
        "gradients",
        "else",
    ]
    table = Table(*titles, "hidden forward", "back", "sums in ticks", "compile", "step", box=None)
    console = Console(highlight=False, width=220)

    def row(report: Report, words: str) -> None:
        config, foretold = report.config, report.foretold
        table.add_row(
            *(report.cluster.name, words, f"{config.microbatch_size}", _in_words(config), config.training.recompute),
            *(f"{'triton' if report.triton else 'cublas'} {report.compute}", in_words(report.memory.total)),
            in_words(report.memory.usable) + ("" if report.fits else " no"),
            f"{report.boundary_bytes / 1e9:.2f} GB {report.boundary_bytes / max(foretold.boundaries, 1):.3f}",
            f"{report.head_bytes / 1e9:.2f} GB {report.head_bytes / foretold.head:.3f}" if foretold.head else "",
            f"{report.gradient_bytes / 1e9:.2f} GB {report.gradient_bytes / max(foretold.gradients, 1):.3f}",
            f"{report.other_bytes:.0f}",
            *(f"{report.hidden(direction):.1%}" for direction in ("forward", "backward")),
            *(f"{len(report.gradient_sums_in_loops)}", f"{report.compile_s:.0f} s", f"{_expected(config, report.cluster):.2f} s"),
        )

    for name, words in itertools.product(arguments.target, arguments.mesh):
        cluster = cluster_of_name(name)
        for config in _variants(base, cluster, words, arguments):
            lowered = lower_plan(config, cluster)
            first = _in_words(config) == arguments.schedule[0] and config.training.recompute == arguments.recompute[0]
            for products in arguments.products if first else arguments.products[:1]:
                report = compile_lowered(lowered, triton=products == "triton")
                row(report, words)
    console.print(table)
    console.print(
        "memory: of a GPU, against what a program may take; boundaries and gradients: bytes between nodes a step in total, and "
        "their ratio to what the mesh alone foretells; hidden: share of the other direction's matrix products between start and end "
        "of a steady hop; step: what the planner expects"
    )
    return 0


def _variants(base: RunConfig, cluster: Cluster, words: str, arguments: Pipeline) -> Iterator[RunConfig]:
    pipe, replica, data, tensor = map(int, words.split("x"))
    mesh = MeshConfig(pipe=pipe, replica=replica, data=data, tensor=tensor, inside=base.mesh.inside)
    for words in arguments.schedule:
        name, number, head = _parts(words)
        policies = (
            arguments.recompute
            if words == arguments.schedule[0]
            else arguments.recompute[-1:]
            if name == "gpipe"
            else arguments.recompute[:1]
        )
        for policy in policies:
            training = replace(base.training, recompute=policy, zero_stage=arguments.zero_stage)
            pipeline = replace(base.pipeline, schedule=name, num_chunks=int(number), head=head)
            yield replace(base, mesh=mesh, training=training, pipeline=pipeline)


def _parts(words: str) -> tuple[str, str, Any]:
    """(schedule, chunks, head) of `interleaved:2+shared`."""
    schedule, _, head = words.partition("+")
    name, _, number = schedule.partition(":")
    return name, number or "1", head or "everywhere"


def _in_words(config: RunConfig) -> str:
    pipeline = config.pipeline
    chunks = f":{pipeline.num_chunks}" if pipeline.num_chunks > 1 else ""
    return f"{pipeline.schedule}{chunks}" + ("" if pipeline.head == "everywhere" else f"+{pipeline.head}")


def _expected(config: RunConfig, cluster: Cluster) -> float:
    """Seconds of a step, as the planner has them."""
    return price(config.model, plan_of(config), cluster, GIANTJAX, 0).cost.seconds
