"""The device mesh of a run."""

import jax
import numpy as np
from jax.sharding import Mesh

from giantjax.config import MeshConfig
from giantjax.errors import InputError

AXES = ("pipe", "replica", "data", "tensor")
BATCH_AXES = ("replica", "data")
"""The axes that see different samples."""


def build_mesh(config: MeshConfig) -> Mesh:
    """The mesh of the configured degrees over the first devices there are, axes in the order of `AXES`.

    Raises:
        InputError: there are fewer devices than the degrees multiply to.
    """
    devices = jax.devices()
    needed = config.num_devices
    if len(devices) < needed:
        kind = devices[0].platform.upper()
        raise InputError(
            f"the mesh needs mesh.pipe {config.pipe} x mesh.replica {config.replica} x mesh.data {config.data} x "
            f"mesh.tensor {config.tensor} = {needed} devices, but this machine has {len(devices)} of kind {kind}; "
            f"set mesh.data to {max(1, len(devices) * config.data // needed)}"
            + (f", or add --runtime.num-cpu-devices {needed} to simulate them" if kind == "CPU" else "")
        )
    shape = tuple(getattr(config, axis) for axis in AXES)
    return Mesh(np.array(devices[:needed]).reshape(shape), AXES)
