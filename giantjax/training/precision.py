"""The type that matrix products are computed in."""

from typing import Literal, get_args

import jax
import jax.numpy as jnp

from giantjax.errors import InputError

Precision = Literal["fp32", "bf16", "fp16"]
DTYPES = {"fp32": jnp.dtype(jnp.float32), "bf16": jnp.dtype(jnp.bfloat16), "fp16": jnp.dtype(jnp.float16)}


def resolve_precision(wanted: str, device: jax.Device) -> tuple[Precision, str]:
    """The precision to compute in on `device`, and the reason as a phrase.

    `auto` takes bf16 on GPUs of compute capability 8.0 and later, fp16 on those of 7.x, whose tensor cores have nothing wider
    of two bytes, and fp32 elsewhere.

    Raises:
        InputError: bf16 is asked of a GPU that does not have it.
    """
    capability = float(getattr(device, "compute_capability", None) or 0) if device.platform == "gpu" else None
    if wanted == "auto":
        if capability is None:
            return "fp32", f"auto on a {device.platform.upper()}"
        return ("bf16" if capability >= 8 else "fp16" if capability >= 7 else "fp32"), f"auto on compute capability {capability}"
    if wanted == "bf16" and capability is not None and capability < 8:
        raise InputError(
            f"training.precision is bf16, but {device.device_kind} has compute capability {capability} and bf16 needs 8.0; use fp16 or fp32"
        )
    return next(name for name in get_args(Precision) if name == wanted), "as configured"
