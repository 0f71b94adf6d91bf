"""The published comparison of veGiantModel, priced: GPT-13B on four clusters, this program beside Megatron-LM and ZeRO-3.

github.com/volcengine/veGiantModel: 40 layers, 5120 wide, sequence 256, batch 1536, four nodes of 8 V100-32GB with 100 Gb/s or of 8
A100-40GB with 800 Gb/s, over TCP and over RDMA. It claims 1.2 to 3.5 times the throughput of Megatron-LM and DeepSpeed on V100 and up
to 6.9 times on A100, and that RDMA to TCP costs it less than a tenth where ZeRO loses up to a factor of 5.
"""

from dataclasses import dataclass, replace

from rich.console import Console
from rich.table import Table

from giantjax import command_line
from giantjax.cluster import Cluster, cluster_of_name
from giantjax.config import RunConfig
from giantjax.planner.explain import mesh_in_words
from giantjax.planner.search import Priced, price, require_fitting, search
from giantjax.planner.strategies import Strategy, baseline

STRATEGIES: tuple[Strategy, ...] = ("auto", "megatron", "zero3")
CLAIMED = {"v100": "1.2 to 3.5", "a100": "up to 6.9"}
SMALL_MICROBATCH = 4
"""Samples: what a ZeRO-3 run has that was not tuned to gather as seldom as possible."""


@dataclass(frozen=True)
class Published:
    """Price GPT-13B on the four clusters of veGiantModel's comparison, beside Megatron-LM and ZeRO-3."""

    config: str = "gpt13b"
    """What to price."""
    nodes: int = 4
    """Nodes of each cluster."""


def best(config: RunConfig, cluster: Cluster, strategy: Strategy) -> Priced:
    """The fastest plan of a strategy."""
    if strategy == "auto":
        return require_fitting(config, cluster, search(config, cluster))[0]
    return baseline(config, cluster, strategy)[0]


def untuned(config: RunConfig, cluster: Cluster, tuned: Priced) -> Priced:
    """The ZeRO-3 plan `tuned` in microbatches of SMALL_MICROBATCH."""
    each = tuned.plan.num_microbatches * tuned.plan.microbatch_size
    plan = replace(tuned.plan, microbatch_size=SMALL_MICROBATCH, num_microbatches=each // SMALL_MICROBATCH)
    return price(config.model, plan, cluster, tuned.traits, tuned.usable)


def slowed(cluster: Cluster, part: int) -> Cluster:
    """`cluster` with cards of 1/`part` of the line rate."""
    return replace(cluster, network=replace(cluster.network, nic_bandwidth=cluster.network.nic_bandwidth / part))


def recomputing(config: RunConfig, cluster: Cluster) -> Priced:
    """The fastest Megatron-LM plan that recomputes every layer, as all its published rows of 2021 do."""
    return next(one for one in baseline(config, cluster, "megatron") if one.plan.recompute == "full")


def published(arguments: Published) -> int:
    """Print the tables."""
    config, console = command_line.preset(arguments.config), Console(highlight=False, width=140)
    table = Table("samples/s", "auto", "megatron", "recomputing", "zero3", "untuned", "plan of auto", box=None)
    ratios = Table("auto is faster than", "megatron", "recomputing", "zero3", "untuned", "claimed by veGiantModel", box=None)
    for gpu, gbits in (("v100", 100), ("a100", 800)):
        for network in ("tcp", "rdma"):
            cluster = cluster_of_name(f"{gpu}x{arguments.nodes}-{network}{gbits}")
            auto, megatron, zero3 = (best(config, cluster, strategy) for strategy in STRATEGIES)
            others = (megatron, recomputing(config, cluster), zero3, untuned(config, cluster, zero3))
            plan = auto.plan
            table.add_row(
                *(cluster.name, *(f"{one.cost.samples_per_s:.1f}" for one in (auto, *others))),
                f"{mesh_in_words(plan)}, {plan.num_microbatches} of {plan.microbatch_size}, recompute {plan.recompute}",
            )
            faster = (f"{auto.cost.samples_per_s / one.cost.samples_per_s:.2f} x" for one in others)
            ratios.add_row(cluster.name, *faster, f"{CLAIMED[gpu]} x")
    console.print(table)
    console.print(f"recomputing: megatron with recompute full; untuned: zero3 in microbatches of {SMALL_MICROBATCH} instead of its best\n")
    console.print(ratios)
    console.print("\nthroughput lost with TCP in RDMA's place, and with 50 % and 25 % of the line rate")
    console.print(_losses(config, arguments.nodes))
    return 0


def _losses(config: RunConfig, nodes: int) -> Table:
    table = Table("cluster", "strategy", "RDMA to TCP", "RDMA at 50 %", "at 25 %", "TCP at 50 %", "at 25 %", box=None)
    for gpu, gbits in (("v100", 100), ("a100", 800)):
        for strategy in (*STRATEGIES, "untuned"):
            pace = {}
            for network in ("tcp", "rdma"):
                for part in (1, 2, 4):
                    cluster = slowed(cluster_of_name(f"{gpu}x{nodes}-{network}{gbits}"), part)
                    one = best(config, cluster, strategy if strategy in STRATEGIES else "zero3")  # type: ignore[arg-type]
                    pace[network, part] = (one if strategy in STRATEGIES else untuned(config, cluster, one)).cost.samples_per_s
            lost = [1 - pace["tcp", 1] / pace["rdma", 1]] + [
                1 - pace[net, part] / pace[net, 1] for net in ("rdma", "tcp") for part in (2, 4)
            ]
            table.add_row(f"{gpu}x{nodes}", strategy, *(f"{100 * share:.1f} %" for share in lost))
    return table
