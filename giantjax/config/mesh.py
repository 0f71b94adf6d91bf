"""How devices share the work: the mesh, and the pipeline's microbatches and schedule."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from giantjax.errors import InputError, did_you_mean
from giantjax.fields import at_least, check_types
from giantjax.parallel.partition import read_partition

if TYPE_CHECKING:
    # None only until the devices are known; what reads a mesh gets it from `resolve`, with numbers.
    Degree = int
else:
    Degree = int | None


@dataclass(frozen=True)
class MeshConfig:
    """Degrees of parallelism; their product is the number of devices. None is inferred from the devices there are."""

    pipe: Degree = 1
    """Pipeline stages."""
    data: Degree = 1
    """Data-parallel devices inside a node."""
    tensor: Degree = 1
    """Devices that share each layer."""
    replica: Degree = 1
    """Data-parallel groups across nodes."""
    plan: Literal["config", "auto"] = "config"
    """config: the degrees as they stand. auto: the planner chooses them at start for the GPUs there are, and with them
    pipeline.microbatch_size, training.zero_stage and training.recompute, and prints its choice."""
    inside: tuple[str, ...] = ("tensor", "data")
    """Axes that stay inside a node, those that talk most first; the others may cross nodes."""

    def __post_init__(self) -> None:
        check_types(self, "mesh")
        for name in ("pipe", "data", "tensor", "replica"):
            if getattr(self, name) is not None:
                at_least(f"mesh.{name}", getattr(self, name), 1)
        axes = ("pipe", "replica", "data", "tensor")
        for axis in self.inside:
            if axis not in axes:
                raise InputError(f"mesh.inside names {axis!r}; the axes are {', '.join(axes)}{did_you_mean(axis, axes)}")

    @property
    def is_resolved(self) -> bool:
        """Whether every degree is a number."""
        return None not in (self.pipe, self.data, self.tensor, self.replica)

    @property
    def num_devices(self) -> int:
        """Devices the mesh is made of."""
        return self.pipe * self.data * self.tensor * self.replica


@dataclass(frozen=True)
class PipelineConfig:
    """Microbatches and the order in which the stages work on them."""

    schedule: str = "1f1b"
    """gpipe, 1f1b, interleaved, zero-bubble, or the path of a .csv file."""
    num_microbatches: int | None = None
    """Microbatches of one step on each data-parallel device; None follows from microbatch_size, or is 1."""
    microbatch_size: int | None = None
    """Samples in a microbatch; None follows from num_microbatches."""
    num_chunks: int = 1
    """Model chunks on each stage, of an interleaved schedule or a file."""
    partition: str = "uniform"
    """How layers are dealt to stages, or to their chunks: uniform; parameters; profile, by times measured at the start; type:REGEX,
    by kinds of blocks; manual:10,10,10,10; or veGiantModel's manual:N:0,10,20,30,40."""
    head: Literal["everywhere", "last", "shared"] = "everywhere"
    """Who computes logits and loss of the last stage's results: every stage, others to no effect; the last alone, under a conditional,
    for a partition that gives it fewer layers; or all of them, each a part of the vocabulary."""

    def __post_init__(self) -> None:
        check_types(self, "pipeline")
        known = ("gpipe", "1f1b", "interleaved", "zero-bubble")
        if self.schedule not in known and not self.schedule.endswith(".csv"):
            raise InputError(
                f"pipeline.schedule is {self.schedule!r}; it must be {', '.join(known)} or a .csv file{did_you_mean(self.schedule, known)}"
            )
        for name in ("num_microbatches", "microbatch_size"):
            if getattr(self, name) is not None:
                at_least(f"pipeline.{name}", getattr(self, name), 1)
        at_least("pipeline.num_chunks", self.num_chunks, 1)
        if self.num_chunks > 1 and self.schedule in ("gpipe", "1f1b", "zero-bubble"):
            raise InputError(
                f"pipeline.num_chunks is {self.num_chunks}, but pipeline.schedule {self.schedule} has 1 chunk a stage; "
                "interleaved has more, and so may a .csv file"
            )
        read_partition(self.partition)
