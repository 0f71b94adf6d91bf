"""The device mesh of a run."""

from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import Mesh

from giantjax.config import MeshConfig
from giantjax.errors import InputError
from giantjax.parallel.placement import AXES, Device, place_devices
from giantjax.parallel.topology import NodeTopology

BATCH_AXES = ("replica", "data")
"""The axes that see different samples."""


def build_mesh(config: MeshConfig, topologies: dict[str, NodeTopology] | None = None, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """The mesh of the configured degrees, axes in the order of `AXES`, devices placed by their nodes' topology.

    A job on one node may use fewer devices than there are. `devices` None is all of this job.

    Raises:
        InputError: the degrees do not fit the devices.
    """
    devices, needed = list(jax.devices() if devices is None else devices), config.num_devices
    if len(devices) < needed:
        kind = devices[0].platform.upper()
        raise InputError(
            f"the mesh needs mesh.pipe {config.pipe} x mesh.replica {config.replica} x mesh.data {config.data} x "
            f"mesh.tensor {config.tensor} = {needed} devices, but this job has {len(devices)} of kind {kind}; "
            f"set mesh.data to {max(1, len(devices) * config.data // needed)}"
            + (f", or add --runtime.num-cpu-devices {needed} to simulate them" if kind == "CPU" else "")
        )
    degrees = {axis: getattr(config, axis) for axis in AXES}
    known = {device.id: device for device in devices}
    # A process is a node unless told otherwise; its devices are numbered as the process sees them.
    listed = [Device(f"process {device.process_index}", number, device.id) for number, device in _numbered(devices)]
    order = place_devices(listed, degrees, topologies, config.inside)
    placed = np.empty(order.shape, object)
    for place, number in np.ndenumerate(order):
        placed[place] = known[int(number)]
    return Mesh(placed, AXES)


def _numbered(devices: list[jax.Device]) -> list[tuple[int, jax.Device]]:
    """(number within its process, device) of each device."""
    seen: dict[int, int] = {}
    found = []
    for device in sorted(devices, key=lambda device: device.id):
        number = seen.get(device.process_index, 0)
        seen[device.process_index] = number + 1
        found.append((number, device))
    return found


__all__ = ["AXES", "BATCH_AXES", "build_mesh"]
