"""JAX for every test: eight simulated CPU devices, full fp32 products, compiled programs kept between runs."""

import os
import tempfile
from pathlib import Path

import jax
import pytest

from giantjax.launch import LAUNCHERS
from giantjax.runtime import THREADS_PER_CPU_DEVICE

# A test is a process of its own, whatever launcher started the shell.
for name in [name for name in os.environ if name.startswith(("SLURM_", "OMPI_", "PMIX_"))] + [*LAUNCHERS, "WORLD_SIZE", "NUM_WORKER"]:
    os.environ.pop(name, None)
for name in ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "CUDA_VISIBLE_DEVICES"):
    os.environ.pop(name, None)

# Test programs run for milliseconds: compiling them is what takes time.
flags = ["--xla_backend_optimization_level=0"]
if jax.__version_info__ < (0, 11):  # later versions do not know this flag, and stop at one they do not know
    flags.append("--xla_cpu_use_fusion_emitters=false")
os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *flags]).strip()

# As runs set it for as many devices.
os.environ["PJRT_NPROC"] = str(8 * THREADS_PER_CPU_DEVICE)
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_default_matmul_precision", "highest")
# One folder for all workers and runs, so that none compiles what another has.
jax.config.update("jax_compilation_cache_dir", str(Path(tempfile.gettempdir()) / f"giantjax-tests-{os.getuid()}"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of data and measurements beside the checkout."""
    folder = Path(__file__).parents[1].parent / "shared"
    if not folder.is_dir():
        pytest.skip(f"needs the reference data in {folder}, which is not there")
    return folder
