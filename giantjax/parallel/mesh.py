"""The device mesh of a run."""

from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import Mesh

from giantjax.config import MeshConfig
from giantjax.errors import InputError
from giantjax.parallel.nodes import Nodes
from giantjax.parallel.placement import AXES, Device, place_devices, where_axes_live

BATCH_AXES = ("replica", "data")
"""The axes that see different samples."""


def build_mesh(config: MeshConfig, nodes: Nodes | None = None, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """The mesh of the configured degrees, axes in the order of `AXES`, devices placed by their nodes' topology.

    A job on one node may use fewer devices than there are.

    Args:
        config: degrees, all of them numbers.
        nodes: where the devices are; None takes each process for a node in which all pairs are equal.
        devices: of which the mesh is made; None takes all of this job.

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
    order = place_devices(list_devices(devices, nodes), degrees, nodes.topologies if nodes else None, config.inside)
    placed = np.empty(order.shape, object)
    for place, number in np.ndenumerate(order):
        placed[place] = known[int(number)]
    return Mesh(placed, AXES)


def list_devices(devices: list[jax.Device], nodes: Nodes | None = None) -> list[Device]:
    """Each device with its node and its number there; the devices of a process are numbered as the process sees them."""
    seen: dict[int, int] = {}
    found = []
    for device in sorted(devices, key=lambda device: device.id):
        process = device.process_index
        number = seen.get(process, 0)
        seen[process] = number + 1
        place = nodes.places[process] if nodes and number < len(nodes.places[process].devices) else None
        found.append(Device(place.node if place else f"process {process}", place.devices[number] if place else number, device.id))
    return found


def axes_in_words(mesh: Mesh, nodes: Nodes | None = None) -> str:
    """Where the axes longer than 1 live: `pipe between nodes, data and tensor inside a node`."""
    ids = np.vectorize(lambda device: device.id, otypes=[int])(mesh.devices)
    axes: dict[str, list[str]] = {}
    for axis, where in where_axes_live(ids, list_devices(jax.devices(), nodes)).items():
        axes.setdefault(where, []).append(axis)
    return ", ".join(f"{' and '.join(names)} {where}" for where, names in axes.items())


__all__ = ["AXES", "BATCH_AXES", "axes_in_words", "build_mesh", "list_devices"]
