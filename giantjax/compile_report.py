"""What a compiled step tells, as data and in words."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from rich.console import Console
from rich.table import Table

from giantjax.cluster import Cluster
from giantjax.config import RunConfig
from giantjax.hlo import Shape
from giantjax.overlap import HOPS
from giantjax.planner.memory import in_words
from giantjax.traffic import Foretold

Compute = Literal["fp32", "bf16", "fp16"]
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
    """Whether it stands in a loop that has hops, and so work, of both directions."""
    times: int
    hidden: float
    """Share, 0 to 1, of the matrix products that run while it travels: of the other direction's in a steady loop, else of all."""
    num_bytes: int
    """A device sends."""


class Sum(NamedTuple):
    """A sum of gradients over replicas."""

    num_bytes: int
    """A device puts in."""
    flops: float
    """Floating-point operations of matrix products that run between its start and its end."""


class Carried(NamedTuple):
    """Arrays of one shape that the longest loop over ticks carries from turn to turn."""

    shape: Shape
    number: int


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
    head_bytes: float
    """Between nodes, of all stages sharing the head."""
    head_bytes_in_loops: float
    """Of those, what is sent in loops over ticks."""
    gradient_sums: tuple[Sum, ...]
    """Of gradients, over replicas, after the loops over ticks."""
    gradient_sums_in_loops: tuple[str, ...]
    """Sums of gradients that run in every tick; there should be none."""
    carried: tuple[Carried, ...]
    """Largest first."""
    slice_bytes: int
    """Of one device's share of a microbatch's boundary."""
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
    def gradient_bytes(self) -> float:
        """Of the bytes between nodes, those of sums and gathers after the loop over ticks: gradients, and a few numbers."""
        sums = sum(use.across for use in self.uses if use.kind not in HOPS and not use.in_loop)
        return sums - (self.head_bytes - self.head_bytes_in_loops)

    @property
    def other_bytes(self) -> float:
        """Of the bytes between nodes, those that neither hops nor a shared head nor sums of gradients send; there should be none."""
        return self.network_bytes - self.boundary_bytes - self.head_bytes - self.gradient_bytes

    @property
    def network_ratio(self) -> float:
        """Bytes between nodes over what the mesh alone says must cross; 1 where there is nothing to cross."""
        return self.network_bytes / self.foretold.total if self.foretold.total else 1.0

    @property
    def overlapped_sums(self) -> float:
        """Share of the bytes of `gradient_sums` whose sum lies over matrix products; 0 where there are none."""
        whole = sum(each.num_bytes for each in self.gradient_sums)
        return sum(each.num_bytes for each in self.gradient_sums if each.flops) / whole if whole else 0.0

    @property
    def sends_slices(self) -> bool:
        """Whether each device sends 1 / mesh.tensor of a boundary and no more."""
        return all(hop.num_bytes == self.slice_bytes for hop in self.hops)

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


def show(report: Report) -> None:
    """Print what the compiled step of a plan tells."""
    config, mesh, memory = report.config, report.config.mesh, report.memory
    console = Console(highlight=False, soft_wrap=True)
    products = "Triton" if report.triton else "cuBLAS"
    console.print(
        f"compiled {config.name} for {report.cluster.num_nodes} nodes of {report.cluster.gpus_per_node} {report.cluster.gpu.name} in "
        f"{report.compile_s:.0f} s: pipe {mesh.pipe} x replica {mesh.replica} x data {mesh.data} x tensor {mesh.tensor}, "
        f"{config.pipeline.schedule}, {config.num_microbatches} microbatches of {config.microbatch_size}, recompute "
        f"{config.training.recompute}, {report.compute} ({report.why}), matrix products by {products}"
    )
    console.print(
        f"memory of a GPU: {in_words(memory.total)} of {in_words(memory.usable)} usable, so it "
        f"{'fits' if report.fits else 'does not fit'}: arguments {in_words(memory.arguments)}, of which {in_words(memory.aliased)} become "
        f"outputs, temporary {in_words(memory.temporary)}"
    )
    table = Table("collective", "along", "in ticks", "times a step", "within nodes", "between nodes", box=None)
    for use in report.uses:
        place = "yes" if use.in_loop else "no"
        table.add_row(use.kind, " and ".join(use.axes), place, f"{use.times:,}", in_words(use.inside), in_words(use.across))
    console.print(table)
    console.print(
        f"between nodes a step: {in_words(report.network_bytes)}, {report.network_ratio:.3f} of the "
        f"{in_words(report.foretold.total)} that the mesh alone foretells; the busiest node sends {in_words(report.busiest_node)}"
    )
    if report.hops:
        console.print(
            f"hops: {in_words(report.hops[0].num_bytes)} a device; {report.hidden('forward'):.1%} of the backward products run while a "
            f"result travels forward, {report.hidden('backward'):.1%} of the forward products while one travels back"
        )
    if report.gradient_sums:
        console.print(
            f"sums of gradients over replicas: {in_words(sum(each.num_bytes for each in report.gradient_sums))} a device, "
            f"{report.overlapped_sums:.0%} of it while matrix products of the last backward pass run"
        )
    sums = report.gradient_sums_in_loops
    console.print(f"sums of gradients in ticks: {'; '.join(sums) if sums else 'none'}")


__all__ = ["STEADY", "Carried", "Compute", "Hop", "Memory", "Report", "Sum", "Use", "show"]
