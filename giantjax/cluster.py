"""Hardware facts: GPUs and the memory of this machine. No jax."""

import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import psutil

from giantjax.errors import InputError


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


GPUS = (
    GPU("V100-16GB", 16 * 2**30, 125e12, 15.7e12, 0.9e12),
    GPU("V100-32GB", 32 * 2**30, 125e12, 15.7e12, 0.9e12),
    GPU("A100-40GB", 40 * 2**30, 312e12, 156e12, 1.555e12),
    GPU("A100-80GB", 80 * 2**30, 312e12, 156e12, 2.039e12),
    GPU("H100-80GB", 80 * 2**30, 989e12, 495e12, 3.35e12),
    GPU("H200-141GB", 141 * 10**9, 989e12, 495e12, 4.8e12),
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

    @property
    def num_gpus(self) -> int:
        """GPUs of all nodes."""
        return self.num_nodes * self.gpus_per_node


REFERENCE_GPUS = {"v100": "V100-32GB", "a100": "A100-40GB"}


def cluster_of_name(name: str) -> Cluster:
    """A cluster of reference nodes, such as `v100x4-tcp100`: 4 nodes of 8 V100-32GB on 100 Gb/s TCP.

    Raises:
        InputError: the name is not of this form.
    """
    parts = re.fullmatch(r"(v100|a100)x([1-9][0-9]{0,2})-(tcp|rdma)([1-9][0-9]{0,3})", name)
    if parts is None:
        raise InputError(
            f"there is no cluster {name}; a name is GPUxNODES-NETWORKGBITS with v100 or a100 and tcp or rdma, "
            "such as v100x4-tcp100 or a100x4-rdma800"
        )
    gpu = next(gpu for gpu in GPUS if gpu.name == REFERENCE_GPUS[parts[1]])
    return Cluster(name, gpu, int(parts[2]))


@dataclass(frozen=True)
class Machine:
    """The devices of one machine."""

    kind: str
    num_devices: int
    memory_bytes: int
    """Of one GPU; of the whole machine, shared by all devices, where they are simulated on the CPU."""
    simulated: bool


def this_machine(num_cpu_devices: int | None) -> Machine:
    """What this process would train on, found without starting JAX.

    Raises:
        InputError: there are GPUs, but their driver does not answer.
    """
    gpus = [] if num_cpu_devices else _query_gpus()
    if gpus:
        return Machine(gpus[0][0], len(gpus), min(memory for _, memory in gpus), simulated=False)
    return Machine("CPU", num_cpu_devices or 1, _host_memory(), simulated=True)


def _query_gpus() -> list[tuple[str, int]]:
    if shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False)
    except subprocess.TimeoutExpired as error:
        raise InputError(
            "nvidia-smi did not answer within 30 s, so the GPUs cannot be counted; mend the driver, or set runtime.num_cpu_devices"
        ) from error
    lines = [line.rsplit(",", 1) for line in answer.stdout.splitlines() if answer.returncode == 0 and "," in line]
    return [(name.strip(), int(mebibytes) * 2**20) for name, mebibytes in lines if mebibytes.strip().isdecimal()]


def _host_memory() -> int:
    """Bytes this process may use: physical memory, or less where a control group limits it."""
    present = psutil.virtual_memory().total
    for limit in (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes")):
        if limit.exists() and limit.read_text().strip().isdecimal():
            present = min(present, int(limit.read_text()))
    return present
