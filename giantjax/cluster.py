"""Hardware facts: GPUs, nodes, clusters, and the devices of this machine. No jax."""

import dataclasses
import os
import re
import shutil
import socket
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from giantjax.errors import InputError
from giantjax.network import NetworkLink, network


@dataclass(frozen=True)
class GPU:
    """One kind of GPU, figures from NVIDIA's datasheets, dense (no sparsity)."""

    name: str
    memory_bytes: int
    half_flops: float
    """Peak FLOP/s of fp16 and, where the hardware has it, bf16 matrix products."""
    single_flops: float
    """Peak FLOP/s of fp32 matrix products as JAX computes them by default: TF32 from Ampere on."""
    memory_bandwidth: float
    """Bytes/s."""
    num_multiprocessors: int = 108
    eighth_flops: float | None = None
    """Peak FLOP/s of 8-bit floating-point matrix products; None where there are none."""
    nvlink_bandwidth: float = 0.0
    """Bytes/s out of one GPU, and in, over all its NVLinks at line rate; 0 where there are none."""

    @property
    def family(self) -> str:
        """`V100`, `A100`, `H100` or `H200`."""
        return self.name.partition("-")[0]


GPUS = (
    # NVLink 2: 6 links of 25 GB/s each way; NVLink 3: 12; NVLink 4: 18.
    GPU("V100-16GB", 16 * 2**30, 125e12, 15.7e12, 0.9e12, 80, None, 150e9),
    GPU("V100-32GB", 32 * 2**30, 125e12, 15.7e12, 0.9e12, 80, None, 150e9),
    GPU("A100-40GB", 40 * 2**30, 312e12, 156e12, 1.555e12, 108, None, 300e9),
    GPU("A100-80GB", 80 * 2**30, 312e12, 156e12, 2.039e12, 108, None, 300e9),
    GPU("H100-80GB", 80 * 2**30, 989e12, 495e12, 3.35e12, 132, 1979e12, 450e9),
    GPU("H200-141GB", 141 * 10**9, 989e12, 495e12, 4.8e12, 132, 1979e12, 450e9),
)


def gpu_of_kind(device_kind: str) -> GPU | None:
    """The facts of a GPU as its driver names it (`NVIDIA A100-SXM4-80GB`, `Tesla V100-SXM2-32GB`); None for another."""
    family = next((name for name in ("V100", "A100", "H100", "H200") if name in device_kind.upper()), None)
    members = [gpu for gpu in GPUS if family and gpu.name.startswith(family)]
    exact = [gpu for gpu in members if gpu.name.partition("-")[2] in device_kind.upper()]
    return next(iter(exact + members), None)


@dataclass(frozen=True)
class Cluster:
    """Equal nodes on one network."""

    name: str
    gpu: GPU
    num_nodes: int
    gpus_per_node: int = 8
    network: NetworkLink = field(default_factory=lambda: network("infiniband", 100))
    node: str = ""
    """Kind of node where it is not the usual one: `DGX-2` joins its V100 by a switch, `DGX-1V` eight of them in a cube mesh."""
    inside_bandwidth: float | None = None
    """Bytes/s of each GPU in an all-reduce over its node, where that was measured; None takes a share of NVLink's line rate."""
    has_link: bool = True
    """Whether `network` is known; a file of one node need not say."""

    @property
    def num_gpus(self) -> int:
        """GPUs of all nodes."""
        return self.num_nodes * self.gpus_per_node

    @property
    def switched(self) -> bool:
        """Whether every GPU of a node reaches every other over all of its NVLinks."""
        return self.gpu.family != "V100" or self.gpus_per_node > 8 or self.node == "DGX-2"

    @property
    def description(self) -> str:
        """`4 nodes of 8 V100-32GB, 1 x 100 Gb/s tcp (5.0 GB/s reached)`."""
        link = self.network
        return (
            f"{self.num_nodes} nodes of {self.gpus_per_node} {self.gpu.name}, {link.nics_per_node} x {link.nic_bandwidth * 8 / 1e9:g} Gb/s "
            f"{link.fabric} ({link.node_bandwidth / 1e9:.1f} GB/s reached)"
        )


def gpu_of_name(name: str) -> GPU:
    """The facts of the GPU of exactly this name, such as `A100-40GB`.

    Raises:
        InputError: there is none.
    """
    for gpu in GPUS:
        if gpu.name == name:
            return gpu
    raise InputError(f"there is no GPU {name}; there are {', '.join(gpu.name for gpu in GPUS)}")


REFERENCE_GPUS = {"v100": "V100-32GB", "a100": "A100-40GB", "h100": "H100-80GB", "h200": "H200-141GB"}
MOST_NODES, MOST_GPUS_PER_NODE = 128, 16


def cluster_of_name(name: str) -> Cluster:
    """A cluster of reference nodes, such as `v100x4-tcp100`: 4 nodes of 8 V100-32GB on 100 Gb/s TCP; or a cluster file.

    Raises:
        InputError: the name is neither of this form nor the path of a valid .toml or .json file.
    """
    if name.endswith((".toml", ".json")):
        from giantjax.cluster_file import read_cluster

        return read_cluster(Path(name))
    parts = re.fullmatch(r"(v100|a100|h100|h200)x([1-9][0-9]{0,2})-(tcp|rdma)([1-9][0-9]{0,3})", name)
    if parts is None:
        raise InputError(
            f"there is no cluster {name}; a name is GPUxNODES-NETWORKGBITS with v100, a100, h100 or h200 and tcp or rdma, "
            "such as v100x4-tcp100 or a100x4-rdma800, or the path of a .toml or .json file"
        )
    num_nodes, gbits = int(parts[2]), int(parts[4])
    if num_nodes > MOST_NODES:
        raise InputError(
            f"cluster {name} has {num_nodes} nodes; plans go up to {MOST_NODES}, such as {parts[1]}x{MOST_NODES}-{parts[3]}{gbits}"
        )
    # Cards of up to 200 Gb/s: a node of 800 Gb/s has four.
    nics = -(-gbits // 200)
    link = network("tcp" if parts[3] == "tcp" else "infiniband", gbits / nics, nics)
    return Cluster(name, gpu_of_name(REFERENCE_GPUS[parts[1]]), num_nodes, 8, link)


def cluster_of_field(field: str, name: str) -> Cluster:
    """`cluster_of_name`, whose InputError names the field that it was given in."""
    try:
        return cluster_of_name(name)
    except InputError as error:
        raise InputError(f"{field}: {error}") from error


@dataclass(frozen=True)
class InstalledGPU:
    """One GPU of a machine, as its driver tells."""

    index: int
    """As nvidia-smi numbers them."""
    uuid: str
    bus: str
    """PCI address: the same in every container, and what the order of GPUs goes by."""
    name: str
    memory_bytes: int


@dataclass(frozen=True)
class Machine:
    """The devices of one machine."""

    kind: str
    num_devices: int
    """Those that this process sees."""
    memory_bytes: int
    """Of one GPU; of the whole machine, shared by all devices, where they are simulated on the CPU."""
    simulated: bool
    installed: tuple[InstalledGPU, ...] = ()
    """All GPUs that the driver tells of."""
    visible: tuple[InstalledGPU, ...] = ()
    """Those that CUDA_VISIBLE_DEVICES leaves, in its order, which is JAX's."""


def this_machine(num_cpu_devices: int | None, environment: Mapping[str, str] = os.environ) -> Machine:
    """What this process would train on, found without starting JAX.

    Raises:
        InputError: there are GPUs, but their driver does not answer.
    """
    installed = () if num_cpu_devices else tuple(_query_gpus())
    visible = visible_gpus(installed, environment.get("CUDA_VISIBLE_DEVICES"))
    if visible:
        memory = min(gpu.memory_bytes for gpu in visible)
        return Machine(visible[0].name, len(visible), memory, False, installed, visible)
    return Machine("CPU", num_cpu_devices or 1, _host_memory(), simulated=True)


def visible_gpus(installed: Sequence[InstalledGPU], variable: str | None) -> tuple[InstalledGPU, ...]:
    """What CUDA_VISIBLE_DEVICES leaves of the GPUs: numbers or beginnings of UUIDs, up to the first that names none."""
    if variable is None:
        return tuple(installed)
    found: list[InstalledGPU] = []
    for word in (part.strip() for part in variable.split(",")):
        # A slice of a GPU is not told of here; it is taken for a GPU.
        named = [gpu for gpu in installed if str(gpu.index) == word or (word.startswith("GPU-") and gpu.uuid.startswith(word))]
        if word.startswith("MIG-") and installed:
            named = [dataclasses.replace(installed[0], uuid=word)]
        if len(named) != 1 or named[0] in found:
            break
        found += named
    return tuple(found)


def topology_text() -> str:
    """What `nvidia-smi topo -m` prints; empty where it does not answer."""
    try:
        answer = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return answer.stdout if answer.returncode == 0 else ""


def machine_id() -> str:
    """What the processes of one machine have in common, in whatever containers they run."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return boot.read_text().strip() if boot.exists() else socket.gethostname()


def _query_gpus() -> list[InstalledGPU]:
    if shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", "--query-gpu=index,uuid,pci.bus_id,memory.total,name", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False)
    except subprocess.TimeoutExpired as error:
        raise InputError(
            "nvidia-smi did not answer within 30 s, so the GPUs cannot be counted; mend the driver, or set runtime.num_cpu_devices"
        ) from error
    lines = [[cell.strip() for cell in line.split(",", 4)] for line in answer.stdout.splitlines() if answer.returncode == 0]
    return [
        InstalledGPU(int(line[0]), line[1], line[2], line[4], int(line[3]) * 2**20)
        for line in lines
        if len(line) == 5 and line[0].isdecimal() and line[3].isdecimal()
    ]


def _host_memory() -> int:
    """Bytes this process may use: physical memory, or less where a control group limits it."""
    present = psutil.virtual_memory().total
    for limit in (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes")):
        if limit.exists() and limit.read_text().strip().isdecimal():
            present = min(present, int(limit.read_text()))
    return present
