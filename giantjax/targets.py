"""GPUs that are not here, described so that XLA compiles for them: the extra `[aot]`, without driver or CUDA libraries."""

import contextlib
import importlib.util
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from giantjax.cluster import Cluster
from giantjax.errors import InputError

if TYPE_CHECKING:
    import jax

INSTALL = "pip install -e '.[aot]'"


@dataclass(frozen=True)
class Target:
    """What XLA's GPU compiler asks of a device; datasheets, the CUDA programming guide's table of compute capabilities, and
    the driver's own answers as XLA's list of target configurations records them."""

    name: str
    """As the driver names it."""
    capability: int
    """Major compute capability; the minor one of all that are known here is 0."""
    num_cores: int
    """Streaming multiprocessors."""
    lanes: int
    """fp32 lanes of one of them."""
    clock_ghz: float
    bandwidth: int
    """Bytes/s of the device memory."""
    cache_bytes: int
    """L2."""
    memory_bytes: int
    """As the driver reports it, which is less than the name says."""
    shared_of_core: int
    """Shared memory of a multiprocessor, bytes."""
    shared_of_block: int
    """The most that one block may ask for, bytes."""

    @property
    def text(self) -> str:
        """A `GpuTargetConfigProto` in text form."""
        # Capability 9.0 without these features would be compiled for as if it had no warp-group products.
        features = " feature_extension: ACCELERATED_FEATURES" if self.capability >= 9 else ""
        return f"""gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  shared_memory_per_block: 49152 shared_memory_per_core: {self.shared_of_core} shared_memory_per_block_optin: {self.shared_of_block}
  core_count: {self.num_cores} fpus_per_core: {self.lanes} clock_rate_ghz: {self.clock_ghz}
  memory_bandwidth: {self.bandwidth} l2_cache_size: {self.cache_bytes} device_memory_size: {self.memory_bytes}
  cuda_compute_capability {{ major: {self.capability}{features} }}
  device_address_bits: 64 pcie_bandwidth: 34359738368 ecc_enabled: true
  device_vendor: "NVIDIA Corporation" name: "{self.name}"
  platform_version: "Compute Capability {self.capability}.0" model_str: "sm_{self.capability}.0"
  driver_version: "13.0.0" runtime_version: "12.8.0" compile_time_toolkit_version: "12.8.0" dnn_version: "9.10.0"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
device_description_str: "{self.name}"
"""


def _volta(name: str, memory_bytes: int) -> Target:
    return Target(name, 7, 80, 64, 1.53, 898_048_000_000, 6 * 2**20, memory_bytes, 98_304, 98_304)


def _ampere(name: str, bandwidth: int, memory_bytes: int) -> Target:
    return Target(name, 8, 108, 64, 1.41, bandwidth, 40 * 2**20, memory_bytes, 167_936, 166_912)


def _hopper(name: str, bandwidth: int, memory_bytes: int) -> Target:
    return Target(name, 9, 132, 128, 1.98, bandwidth, 50 * 2**20, memory_bytes, 233_472, 232_448)


TARGETS = {
    "V100-16GB": _volta("Tesla V100-SXM2-16GB", 16_935_682_048),
    "V100-32GB": _volta("Tesla V100-SXM2-32GB", 33_871_364_096),
    "A100-40GB": _ampere("NVIDIA A100-SXM4-40GB", 1_555_200_000_000, 42_331_013_120),
    "A100-80GB": _ampere("NVIDIA A100-SXM4-80GB", 2_039_040_000_000, 85_100_068_864),
    "H100-80GB": _hopper("NVIDIA H100 80GB HBM3", 3_352_320_000_000, 84_942_979_072),
    "H200-141GB": _hopper("NVIDIA H200 141GB HBM3e", 4_800_000_000_000, 151_397_597_184),
}
"""By the name that `giantjax.cluster` gives the GPU."""


def target_of(cluster: Cluster) -> Target:
    """The description of a cluster's GPUs.

    Raises:
        InputError: there is none.
    """
    if cluster.gpu.name not in TARGETS:
        raise InputError(f"nothing can be compiled for {cluster.gpu.name} of {cluster.name}; the GPUs described are {', '.join(TARGETS)}")
    return TARGETS[cluster.gpu.name]


def compile_only_devices(cluster: Cluster) -> list["jax.Device"]:
    """A device for each GPU of the cluster, to compile for and never to run on; its process is its node.

    Raises:
        InputError: the extra `[aot]` is not installed.
    """
    target = target_of(cluster)
    # The plugin looks for CUDA libraries of the right versions, none of which a compilation needs.
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    import jax
    from jax.experimental import topologies

    if not os.environ.get("JAX_PLATFORMS"):
        # Compiling must not take the memory of a GPU that is here after all.
        jax.config.update("jax_platforms", "cpu")
    shape = f"1x{cluster.num_nodes}x{cluster.gpus_per_node}"
    try:
        return list(topologies.get_topology_desc(platform="cuda", target_config=target.text, topology=shape).devices)
    except Exception as error:
        if is_installed():
            raise
        raise InputError(
            f"compiling for {cluster.gpu.name} needs JAX's CUDA plugin of version {jax.__version__}, which is not installed; {INSTALL}"
        ) from error


def is_installed() -> bool:
    """Whether the extra `[aot]`, or another one with JAX's CUDA plugin and compiler, is installed."""
    parents = ("jax_plugins", "nvidia")
    return all(
        importlib.util.find_spec(name) is not None for name in (*parents, "jax_cuda12_plugin", "jax_plugins.xla_cuda12", "nvidia.cuda_nvcc")
    )


@contextlib.contextmanager
def uncached() -> Iterator[None]:
    """Keep programs that are compiled meanwhile out of JAX's cache, which cannot give back those of GPUs that are not here."""
    import jax

    name = "jax_persistent_cache_min_compile_time_secs"
    before = getattr(jax.config, name)
    jax.config.update(name, math.inf)
    try:
        yield
    finally:
        jax.config.update(name, before)
