"""metrics.jsonl and what is computed for it."""

import json
import math
import os
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from giantjax.cluster import gpu_of_kind

Record = dict[str, Any]
"""One step: `step`, `loss`, ... as the design of the run directory lists them."""


class MetricsFile:
    """metrics.jsonl: one JSON object a step, appended line by line."""

    def __init__(self, path: Path, last_step: int):
        """Open for appending after `last_step`; lines of later steps and a torn last line are cut off first."""
        self.path = path
        kept = [line for line in _whole_lines(path) if json.loads(line)["step"] <= last_step]
        aside = path.with_suffix(".jsonl.part")
        with aside.open("w", encoding="utf-8") as file:
            file.writelines(kept)
            # Before the rename: a power failure must not leave the new name with nothing in it.
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
        self._file = path.open("a", encoding="utf-8", buffering=1)

    def append(self, record: Record) -> None:
        """Write one record; numbers that JSON does not have become null."""
        finite = {name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in record.items()}
        self._file.write(json.dumps(finite) + "\n")

    def sync(self) -> None:
        """Make sure that what was written survives a power failure; called before a checkpoint counts on it."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_metrics(path: Path) -> list[Record]:
    """Every whole record of a metrics.jsonl."""
    return [json.loads(line) for line in _whole_lines(path)]


def _whole_lines(path: Path) -> list[str]:
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    return [line for line in lines if line.endswith("\n") and _is_record(line)]


def _is_record(line: str) -> bool:
    try:
        record = json.loads(line)
        return isinstance(record, dict) and isinstance(record.get("step"), int)
    except json.JSONDecodeError:
        return False


def peak_flops(device: jax.Device, precision: str) -> tuple[float, str]:
    """Peak FLOP/s of one device for MFU, and where the figure is from.

    A GPU's is its datasheet's. A CPU has no such figure: its fastest of a few 1024-cubed fp32 products is taken, of
    all simulated devices together, since they share the cores.
    """
    gpu = gpu_of_kind(device.device_kind) if device.platform == "gpu" else None
    if gpu:
        return (gpu.half_flops if precision != "fp32" else gpu.single_flops), f"{gpu.name} datasheet"
    size = 1024
    a = jnp.ones((size, size), jnp.float32)
    multiply = jax.jit(jnp.matmul)
    multiply(a, a).block_until_ready()
    times = []
    for _ in range(5):
        begin = time.perf_counter()
        multiply(a, a).block_until_ready()
        times.append(time.perf_counter() - begin)
    share = jax.device_count() if device.platform == "cpu" else 1
    return 2 * size**3 / min(times) / share, "fastest 1024 x 1024 fp32 matrix product measured here"
