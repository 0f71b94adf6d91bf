"""What joins nodes: cards, latency, the share of the line rate that collectives reach, and NCCL's transport settings. No jax."""

import math
from dataclasses import dataclass
from typing import Literal

from giantjax.errors import InputError

Fabric = Literal["tcp", "infiniband", "roce", "omni-path"]

ACHIEVED: dict[Fabric, float] = {
    # github.com/NVIDIA/nccl/issues/450: 32 V100 on 100 Gb/s TCP, 4 to 6 GB/s of 12.5 at the best NCCL_SOCKET_NTHREADS.
    "tcp": 0.40,
    # github.com/NVIDIA/nccl-tests/issues/119: 24 A100 on 4 x 200 Gb/s HDR, 84.8 GB/s of 100 on average.
    "infiniband": 0.85,
    # github.com/NVIDIA/nccl/issues/495: 16 A100 on 8 x 100 Gb/s, 600 Gb/s of 800.
    "roce": 0.75,
    # github.com/bigscience-workshop/bigscience experiments/bandwidth: 16 V100 on 4 x 100 Gb/s, at best 84.7 Gb/s of 400.
    "omni-path": 0.21,
}
"""Share of the line rate that a large NCCL collective reaches; each from a published measurement."""

UNTUNED_TCP = 0.11
"""The same of TCP with NCCL's own settings: 1.12 to 1.48 GB/s of 12.5 (github.com/NVIDIA/nccl/issues/450)."""

LATENCY: dict[Fabric, float] = {
    # hwLatency of NET, ring, Simple in github.com/NVIDIA/nccl src/graph/tuning.cc: 14 us a step.
    "infiniband": 14e-6,
    "roce": 14e-6,
    "omni-path": 14e-6,
    # Through the kernel's sockets: two copies and an interrupt each way, 30 to 50 us more.
    "tcp": 50e-6,
}
"""Seconds of one message between nodes beside its bytes."""


@dataclass(frozen=True)
class Transport:
    """How NCCL reaches other nodes."""

    rdma: bool
    """Whether cards read and write GPU memory themselves; otherwise sockets carry everything."""
    interface: str | None = None
    """Network interface such as eth0; None lets NCCL choose."""
    socket_threads: int | None = None
    """NCCL_SOCKET_NTHREADS: CPU threads of a connection, 1 to 16."""
    sockets_per_thread: int | None = None
    """NCCL_NSOCKS_PERTHREAD; times socket_threads at most 64."""

    def __post_init__(self) -> None:
        threads, sockets = self.socket_threads or 1, self.sockets_per_thread or 1
        if not (1 <= threads <= 16 and sockets >= 1 and threads * sockets <= 64):
            raise InputError(
                f"transport.socket_threads {threads} x transport.sockets_per_thread {sockets} = {threads * sockets}; NCCL takes 1 to 16 "
                "threads and at most 64 sockets in all, such as 4 x 4"
            )

    def environment(self) -> dict[str, str]:
        """The variables that tell NCCL."""
        settings = {
            "NCCL_SOCKET_IFNAME": self.interface,
            "NCCL_IB_DISABLE": "0" if self.rdma else "1",
            "NCCL_SOCKET_NTHREADS": self.socket_threads,
            "NCCL_NSOCKS_PERTHREAD": self.sockets_per_thread,
        }
        return {name: str(value) for name, value in settings.items() if value is not None}


@dataclass(frozen=True)
class NetworkLink:
    """What a node has to reach the others: equal cards, full duplex, shared by its GPUs."""

    fabric: Fabric
    nic_bandwidth: float
    """Line rate of one card in bytes/s, each direction."""
    nics_per_node: int
    latency: float
    """Seconds of one message beside its bytes."""
    achieved: float
    """Share of the line rate that collectives reach."""
    transport: Transport
    measured: bool = False
    """Whether `achieved` is this link's own, measured; the cost model then takes it as it is."""

    def __post_init__(self) -> None:
        for name, value in (("nic_gbits", self.nic_bandwidth * 8 / 1e9), ("nics_per_node", self.nics_per_node)):
            if not (math.isfinite(value) and value > 0):
                raise InputError(f"network.{name} is {value:g}; it must be above 0, such as {100 if name == 'nic_gbits' else 1}")
        if not 0 < self.achieved <= 1:
            raise InputError(f"network.achieved is {self.achieved:g}; it is a share of the line rate, above 0 and at most 1, such as 0.85")
        if not (math.isfinite(self.latency) and self.latency >= 0):
            raise InputError(f"network.latency_us is {self.latency * 1e6:g}; it must be 0 or more, such as 14")

    @property
    def node_bandwidth(self) -> float:
        """Bytes/s that all GPUs of a node together get out, and in."""
        return self.nic_bandwidth * self.nics_per_node * self.achieved


def network(fabric: Fabric, gbits: float, nics_per_node: int = 1, achieved: float | None = None) -> NetworkLink:
    """A link of `nics_per_node` cards of `gbits` Gb/s each, the rest from the measurements above."""
    rdma = fabric != "tcp"
    transport = Transport(rdma, None, None if rdma else 4, None if rdma else 4)
    return NetworkLink(
        fabric, gbits * 1e9 / 8, nics_per_node, LATENCY[fabric], ACHIEVED[fabric] if achieved is None else achieved, transport
    )
