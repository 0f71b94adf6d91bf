"""What would hold a model: python scripts/plan.py --config NAME --cluster CLUSTER."""

import sys
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from giantjax import command_line
from giantjax.cluster import Cluster, cluster_of_name
from giantjax.config import RunConfig
from giantjax.errors import InputError
from giantjax.planner.fit import splits
from giantjax.planner.flops import num_parameters
from giantjax.planner.memory import in_words


@dataclass(frozen=True)
class Arguments:
    """Show how a model can be divided over a cluster, and the memory each GPU needs."""

    config: str
    """A shipped config, or the path of a Python file."""
    cluster: str
    """GPUxNODES-NETWORKGBITS, such as v100x4-tcp100 or a100x4-rdma800; nodes have 8 GPUs."""
    top: int = 8
    """Rows to show, those that fit first."""

    def __post_init__(self) -> None:
        if self.top < 1:
            raise InputError(f"--top is {self.top}; it must be at least 1")


def main() -> int:
    """Print the table; exit code 2 where nothing fits."""
    arguments = command_line.parse(Arguments, sys.argv[1:])
    config, cluster = command_line.preset(arguments.config), cluster_of_name(arguments.cluster)
    show(config, cluster, arguments.top)
    return 0


def show(config: RunConfig, cluster: Cluster, top: int) -> None:
    """Print the divisions of `config` over `cluster`.

    Raises:
        InputError: none fits.
    """
    found = sorted(splits(config, cluster), key=lambda split: not split.fits)
    if not found[0].fits:
        least = min(found, key=lambda split: split.need.total)
        raise InputError(
            f"{config.name} does not fit {cluster.name}: even on pipe {least.pipe} x tensor {least.tensor} a {cluster.gpu.name} "
            f"would need {in_words(least.need.total)}; take more nodes, GPUs with more memory, or a smaller pipeline.microbatch_size"
        )
    print(
        f"{config.name}: {num_parameters(config.model):,} parameters; {cluster.name}: {cluster.num_nodes} nodes of {cluster.gpus_per_node} "
        f"{cluster.gpu.name}, {in_words(cluster.gpu.memory_bytes * config.runtime.memory_fraction)} usable on each"
    )
    table = Table("pipe", "tensor", "data", "parameters and moments", "gradients and copies", "activations", "a GPU", "fits", box=None)
    for split in found[:top]:
        need = split.need
        sizes = [in_words(size) for size in (need.state, need.gradients, need.activations, need.total)]
        table.add_row(str(split.pipe), str(split.tensor), str(split.data), *sizes, "yes" if split.fits else "no")
    Console().print(table)


if __name__ == "__main__":
    command_line.run_main(main)
