"""Times collectives on the devices there are: python -m giantjax.measure.timing RESULT, one process of a job, its request on stdin.

A process of its own for every transport, for NCCL reads its settings once. The mesh is that of training, `replica` between
nodes and `data` inside, and so are the collectives.
"""

import dataclasses
import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from giantjax import runtime
from giantjax.agreement import versions
from giantjax.config import MeshConfig, RuntimeConfig
from giantjax.errors import InputError, TrainingFault, report
from giantjax.fields import from_dict
from giantjax.launch import Job
from giantjax.nccl import parse_log
from giantjax.parallel.nodes import nodes_from

REPEATS = 4
LEAST_SIZES = 3


@dataclasses.dataclass(frozen=True)
class Request:
    """What to time."""

    collectives: tuple[str, ...]
    sizes: tuple[int, ...]
    """Bytes a device, ascending; the largest are left out where time runs short."""
    seconds: float
    """For each collective."""
    timeout: float
    """Seconds after which the process ends itself."""


def main() -> int:
    """Time what is asked for; the result goes to the file of the first argument."""
    told = json.load(sys.stdin)
    request = from_dict(Request, told["request"])
    # Whoever started this may be gone, and collectives wait for ever.
    signal.alarm(int(request.timeout))
    nodes, job = nodes_from(told["nodes"]), from_dict(Job, told["job"])
    try:
        runtime.start(from_dict(RuntimeConfig, told["runtime"]), job, nodes.places[job.process_id].visible)
        result = measure(request, told["nodes"])
    except (InputError, TrainingFault) as error:
        return report(error)
    Path(sys.argv[1]).write_text(json.dumps(result))
    return 0


def measure(request: Request, told: Any) -> dict[str, Any]:
    """Seconds of each collective by size, the slowest process's; and what was measured with."""
    import jax

    from giantjax.parallel.mesh import build_mesh

    nodes = nodes_from(told)
    mesh = build_mesh(MeshConfig(replica=len(nodes.names), data=min(nodes.per_node.values())), nodes)
    times = {name: _times(name, mesh, request) for name in request.collectives}
    log = os.environ.get("NCCL_DEBUG_FILE")
    choice = parse_log(Path(log).read_text(errors="replace")) if log and os.path.exists(log) else None
    found = {name.removeprefix("the version of "): version for name, version in versions().items()}
    if choice and choice.version:
        found["nccl"] = choice.version
    return {
        "times": times,
        "kind": jax.devices()[0].device_kind,
        "versions": found,
        "network": choice and choice.network,
        "choice": choice and str(choice),
    }


def _times(name: str, mesh: Any, request: Request) -> list[tuple[int, float]]:
    """(bytes, seconds) of one collective, the same on every process."""
    begin = time.perf_counter()
    found: list[tuple[int, float]] = []
    for size in request.sizes:
        if len(found) >= LEAST_SIZES:
            last_size, last = found[-1]
            ahead = last * size / last_size * _chained(size) * (REPEATS + 1)
            if _slowest(mesh, time.perf_counter() - begin) + ahead > request.seconds:
                break
        found.append((size, _slowest(mesh, _time(name, mesh, size))))
    return found


def _chained(size: int) -> int:
    """Collectives in one program, so that its start counts little."""
    return max(2, min(16, 2**22 // size))


def _time(name: str, mesh: Any, size: int) -> float:
    """Median seconds of one collective of `size` bytes a device on this process."""
    import jax
    import jax.numpy as jnp
    from jax import lax
    from jax.sharding import NamedSharding, PartitionSpec

    spec, number = PartitionSpec(mesh.axis_names), _chained(size)
    collective = _collective(name, mesh.shape)

    @jax.jit
    @partial(jax.shard_map, mesh=mesh, in_specs=spec, out_specs=spec)
    def chain(x: jax.Array) -> jax.Array:
        # One value that differs by device, written in place: of equal values XLA knows the sum without asking the others.
        own = lax.axis_index(mesh.axis_names).astype(x.dtype)
        for _ in range(number):
            x = collective(x).at[0].set(own)
        return x

    make = jax.jit(lambda: jnp.zeros(mesh.size * (size // 4), jnp.float32), out_shardings=NamedSharding(mesh, spec))
    x = jax.block_until_ready(make())
    jax.block_until_ready(chain(x))
    seconds = []
    for _ in range(REPEATS):
        begin = time.perf_counter()
        jax.block_until_ready(chain(x))
        seconds.append((time.perf_counter() - begin) / number)
    return statistics.median(seconds)


def _collective(name: str, degrees: Any) -> Callable[[Any], Any]:
    """The collective inside a `shard_map`; of the all-reduce over both levels also its two halves inside, and its middle across."""
    from jax import lax

    from giantjax.parallel.collectives import all_reduce

    inside, across = degrees["data"], degrees["replica"]
    ring = lambda count, step=1: [(i * step, (i + 1) % count * step) for i in range(count)]  # noqa: E731
    return {
        "hop_inside": lambda x: lax.ppermute(x, "data", ring(inside)),
        "all_reduce_inside": lambda x: lax.all_gather(lax.psum_scatter(x, "data", tiled=True), "data", tiled=True, to="invarying"),
        "hop_across_one": lambda x: lax.ppermute(x, ("replica", "data"), ring(across, inside)),
        "hop_across": lambda x: lax.ppermute(x, "replica", ring(across)),
        "all_reduce_across": lambda x: lax.psum(x, "replica"),
        "all_reduce": lambda x: all_reduce(x, "data", "replica"),
    }[name]


def _slowest(mesh: Any, value: float) -> float:
    """The largest of the values that the processes have."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import NamedSharding, PartitionSpec

    split, whole = NamedSharding(mesh, PartitionSpec(mesh.axis_names)), NamedSharding(mesh, PartitionSpec())
    values = jax.make_array_from_callback((mesh.size,), split, lambda _: np.full(1, value, np.float32))
    return float(jax.jit(jnp.max, out_shardings=whole)(values))


if __name__ == "__main__":
    sys.exit(main())
