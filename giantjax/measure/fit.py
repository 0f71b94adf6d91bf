"""Latency and bandwidth of a link out of the times of messages of several sizes. No jax."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from giantjax.errors import InputError

COLLECTIVES = {
    "hop_inside": "hop to the next GPU of the node",
    "all_reduce_inside": "all-reduce over the node",
    "hop_across_one": "hop to the next node, one GPU a node at a time",
    "hop_across": "hop to the next node, all GPUs at once",
    "all_reduce_across": "all-reduce over nodes, all GPUs at once",
    "all_reduce": "all-reduce over both levels",
}
"""What is timed, in words."""


@dataclass(frozen=True)
class Fit:
    """time = latency + bytes / bandwidth."""

    latency: float
    """Seconds."""
    bandwidth: float
    """Bytes/s that a GPU sends."""
    deviation: float
    """Largest relative distance of a time from the line."""


def fit_link(points: Sequence[tuple[float, float]]) -> Fit:
    """The least-squares line through (bytes, seconds), by relative error, for sizes span orders of magnitude; latency is 0 or more.

    Raises:
        InputError: there are fewer than two sizes, or time does not grow with bytes.
    """
    num_bytes, seconds = np.array(points, float).reshape(-1, 2).T
    if len(set(num_bytes)) < 2 or not np.all(np.isfinite(seconds) & (seconds > 0)):
        raise InputError(f"a line needs the times of two sizes or more, each above 0, not {len(points)} of {seconds.tolist()}")
    columns = np.stack([np.ones_like(num_bytes), num_bytes]) / seconds
    latency, slope = np.linalg.lstsq(columns.T, np.ones_like(seconds), rcond=None)[0]
    if latency < 0:
        latency, slope = 0.0, columns[1].sum() / (columns[1] ** 2).sum()
    if slope <= 0:
        raise InputError(
            f"messages of {num_bytes[-1]:.0f} bytes take no longer than those of {num_bytes[0]:.0f} ({seconds[-1]:.3g} and "
            f"{seconds[0]:.3g} s); measure again when the machines are idle"
        )
    deviation = np.max(np.abs((latency + slope * num_bytes) / seconds - 1))
    return Fit(float(latency), float(1 / slope), float(deviation))


def sent_bytes(collective: str, size: float, inside: int, across: int) -> float:
    """Bytes that a GPU sends over the link that `collective` is about, for an array of `size` bytes a GPU (collectives.py)."""
    if collective.startswith("hop"):
        return size
    if collective == "all_reduce_inside":
        return 2 * size * (inside - 1) / inside
    return 2 * size * (across - 1) / across / (inside if collective == "all_reduce" else 1)


def measurable(inside: int, across: int) -> tuple[str, ...]:
    """The collectives that `across` nodes of `inside` GPUs have links for."""
    within = ("hop_inside", "all_reduce_inside") if inside > 1 else ()
    between = ("hop_across_one", "hop_across", "all_reduce_across") if across > 1 else ()
    return (*within, *between, *(("all_reduce",) if within and between else ()))
