"""Whether a run fits this machine, said before anything is allocated."""

from collections.abc import Iterable

from giantjax.cluster import Machine
from giantjax.config import RunConfig
from giantjax.errors import InputError
from giantjax.planner.flops import num_parameters
from giantjax.planner.memory import in_words, memory_need


def bytes_needed(config: RunConfig, machine: Machine) -> int:
    """Bytes the run takes of one GPU, or of the whole machine where its devices are simulated."""
    wanted = config.training.precision
    precision = wanted if wanted != "auto" else ("fp32" if machine.simulated else "bf16")
    mesh = config.mesh
    need = memory_need(config, precision, mesh.pipe, mesh.tensor, mesh.data)
    return need.total * (mesh.num_devices if machine.simulated else 1)


def bytes_usable(config: RunConfig, machine: Machine) -> int:
    """Bytes of `machine.memory_bytes` that the run may take."""
    return int(machine.memory_bytes * (0.95 if machine.simulated else config.runtime.memory_fraction))


def check_fits(config: RunConfig, machine: Machine, presets: Iterable[RunConfig]) -> None:
    """Raise InputError where the run cannot fit, naming the largest of `presets` that does."""
    needed = bytes_needed(config, machine)
    if needed <= bytes_usable(config, machine):
        return
    fitting = [
        preset
        for preset in presets
        if bytes_needed(preset, machine) <= bytes_usable(preset, machine)
        and (machine.simulated or preset.mesh.num_devices <= machine.num_devices)
    ]
    largest = max(fitting, key=lambda preset: num_parameters(preset.model), default=None)
    advice = f"the largest shipped config that fits is {largest.name}, and " if largest else ""
    raise InputError(
        f"{config.name} needs {in_words(needed)} ({needed:,} bytes) {'of memory' if machine.simulated else 'on each GPU'}, "
        f"but this machine ({machine.kind}) has {in_words(machine.memory_bytes)} ({machine.memory_bytes:,} bytes); {advice}"
        f"`python scripts/plan.py --config {config.name} --cluster v100x4-tcp100` says what would hold it"
    )
