"""The compile check of a plan, where its extra is installed."""

import importlib
import importlib.util
from typing import Any

from giantjax.cluster import Cluster
from giantjax.config import RunConfig
from giantjax.errors import InputError
from giantjax.planner.search import Priced


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
        f"the estimate {100 * (estimate / memory - 1):+.0f} %; {sent / 1e9:.3g} GB between nodes a step, estimated "
        f"{priced.cost.network_bytes / 1e9:.3g} GB"
    )
    if not summary["fits"]:
        raise InputError(
            f"the compiled program of {config.name} needs {memory:,} bytes on each {cluster.gpu.name}, of "
            f"{priced.usable - priced.fullest.reserved:,}; the estimate's largest part is {priced.fullest.largest[0]}"
        )
    return summary
