"""Where a plan's axes lie in the nodes, and seconds and bytes of collectives on NVLink and between nodes."""

import math
from dataclasses import dataclass

from giantjax.cluster import Cluster
from giantjax.planner.constants import Constants
from giantjax.planner.plan import Plan


@dataclass(frozen=True)
class Span:
    """How a group of devices lies: so many in each of so many nodes."""

    inside: int
    nodes: int

    @property
    def size(self) -> int:
        """Devices of the group."""
        return self.inside * self.nodes


@dataclass(frozen=True)
class Place:
    """Where each axis lies when `tensor` is innermost, then data parallelism, then `pipe`: Megatron-LM's order and ours."""

    tensor: Span
    data: Span
    stages_in_node: int


def place(plan: Plan, cluster: Cluster) -> Place:
    """Where the axes of `plan` lie on `cluster`."""
    per_node = cluster.gpus_per_node
    tensor = math.gcd(plan.tensor, per_node)
    data = math.gcd(plan.ways, per_node // tensor) if tensor == plan.tensor else 1
    stages = max(min(per_node // (tensor * data), plan.pipe), 1)
    return Place(Span(tensor, plan.tensor // tensor), Span(data, plan.ways // data), stages)


class Wires:
    """A cluster's links and what collectives reach of their line rates."""

    def __init__(self, cluster: Cluster, constants: Constants) -> None:
        self.cluster, self.constants = cluster, constants
        link = cluster.network
        through_host = cluster.gpu.family == "V100"
        fitted = {
            "omni-path": constants.omni_path if through_host else constants.omni_path_direct,
            "infiniband": constants.infiniband if through_host else constants.infiniband_direct,
            "roce": constants.roce,
        }
        # A configured share that is lower holds, a measured one always.
        self.achieved = min(fitted.get(link.fabric, 1.0), link.achieved) if link.fabric != "omni-path" else fitted["omni-path"]
        self.achieved = link.achieved if link.measured else self.achieved
        self.node_bandwidth = link.nic_bandwidth * link.nics_per_node * self.achieved
        """Bytes/s out of a node, and in."""

    def nvlink(self, num_gpus: int) -> float:
        """Bytes/s of each GPU in a collective of `num_gpus` GPUs of a node."""
        whole = self.cluster.inside_bandwidth or self.cluster.gpu.nvlink_bandwidth * self.constants.nvlink
        # Without a switch a GPU reaches each of its quad's three others over a third of its links.
        return whole if self.cluster.switched else whole * min(1.0, (num_gpus - 1) / 3)

    def one_pass(self, num_bytes: float, span: Span, rings: float, cards: float | None = None) -> float:
        """Seconds of a reduce-scatter or an all-gather of `num_bytes`; an all-reduce is two.

        Args:
            num_bytes: of the whole array.
            span: where the group lies.
            rings: groups that do the same at once and share a node's cards.
            cards: cards of a node that carry them; None for all.
        """
        if span.size == 1:
            return 0.0
        wire = num_bytes * (span.size - 1) / span.size
        inside = wire / self.nvlink(span.inside) if span.inside > 1 else 0.0
        seconds = self.constants.collective_latency
        if span.nodes == 1:
            return inside + seconds
        share = 1.0 if cards is None else min(cards / self.cluster.network.nics_per_node, 1.0)
        across = wire * rings / (self.node_bandwidth * share)
        # A tree's depth: rings of hundreds of nodes give way to trees.
        return max(inside, across) + seconds + self.cluster.network.latency * math.log2(span.nodes)

    def message(self, num_bytes: float, senders: float, *, crosses: bool) -> float:
        """Seconds of a message of `num_bytes` from each of `senders` GPUs of a node to the next stage."""
        if not crosses:
            return num_bytes / self.nvlink(2) + 1e-5
        link = self.cluster.network
        alone = link.nic_bandwidth * self.achieved
        return link.latency + max(num_bytes * senders / self.node_bandwidth, num_bytes / alone if senders < link.nics_per_node else 0.0)
