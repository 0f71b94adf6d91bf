"""Which layout fits a cluster, how fast it will be and why the others lose: python scripts/plan.py --config NAME --cluster CLUSTER.

`--measure FILE.toml`, started on every machine as pretrain.py is, measures the links of a cluster of your own for `--cluster FILE.toml`.
"""

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from giantjax import command_line
from giantjax.cluster import Cluster, cluster_of_name
from giantjax.config import RunConfig, RuntimeConfig
from giantjax.errors import InputError
from giantjax.fields import leaves
from giantjax.planner.automatic import with_plan
from giantjax.planner.explain import as_json, best_of_each_mesh, losers, mesh_in_words, plan_table, why_not_rounded
from giantjax.planner.flops import num_parameters
from giantjax.planner.memory import in_words
from giantjax.planner.search import Priced, Search, require_fitting, search
from giantjax.planner.strategies import Strategy, baseline
from giantjax.planner.verify import verify_plan


@dataclass(frozen=True)
class Arguments:
    """Rank the plans of a run on a cluster: step time, memory, traffic, and why the others lose."""

    config: str | None = None
    """A shipped config, or the path of a Python file."""
    cluster: str | None = None
    """GPUxNODES-NETWORKGBITS, such as v100x4-tcp100 or a100x4-rdma800, with nodes of 8 GPUs; or the path of a .toml or .json file."""
    top: int = 8
    """Plans to show, fastest first."""
    strategy: Strategy = "auto"
    """auto searches all plans of this program; megatron (tensor 4, pipe 4) and zero3 price those baselines as they run."""
    verify: bool = False
    """Compile the best plan for the cluster's GPUs, which need not be here (extra [aot])."""
    json: str | None = None
    """File to write the plans to."""
    measure: str | None = None
    """Measure the links of these machines for about a minute and write a cluster file, NAME.toml; nothing is planned."""
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)
    """For --measure: devices and processes, as pretrain.py takes them."""

    def __post_init__(self) -> None:
        if self.measure is not None:
            self._check_measure()
            return
        for name in ("config", "cluster"):
            if getattr(self, name) is None:
                raise InputError(f"--{name} is missing")
        if self.runtime != RuntimeConfig():
            raise InputError("--runtime fields say how to --measure; planning takes none, so leave them out")
        if self.top < 1:
            raise InputError(f"--top is {self.top}; it must be at least 1")
        if self.verify and self.strategy != "auto":
            raise InputError(f"--verify compiles a plan of this program, which --strategy {self.strategy} is not; leave one of the two out")

    def _check_measure(self) -> None:
        given = [f"--{name}" for name in ("config", "cluster", "json") if getattr(self, name) is not None] + ["--verify"] * self.verify
        if given:
            raise InputError(f"--measure {self.measure} plans nothing, so leave {' and '.join(given)} out; plan with its file afterwards")
        if self.runtime.cluster is not None:
            raise InputError(f"--measure tries transports itself; leave --runtime.cluster {self.runtime.cluster} out")


def main() -> int:
    """Print the table; exit code 2 where nothing fits."""
    arguments = command_line.parse(Arguments, sys.argv[1:])
    if arguments.measure is not None:
        from giantjax.measure.cluster import measure_cluster

        return measure_cluster(Path(arguments.measure), arguments.runtime)
    assert arguments.config is not None and arguments.cluster is not None
    config, cluster = command_line.preset(arguments.config), cluster_of_name(arguments.cluster)
    if arguments.strategy == "auto":
        found = search(config, cluster)
        plans = require_fitting(config, cluster, found)
    else:
        found, plans = Search([], []), baseline(config, cluster, arguments.strategy)
        if not plans[0].fits:
            raise InputError(
                f"{config.name} does not fit {cluster.name} under --strategy {arguments.strategy}: {mesh_in_words(plans[0].plan)} needs "
                f"{in_words(plans[0].fullest.total)} of {in_words(plans[0].usable)} on each GPU; take more nodes or GPUs with more memory"
            )
    show(config, cluster, plans, found, arguments)
    verified = verify_plan(with_plan(config, plans[0].plan), cluster, plans[0]) if arguments.verify else None
    if arguments.json:
        rejected = losers(plans, found, _baselines(config, cluster) if arguments.strategy == "auto" else [], cluster)
        write(Path(arguments.json), as_json(config, cluster, plans[: arguments.top], rejected, verified))
    return 0


def show(config: RunConfig, cluster: Cluster, plans: list[Priced], found: Search, arguments: Arguments) -> None:
    """Print the best plans, the best of each other mesh with the reason why it loses, and the baselines."""
    console = Console(width=max(200, Console().width) if not sys.stdout.isatty() else None, highlight=False)
    console.print(
        f"{config.name}: {num_parameters(config.model):,} parameters, batch {config.training.global_batch_size}; {cluster.description}"
    )
    if cluster.gpu.family == "V100" and plans[0].traits.precision == "half":
        console.print("priced in fp16, which training.precision auto takes there")
    console.print(plan_table(plans[: arguments.top], cluster))
    if arguments.strategy == "auto":
        console.print("\nother meshes, their best plans, and the baselines:")
        rest = [(one.plan, one.cost.seconds, one) for one in best_of_each_mesh(plans)[1:]]
        for plan, reason in losers(plans, found, [], cluster)[: len(rest) + len(found.too_large)]:
            console.print(f"  {mesh_in_words(plan)}: {reason}", soft_wrap=True)
        for one in found.not_worth:
            console.print(f"  compression {one.plan.compression}: {why_not_rounded(one, plans[0])}", soft_wrap=True)
        for name, one in _named_baselines(config, cluster):
            reason = losers(plans, Search([], []), [one], cluster)[-1][1]
            console.print(
                f"  --strategy {name}, {mesh_in_words(one.plan)}: {one.cost.samples_per_s:.3g} samples/s; {reason}", soft_wrap=True
            )
    best = plans[0]
    parts = ", ".join(
        f"{name} {in_words(getattr(best.fullest, name))}" for name in ("parameters", "optimizer", "gradients", "copies", "feedback")
    )
    more = ", ".join(f"{name} {in_words(getattr(best.fullest, name))}" for name in ("activations", "logits", "working", "reserved"))
    console.print(f"\nmemory of the fullest stage of the best: {parts}, {more}; {in_words(best.usable)} usable", soft_wrap=True)
    print(f"best: {mesh_in_words(best.plan)}, {best.cost.seconds:.3g} s a step, {best.cost.samples_per_s:.4g} samples/s")
    if arguments.strategy == "auto":
        before, chosen = leaves(config), leaves(with_plan(config, best.plan))
        options = " ".join(f"--{path.replace('_', '-')} {chosen[path]}" for path in chosen if chosen[path] != before[path])
        print(f"      python scripts/pretrain.py --config {arguments.config} {options}")


def _named_baselines(config: RunConfig, cluster: Cluster) -> list[tuple[str, Priced]]:
    found = []
    for strategy in ("megatron", "zero3"):
        try:
            found.append((strategy, baseline(config, cluster, strategy)[0]))  # type: ignore[arg-type]
        except InputError:
            # A baseline that does not divide the cluster is none.
            continue
    return found


def _baselines(config: RunConfig, cluster: Cluster) -> list[Priced]:
    return [one for _, one in _named_baselines(config, cluster)]


def write(path: Path, value: dict[str, Any]) -> None:
    """Write `value` as JSON.

    Raises:
        InputError: the file cannot be written.
    """
    try:
        path.write_text(json.dumps(value, indent=1) + "\n")
    except OSError as error:
        raise InputError(f"--json {path} cannot be written: {error.strerror}") from error


if __name__ == "__main__":
    command_line.run_main(main)
