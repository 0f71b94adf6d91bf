"""A run's train step compiled for GPUs that are not here, and what the result tells: memory, traffic, overlap.

The step is the real one, optimizer included, on a mesh placed as the run would place it, compiled with the options that
training uses. It proves memory, traffic and the order of work; not speed, and not that a library supports the GPU.
"""

import dataclasses
import math
import time
from collections import Counter
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from giantjax.cluster import Cluster
from giantjax.compile_report import STEADY, Carried, Compute, Hop, Memory, Report, Sum, Use, show
from giantjax.config import RunConfig
from giantjax.errors import InputError
from giantjax.hlo import Program, parse
from giantjax.model.gpt import model_on_mesh
from giantjax.overlap import HOPS, Collective, Window, collectives, dependents, flops, windows
from giantjax.parallel.mesh import AXES, build_mesh
from giantjax.parallel.nodes import Nodes, Place
from giantjax.parallel.placement import infer_degrees
from giantjax.parallel.topology import known_topology
from giantjax.planner.stage_memory import RESERVED
from giantjax.targets import INSTALL, Target, compile_only_devices, target_of, uncached
from giantjax.traffic import axes_of, foretell, traffic
from giantjax.training.optimizer import build_optimizer
from giantjax.training.parts import layout_of_run, train_step_of_run
from giantjax.training.precision import DTYPES, resolve_precision
from giantjax.training.state import Layout, abstract_state
from giantjax.training.step import BATCH_SPEC

SCALARS = 1024
"""Bytes up to which a sum is of a few numbers."""


class Lowered(NamedTuple):
    """A traced step, not yet compiled."""

    step: jax.stages.Lowered
    config: RunConfig
    cluster: Cluster
    layout: Layout
    compute: Compute
    why: str
    target: Target
    lower_s: float


def lower_plan(config: RunConfig, cluster: Cluster, compute: Compute | None = None) -> Lowered:
    """Trace the train step of `config` on the GPUs of `cluster`; no array is made.

    Args:
        config: the run, its mesh as large as the cluster; degrees that are None are inferred from it.
        cluster: what it would run on.
        compute: type of matrix products in the place of the configured one.

    Raises:
        InputError: the extra `[aot]` is not installed, or the mesh does not fit the cluster.
    """
    devices = compile_only_devices(cluster)
    degrees: dict[str, Any] = infer_degrees(
        {axis: getattr(config.mesh, axis) for axis in AXES}, cluster.num_nodes, cluster.gpus_per_node, config.mesh.inside
    )
    config = dataclasses.replace(config, mesh=dataclasses.replace(config.mesh, **degrees))
    mesh = build_mesh(config.mesh, nodes_of(cluster), devices)
    chosen, why = resolve_precision(config.training.precision, devices[0]) if compute is None else (compute, "as asked")
    begin = time.perf_counter()
    config = dataclasses.replace(config, training=dataclasses.replace(config.training, precision=chosen))
    model = model_on_mesh(config, DTYPES[chosen])
    optimizer = build_optimizer(config, model.decays)
    layout = layout_of_run(config, model, optimizer, mesh)
    step = train_step_of_run(config, optimizer, layout)
    lowered = step.lower(abstract_state(layout), _abstract_batch(config, layout))
    return Lowered(lowered, config, cluster, layout, chosen, why, target_of(cluster), time.perf_counter() - begin)


def nodes_of(cluster: Cluster) -> Nodes:
    """The nodes of a cluster, one process each."""
    names = [f"node {number}" for number in range(cluster.num_nodes)]
    topology = known_topology(cluster.gpu.name, cluster.gpus_per_node)
    places = tuple(Place(name, tuple(range(cluster.gpus_per_node)), None) for name in names)
    return Nodes(places, {name: topology for name in names})


def _abstract_batch(config: RunConfig, layout: Layout) -> dict[str, jax.ShapeDtypeStruct]:
    samples, where = config.training.global_batch_size, NamedSharding(layout.mesh, BATCH_SPEC)
    kinds: dict[str, Any] = {"tokens": jnp.int32, "targets": jnp.int32, "loss_mask": jnp.float32}
    kinds |= {"segment": jnp.int32} if config.data.reset_attention else {}
    kinds |= {"position": jnp.int32} if config.data.reset_positions else {}
    positions = {
        name: jax.ShapeDtypeStruct((samples, config.model.sequence_length), dtype, sharding=where) for name, dtype in kinds.items()
    }
    return positions | {"sample": jax.ShapeDtypeStruct((samples,), jnp.uint32, sharding=where)}


def compile_lowered(lowered: Lowered, *, triton: bool = True) -> Report:
    """Compile and read the result.

    Raises:
        InputError: neither the extra `[aot]` nor the machine brings a ptxas that knows the GPU.
    """
    begin = time.perf_counter()
    try:
        with uncached():
            compiled = lowered.step.compile(compiler_options={"xla_gpu_enable_triton_gemm": triton})
    except jax.errors.JaxRuntimeError as error:
        if any(words in str(error) for words in ("ptxas", "libdevice")):
            raise InputError(
                f"XLA found no CUDA 12 ptxas and libdevice to compile for {lowered.target.name} with ({error}); {INSTALL} brings both"
            ) from error
        raise
    seconds = time.perf_counter() - begin
    return _report(lowered, compiled, triton, seconds)


def compile_plan(config: RunConfig, cluster: Cluster, *, compute: Compute | None = None, triton: bool = True) -> Report:
    """`lower_plan`, then `compile_lowered`."""
    return compile_lowered(lower_plan(config, cluster, compute), triton=triton)


def verify(config: RunConfig, cluster: Cluster, compute: Compute | None = None) -> Report:
    """The worse of two programs, with matrix products by Triton and by cuBLAS: XLA chooses between them on the GPU.

    Raises:
        InputError: as `compile_plan`.
    """
    lowered = lower_plan(config, cluster, compute)
    reports = [compile_lowered(lowered, triton=triton) for triton in (True, False)]
    worse = max(reports, key=lambda report: (not report.fits, report.exposed > 1 - STEADY, report.memory.total))
    return dataclasses.replace(worse, compile_s=sum(report.compile_s for report in reports))


def usable_bytes(config: RunConfig, cluster: Cluster) -> int:
    """Bytes of a GPU that a program may take: what JAX may, less RESERVED."""
    return int(target_of(cluster).memory_bytes * config.runtime.memory_fraction) - RESERVED


def _report(lowered: Lowered, compiled: jax.stages.Compiled, triton: bool, compile_s: float) -> Report:
    config, layout = lowered.config, lowered.layout
    # Groups name devices by their place in the mesh; a compile-only device's process is its node.
    nodes = [device.process_index for device in layout.mesh.devices.flat]
    degrees = {axis: layout.mesh.shape[axis] for axis in AXES}
    program = parse(compiled.as_text() or "")
    found = collectives(program)
    positions = config.microbatch_size * config.model.sequence_length
    of_head = [each for each in found if _is_of_shared_head(each, degrees, positions, config.model.hidden_size)]
    across = traffic(found, nodes).across
    of_node = Counter[int]()
    for node, sent in zip(nodes, across.tolist(), strict=True):
        of_node[node] += sent
    analysis = compiled.memory_analysis()
    assert analysis is not None
    memory = Memory(
        analysis.argument_size_in_bytes,
        analysis.output_size_in_bytes,
        analysis.alias_size_in_bytes,
        analysis.temp_size_in_bytes,
        usable_bytes(config, lowered.cluster),
    )
    width = DTYPES[lowered.compute].itemsize
    return Report(
        config=config,
        cluster=lowered.cluster,
        compute=lowered.compute,
        why=lowered.why,
        triton=triton,
        memory=memory,
        uses=_uses(found, nodes, degrees),
        busiest_node=max(of_node.values()),
        busiest_device=float(across.max()),
        hops=_hops(program, degrees),
        head_bytes=float(traffic(of_head, nodes).across.sum()),
        head_bytes_in_loops=float(traffic([each for each in of_head if each.in_loop], nodes).across.sum()),
        gradient_sums=_gradient_sums(program, degrees),
        gradient_sums_in_loops=tuple(
            f"{each.kind} of {', '.join(map(str, each.payload))} over {' and '.join(axes_of(each, degrees))}, {each.times} times"
            for each in found
            if _sums_gradients_in_loop(each, degrees, positions, layout.zero_stage)
        ),
        carried=_carried(program),
        slice_bytes=positions * config.model.hidden_size * width // config.mesh.tensor,
        foretold=foretell(config, layout, nodes, width),
        lower_s=lowered.lower_s,
        compile_s=compile_s,
    )


def _uses(found: list[Collective], nodes: list[int], degrees: dict[str, int]) -> tuple[Use, ...]:
    """By kind, axes and place, those that send most between nodes first."""
    members: dict[tuple[str, tuple[str, ...], bool], list[Collective]] = {}
    for each in found:
        if each.kind != "recv":
            members.setdefault((each.kind, axes_of(each, degrees), each.in_loop), []).append(each)
    uses = []
    for key, group in members.items():
        sent = traffic(group, nodes)
        uses.append(Use(*key, sum(each.times for each in group), float(sent.inside.sum()), float(sent.across.sum())))
    return tuple(sorted(uses, key=lambda use: (-use.across, -use.inside)))


def _gradient_sums(program: Program, degrees: dict[str, int]) -> tuple[Sum, ...]:
    found = [
        window
        for window in windows(program, ("all-reduce", "reduce-scatter", "all-to-all"))
        if not window.collective.in_loop and "replica" in axes_of(window.collective, degrees) and window.collective.num_bytes > SCALARS
    ]
    return tuple(Sum(window.collective.num_bytes, flops(program, window.computation, window.between)) for window in found)


def _hops(program: Program, degrees: dict[str, int]) -> tuple[Hop, ...]:
    by_computation: dict[str, list[Window]] = {}
    for window in windows(program):
        by_computation.setdefault(window.computation, []).append(window)
    return tuple(hop for together in by_computation.values() for hop in _hops_of_tick(program, together, degrees))


def _hops_of_tick(program: Program, together: list[Window], degrees: dict[str, int]) -> list[Hop]:
    """The hops of one tick: forward work is all that needs what comes forward, backward work is the rest."""
    place = together[0].computation
    directions = [_direction(window.collective, degrees) for window in together]
    arrivals = [window.end.name for window, direction in zip(together, directions, strict=True) if direction == "forward"]
    needing = dependents(program, place, arrivals)
    steady, found = len(set(directions)) == 2 and together[0].collective.in_loop, []
    for window, direction in zip(together, directions, strict=True):
        # What the hop is to lie over: in a tick with both directions the other one's work, else anything.
        of = tuple(each for each in program.computations[place] if not steady or (each.name in needing) == (direction == "backward"))
        inside = {each.name for each in window.between}
        between = tuple(each for each in of if each.name in inside)
        whole = flops(program, place, of)
        hidden = flops(program, place, between) / whole if whole else 1.0
        found.append(Hop(direction, steady, window.collective.times, hidden, window.collective.num_bytes))
    return found


def _direction(hop: Collective, degrees: dict[str, int]) -> Literal["forward", "backward"]:
    stage_size = math.prod(degrees.values()) // degrees["pipe"]
    source, target = (place // stage_size for place in hop.pairs[0])
    return "forward" if source < target else "backward"


def _is_of_shared_head(each: Collective, degrees: dict[str, int], positions: int, hidden: int) -> bool:
    """Whether all stages sum a device's part of a boundary, or up to three numbers a position, as they do to share the head."""
    if each.kind != "all-reduce" or "pipe" not in axes_of(each, degrees) or set(axes_of(each, degrees)) > {"pipe", "tensor"}:
        return False
    sizes = [shape.size for shape in each.payload]
    return all(size == positions * hidden // degrees["tensor"] or size in (positions, 2 * positions, 3 * positions) for size in sizes)


def _sums_gradients_in_loop(each: Collective, degrees: dict[str, int], positions: int, zero_stage: int) -> bool:
    """Whether a sum in a loop joins devices with other samples or stages, or is of something else than activations.

    Devices that share layers sum whole activations by reduce-scatter, and up to three numbers a position by all-reduce. From ZeRO 2 on
    those that share gradients scatter them.
    """
    if not each.in_loop or each.kind not in ("all-reduce", "reduce-scatter"):
        return False
    elements = sum(shape.size for shape in each.payload)
    others = set(axes_of(each, degrees)) - {"tensor"}
    if zero_stage >= 2 and each.kind == "reduce-scatter" and others == {"data"}:
        return False
    return bool(others) or (each.kind == "all-reduce" and (elements % positions != 0 or elements > 3 * positions))


def _carried(program: Program, most: int = 12) -> tuple[Carried, ...]:
    """Of the loop whose body has hops and which turns most often; without hops, of the one that carries most."""
    bodies = {each.computation for each in collectives(program) if each.kind in HOPS}
    every = [each for name in program.runs for each in program.computations[name] if each.opcode == "while"]
    loops = [each for each in every if each.calls("body")[0] in bodies]
    if not every:
        return ()
    longest = max(loops, key=lambda each: each.trip_count) if loops else max(every, key=lambda each: sum(s.num_bytes for s in each.shapes))
    counts = Counter(longest.shapes)
    return tuple(Carried(*item) for item in sorted(counts.items(), key=lambda item: -item[0].num_bytes * item[1])[:most])


__all__ = ["Report", "compile_lowered", "compile_plan", "lower_plan", "show", "usable_bytes", "verify"]
