"""The compile check of a plan, where its extra is installed."""

import importlib
import importlib.util
from typing import Any

from giantjax.cluster import Cluster
from giantjax.config import RunConfig
from giantjax.errors import InputError
from giantjax.planner.memory import in_words
from giantjax.planner.search import Priced

LARGEST = 3
"""Buffers that a refusal names."""


def verify_plan(config: RunConfig, cluster: Cluster, priced: Priced) -> dict[str, Any]:
    """Compile `config` for `cluster` and print what the program takes beside the estimate.

    Raises:
        InputError: this installation cannot compile for GPUs that are not here, or the program does not fit them.
    """
    if importlib.util.find_spec("giantjax.compile_check") is None:
        raise InputError("--verify needs giantjax/compile_check.py, which this version does not have; leave --verify out")
    # Imported here: it starts JAX.
    compile_check: Any = importlib.import_module("giantjax.compile_check")
    half = {"half": "fp16" if cluster.gpu.family == "V100" else "bf16", "fp32": "fp32"}
    report = compile_check.verify(config, cluster, half.get(priced.traits.precision))
    summary = dict(report.summary())
    estimate = priced.fullest.program
    memory, sent = summary["memory_bytes"], summary["network_bytes_per_step"]
    print(
        f"verified: compiled for {cluster.gpu.name} in {summary['compile_s']:.0f} s; {memory / 2**30:.1f} GiB on each GPU, "
        f"the estimate {100 * (estimate / memory - 1):+.1f} %; {sent / 1e9:.4g} GB between nodes a step, estimated "
        f"{priced.cost.network_bytes / 1e9:.4g} GB; hidden of hops {report.hidden('forward'):.1%} forward, "
        f"{report.hidden('backward'):.1%} back"
    )
    if not summary["fits"]:
        raise InputError(refusal(config, cluster, priced, report))
    return summary


def refusal(config: RunConfig, cluster: Cluster, priced: Priced, report: Any) -> str:
    """Why a compiled plan does not fit: the stage, what it needs and has, its largest buffers, and the estimate's largest parts."""
    memory = report.memory
    stage = max(range(len(priced.memory)), key=lambda number: priced.memory[number].total)
    where = f"stage {stage} of {len(priced.memory)}" + (", like every other," if len(priced.memory) > 1 else "")
    carried = [f"{one.number} x {one.shape} of {in_words(one.shape.num_bytes)}" for one in report.carried[:LARGEST]]
    parts = [f"{part} {in_words(size)}" for part, size in priced.fullest.parts[:LARGEST]]
    return (
        f"{config.name} does not fit {cluster.name}: {where} needs {in_words(memory.total)} of {in_words(memory.usable)} on each "
        f"{cluster.gpu.name}, {in_words(memory.arguments)} of it state and batch; the largest buffers between ticks are "
        f"{', '.join(carried) or 'none'}, the largest parts by the estimate {', '.join(parts)}; take the next plan of the "
        "table or more nodes"
    )
