"""What a run finds where it starts."""

from dataclasses import dataclass

from giantjax.errors import InputError
from giantjax.fields import above_zero, at_least, check_types


@dataclass(frozen=True)
class RuntimeConfig:
    """Devices and processes."""

    num_cpu_devices: int | None = None
    """Run on this many simulated CPU devices in each process; None uses the GPUs there are, or one CPU device."""
    coordinator: str | None = None
    """HOST:PORT of process 0 in a job of several processes; None is what the launcher says."""
    num_processes: int | None = None
    """Processes of the job; None is what the launcher says, and 1 runs alone whatever it says."""
    process_id: int | None = None
    """Which of them this one is, from 0; None is what the launcher says."""
    start_timeout: float = 300.0
    """Seconds that the processes of a job wait for each other before training."""
    cluster: str | None = None
    """A cluster file, or the name of a cluster: its transport settings are exported before JAX starts, and an automatic mesh
    is planned for its links. None leaves NCCL to itself."""
    compilation_cache: str = "auto"
    """Folder of compiled programs; auto is giantjax/compiled in the user's cache folder, off compiles anew each time."""
    memory_fraction: float = 0.92
    """Part of a GPU's memory that JAX may take."""

    def __post_init__(self) -> None:
        check_types(self, "runtime")
        if self.num_cpu_devices is not None:
            at_least("runtime.num_cpu_devices", self.num_cpu_devices, 1)
        if self.num_processes is not None:
            at_least("runtime.num_processes", self.num_processes, 1)
        if self.process_id is not None:
            at_least("runtime.process_id", self.process_id, 0)
        above_zero("runtime.start_timeout", self.start_timeout)
        if not 0 < self.memory_fraction <= 1:
            raise InputError(f"runtime.memory_fraction is {self.memory_fraction}; it must be above 0 and at most 1")
