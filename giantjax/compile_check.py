"""A run's train step compiled for GPUs that are not here, and what the result tells: memory, traffic, overlap.

The step is the real one, optimizer included, on a mesh placed as the run would place it, compiled with the options that
training uses. It proves memory, traffic and the order of work; not speed, and not that a library supports the GPU.
"""

import dataclasses
import math
import time
from collections import Counter
from dataclasses import dataclass
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from giantjax.cluster import Cluster
from giantjax.config import RunConfig
from giantjax.errors import InputError
from giantjax.hlo import HOPS, Collective, Program, Shape, Window, parse
from giantjax.model.gpt import model_on_mesh
from giantjax.parallel.mesh import AXES, build_mesh
from giantjax.parallel.topology import known_topology
from giantjax.targets import INSTALL, Target, compile_only_devices, target_of
from giantjax.traffic import Foretold, axes_of, foretell, traffic
from giantjax.training.optimizer import build_optimizer
from giantjax.training.precision import resolve_precision
from giantjax.training.state import Layout, abstract_state, layout_of
from giantjax.training.step import BATCH_SPEC, build_train_step

Compute = Literal["fp32", "bf16", "fp16"]
DTYPES = {"fp32": jnp.float32, "bf16": jnp.bfloat16, "fp16": jnp.float16}
RESERVED = 2**30
"""Bytes kept free of what JAX may take: NCCL's buffers, workspaces of matrix products, and what fragments leave unused. The
part of the memory that `runtime.memory_fraction` leaves out holds the CUDA context."""
STEADY = 0.95
"""Share of the other direction's matrix products that each hop is to lie over."""


@dataclass(frozen=True)
class Memory:
    """Bytes on one device, as XLA's buffer assignment has them."""

    arguments: int
    """State and batch."""
    outputs: int
    aliased: int
    """Of the outputs, what takes the place of arguments."""
    temporary: int
    usable: int
    """What a program may take of the GPU."""

    @property
    def total(self) -> int:
        """All that is there at once."""
        return self.arguments + self.outputs - self.aliased + self.temporary


class Use(NamedTuple):
    """Collectives of one kind along the same axes."""

    kind: str
    axes: tuple[str, ...]
    in_loop: bool
    times: int
    """In a step."""
    inside: float
    """Bytes all devices together send within nodes in a step."""
    across: float
    """Between nodes."""


class Hop(NamedTuple):
    """One boundary transfer, in the loop over ticks that it stands in."""

    direction: Literal["forward", "backward"]
    steady: bool
    """Whether the loop has forward and backward work."""
    times: int
    hidden: float
    """Share, 0 to 1, of the matrix products that run while it travels: of the other direction's in a steady loop, else of all."""
    num_bytes: int
    """A device sends."""


class Carried(NamedTuple):
    """Arrays of one shape that the longest loop over ticks carries from turn to turn."""

    shape: Shape
    count: int


@dataclass(frozen=True)
class Report:
    """What one compiled step tells."""

    config: RunConfig
    cluster: Cluster
    compute: Compute
    why: str
    """The reason for `compute`."""
    triton: bool
    """Whether matrix products were left to Triton; otherwise they are calls of cuBLAS."""
    memory: Memory
    uses: tuple[Use, ...]
    busiest_node: float
    """Bytes that the node that sends most sends to others in a step."""
    busiest_device: float
    """The same of a device."""
    hops: tuple[Hop, ...]
    gradient_sums_in_loops: tuple[str, ...]
    """Sums of gradients that run in every tick; there should be none."""
    carried: tuple[Carried, ...]
    """Largest first."""
    foretold: Foretold
    lower_s: float
    compile_s: float

    @property
    def fits(self) -> bool:
        """Whether the step's memory is within what a program may take."""
        return self.memory.total <= self.memory.usable

    @property
    def network_bytes(self) -> float:
        """Bytes between nodes a step, in total."""
        return sum(use.across for use in self.uses)

    @property
    def nvlink_bytes(self) -> float:
        """Bytes within nodes a step, in total."""
        return sum(use.inside for use in self.uses)

    @property
    def boundary_bytes(self) -> float:
        """Of the bytes between nodes, those of hops."""
        return sum(use.across for use in self.uses if use.kind in HOPS)

    @property
    def network_ratio(self) -> float:
        """Bytes between nodes over what the mesh alone says must cross; 1 where neither has any."""
        return self.network_bytes / self.foretold.total if self.foretold.total else 1.0 + (self.network_bytes > 0)

    def hidden(self, direction: str) -> float:
        """The least hidden steady hop of a direction, or of all loops where none is steady; 1 without hops."""
        steady = any(hop.steady for hop in self.hops)
        return min((hop.hidden for hop in self.hops if hop.direction == direction and hop.steady == steady), default=1.0)

    @property
    def exposed(self) -> float:
        """1 - the least of both directions' hidden shares."""
        return 1 - min(self.hidden("forward"), self.hidden("backward"))

    def summary(self) -> dict[str, bool | float]:
        """The entry `verified` of a plan's JSON."""
        return {
            "fits": self.fits,
            "memory_bytes": self.memory.total,
            "network_bytes_per_step": self.network_bytes,
            "exposed": self.exposed,
            "compile_s": self.compile_s,
        }


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
        config: the run, its mesh as large as the cluster.
        cluster: what it would run on.
        compute: type of matrix products in the place of the configured one. fp16, which training refuses until it scales
            the loss, compiles here: scaling adds a few numbers to the program.

    Raises:
        InputError: the extra `[aot]` is not installed, or the mesh does not fit the cluster.
    """
    devices = compile_only_devices(cluster)
    topology = known_topology(cluster.gpu.name, cluster.gpus_per_node)
    mesh = build_mesh(config.mesh, {f"process {node}": topology for node in range(cluster.num_nodes)}, devices)
    chosen, why = resolve_precision(config.training.precision, devices[0]) if compute is None else (compute, "as asked")
    begin = time.perf_counter()
    model = model_on_mesh(config, DTYPES[chosen])
    optimizer = build_optimizer(config, model.decays)
    layout = layout_of(model, optimizer, mesh, config.training.zero_stage)
    step = build_train_step(
        model,
        optimizer,
        layout,
        num_microbatches=config.num_microbatches,
        schedule=config.pipeline.schedule,
        recompute=config.training.recompute,
    )
    lowered = step.lower(abstract_state(layout), _abstract_batch(config, layout))
    return Lowered(lowered, config, cluster, layout, chosen, why, target_of(cluster), time.perf_counter() - begin)


def _abstract_batch(config: RunConfig, layout: Layout) -> dict[str, jax.ShapeDtypeStruct]:
    samples, where = config.training.global_batch_size, NamedSharding(layout.mesh, BATCH_SPEC)
    kinds = {"tokens": jnp.int32, "targets": jnp.int32, "loss_mask": jnp.float32}
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
    collectives = program.collectives()
    across = traffic(collectives, nodes).across
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
    positions = config.microbatch_size * config.model.sequence_length
    width = jnp.dtype(DTYPES[lowered.compute]).itemsize
    return Report(
        config=config,
        cluster=lowered.cluster,
        compute=lowered.compute,
        why=lowered.why,
        triton=triton,
        memory=memory,
        uses=_uses(collectives, nodes, degrees),
        busiest_node=max(of_node.values()),
        busiest_device=float(across.max()),
        hops=tuple(_hop(program, window, degrees) for window in program.windows()),
        gradient_sums_in_loops=tuple(
            f"{each.kind} of {', '.join(map(str, each.payload))} over {' and '.join(axes_of(each, degrees))}, {each.times} times"
            for each in collectives
            if _sums_gradients_in_loop(each, degrees, positions)
        ),
        carried=_carried(program),
        foretold=foretell(config, layout, nodes, width),
        lower_s=lowered.lower_s,
        compile_s=compile_s,
    )


def _uses(collectives: list[Collective], nodes: list[int], degrees: dict[str, int]) -> tuple[Use, ...]:
    """By kind, axes and place, those that send most between nodes first."""
    members: dict[tuple[str, tuple[str, ...], bool], list[Collective]] = {}
    for each in collectives:
        if each.kind != "recv":
            members.setdefault((each.kind, axes_of(each, degrees), each.in_loop), []).append(each)
    uses = []
    for key, group in members.items():
        sent = traffic(group, nodes)
        uses.append(Use(*key, sum(each.times for each in group), float(sent.inside.sum()), float(sent.across.sum())))
    return tuple(sorted(uses, key=lambda use: (-use.across, -use.inside)))


def _hop(program: Program, window: Window, degrees: dict[str, int]) -> Hop:
    hop = window.collective
    stage_size = math.prod(degrees.values()) // degrees["pipe"]
    source, target = (place // stage_size for place in hop.pairs[0]) if hop.pairs else (0, 1)
    direction: Literal["forward", "backward"] = "forward" if source < target else "backward"
    place = window.computation
    between, whole = program.work(window.between, place), program.work(program.computations[place], place)
    steady = whole.forward > 0 and whole.backward > 0
    if not steady:
        covered, of = between.total, whole.total
    elif direction == "forward":
        covered, of = between.backward, whole.backward
    else:
        covered, of = between.forward, whole.forward
    return Hop(direction, steady, hop.times, covered / of if of else 1.0, hop.num_bytes)


def _sums_gradients_in_loop(each: Collective, degrees: dict[str, int], positions: int) -> bool:
    """Whether a sum in a loop joins devices with other samples or stages, or is of something else than activations.

    Devices that share layers sum whole activations by reduce-scatter, and up to three numbers a position by all-reduce.
    """
    if not each.in_loop or each.kind not in ("all-reduce", "reduce-scatter"):
        return False
    elements = sum(shape.size for shape in each.payload)
    others = set(axes_of(each, degrees)) - {"tensor"}
    return bool(others) or (each.kind == "all-reduce" and (elements % positions != 0 or elements > 3 * positions))


def _carried(program: Program, most: int = 12) -> tuple[Carried, ...]:
    """Of the loop whose body has hops and which turns most often."""
    bodies = {each.computation for each in program.collectives() if each.kind in HOPS}
    loops = [
        each
        for name in program.runs
        for each in program.computations[name]
        if each.opcode == "while" and each.calls("body")[0] in bodies
    ]
    if not loops:
        return ()
    longest = max(loops, key=lambda each: each.trip_count)
    counts = Counter(longest.shapes)
    return tuple(Carried(*item) for item in sorted(counts.items(), key=lambda item: -item[0].num_bytes * item[1])[:most])


__all__ = ["Report", "compile_lowered", "compile_plan", "lower_plan", "usable_bytes", "verify"]
