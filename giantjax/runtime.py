"""What JAX reads once, before it starts; import this before jax."""

import contextlib
import math
import os
import signal
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from giantjax.config import RunConfig, RuntimeConfig
from giantjax.errors import InputError, TrainingFault
from giantjax.launch import Job

SHUTDOWN_SECONDS = 60
"""For which a process that ends waits for the others."""
THREADS_PER_CPU_DEVICE = 32
"""XLA's CPU runtime starts collectives that do not depend on each other side by side, and each holds a thread until all devices have
come to it; with a thread a device, which is its default on few cores, devices that wait for different ones wait for ever."""


def cache_folder() -> Path:
    """Where giantjax keeps what can be made again: $XDG_CACHE_HOME/giantjax or ~/.cache/giantjax.

    Raises:
        InputError: neither is known.
    """
    named = Path(os.environ.get("XDG_CACHE_HOME", ""))
    # The XDG specification asks that a relative path be ignored.
    if named.is_absolute():
        return named / "giantjax"
    try:
        return Path.home() / ".cache" / "giantjax"
    except RuntimeError as error:
        raise InputError("this user has no home folder to keep a cache in; set XDG_CACHE_HOME to an absolute path") from error


def alone(config: RunConfig) -> RuntimeConfig:
    """The runtime of a run for one process, which simulates the devices of all where the run simulates any."""
    return replace(config.runtime, num_cpu_devices=config.runtime.num_cpu_devices and config.mesh.num_devices)


def start(config: RuntimeConfig, job: Job | None = None, visible: Sequence[int] | None = None) -> None:
    """Choose devices, memory and the compilation cache, and start JAX.

    Args:
        config: what to choose.
        job: the processes to compute with; they are all there, which `Peers` has seen to. None computes alone.
        visible: which of the GPUs that the process sees are its own; None takes all.

    Raises:
        InputError: the compilation cache cannot be written, or the devices cannot be had.
        TrainingFault: the processes do not find each other.
    """
    # CUDA's own order is by speed; that of nvidia-smi, by which topologies are told, is this.
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", str(config.memory_fraction))
    if config.num_cpu_devices:
        os.environ["JAX_PLATFORMS"] = "cpu"
    # C++ libraries warn about GPUs that are not there; a user of the CPU did nothing wrong.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    # The extra [aot] brings a plugin that complains where there are neither GPUs nor CUDA libraries.
    gpus = any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/dxg").exists()
    if not gpus:
        os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    quiet = contextlib.nullcontext if gpus else _without_stderr
    with quiet():
        import jax
    from absl import logging

    # orbax warns of its own defaults, and logs with tracebacks what it raises as well.
    logging.set_verbosity(logging.FATAL)
    if config.num_cpu_devices:
        # The variable counts only where jax was not imported before.
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", config.num_cpu_devices)
    if (num_devices := config.num_cpu_devices or 1) > 1 or (job and job.num_processes > 1):
        os.environ.setdefault("PJRT_NPROC", str(THREADS_PER_CPU_DEVICE * num_devices))
    if config.compilation_cache != "off":
        folder = cache_folder() / "compiled" if config.compilation_cache == "auto" else Path(config.compilation_cache)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(
                f"runtime.compilation_cache {folder} cannot be made: {error.strerror}; "
                "name another folder, or off to compile anew each time"
            ) from error
        jax.config.update("jax_compilation_cache_dir", str(folder))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
    if job and job.num_processes > 1:
        _join(config, job, visible)
    try:
        with quiet():
            jax.devices()
    except RuntimeError as error:
        raise InputError(f"JAX found no device to run on: {error}") from error


@contextlib.contextmanager
def _without_stderr() -> Iterator[None]:
    """Drop what C++ libraries write while they start; exceptions still say what is wrong."""
    kept = os.dup(2)
    try:
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def _join(config: RuntimeConfig, job: Job, visible: Sequence[int] | None) -> None:
    """Make this process one of a job."""
    import jax

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    before = signal.getsignal(signal.SIGTERM)
    try:
        jax.distributed.initialize(
            job.coordinator,
            job.num_processes,
            job.process_id,
            local_device_ids=visible,
            cluster_detection_method="deactivate",
            initialization_timeout=math.ceil(config.start_timeout),
            shutdown_timeout_seconds=SHUTDOWN_SECONDS,
        )
    except RuntimeError as error:
        raise TrainingFault(f"process {job.process_id} cannot join the others at {job.coordinator}: {error}") from error
    # JAX's service for preemptions, which orbax asks, has taken the signal for itself.
    signal.signal(signal.SIGTERM, before)
