"""The whole configuration, and what its sections must agree on."""

from dataclasses import dataclass, field

from giantjax.config.data import DataConfig
from giantjax.config.files import CheckpointConfig, LoggingConfig
from giantjax.config.mesh import MeshConfig, PipelineConfig
from giantjax.config.model import ModelConfig
from giantjax.config.runtime import RuntimeConfig
from giantjax.config.training import LossScaleConfig, OptimizerConfig, TrainingConfig
from giantjax.errors import InputError, did_you_mean, nearest_divisors, nearest_multiples
from giantjax.fields import check_types, leaves
from giantjax.parallel.partition import BLOCK, counts_of


@dataclass(frozen=True)
class RunConfig:
    """Everything that defines a run."""

    name: str
    """Name of the run; its directory is runs/NAME unless run_dir says otherwise."""
    model: ModelConfig
    training: TrainingConfig
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    loss_scale: LossScaleConfig = field(default_factory=LossScaleConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    data: DataConfig = field(default_factory=DataConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)
    seed: int = 0
    """Seed of initial weights, sample order and dropout."""
    run_dir: str | None = None
    """Directory of the run; None is runs/NAME."""

    def __post_init__(self) -> None:
        check_types(self, "")
        if self.name in (".", "..") or "/" in self.name:
            raise InputError(f"name is {self.name!r}; it names a directory of its own, so it must not be . or .. or hold a slash")
        if not 0 <= self.seed < 2**32:
            raise InputError(f"seed is {self.seed}; it must be from 0 to 4294967295")
        known = leaves(self)
        for path in self.checkpoint.accept_change:
            if path.replace("-", "_") not in known:
                raise InputError(f"checkpoint.accept_change names {path}, but there is no such field{did_you_mean(path, known)}")
        longest = max((length for length, _ in self.data.lengths), default=0)
        if longest >= self.model.sequence_length:
            raise InputError(
                f"data.length_warmup goes up to {longest} tokens; it must stay below model.sequence_length, {self.model.sequence_length}"
            )
        if self.mesh.is_resolved:
            self._check_batch()
            self._check_shares()

    def _check_batch(self) -> None:
        samples, ways = self.training.global_batch_size, self.mesh.data * self.mesh.replica
        if samples % ways:
            raise InputError(
                f"training.global_batch_size is {samples}, which mesh.data {self.mesh.data} x mesh.replica {self.mesh.replica} = {ways} "
                f"does not divide; nearest: {nearest_multiples(samples, ways)}"
            )
        each, size, number = samples // ways, self.pipeline.microbatch_size, self.pipeline.num_microbatches
        for name, value in (("microbatch_size", size), ("num_microbatches", number)):
            if value is not None and each % value:
                raise InputError(
                    f"pipeline.{name} is {value}, which does not divide the {each} samples of a data-parallel device "
                    f"(training.global_batch_size {samples} / mesh.data {self.mesh.data} / mesh.replica {self.mesh.replica}); "
                    f"nearest: {nearest_divisors(value, each)}"
                )
        if size is not None and number is not None and size * number != each:
            raise InputError(
                f"pipeline.microbatch_size {size} x pipeline.num_microbatches {number} x mesh.data {self.mesh.data} x mesh.replica "
                f"{self.mesh.replica} = {size * number * ways}, but training.global_batch_size is {samples}; "
                f"set pipeline.num_microbatches to {each // size}, or leave one of the two out"
            )

    def _check_shares(self) -> None:
        model, tensor = self.model, self.mesh.tensor
        for name in ("num_heads", "inner_size", "sequence_length"):
            size = getattr(model, name)
            if size % tensor:
                said = "feedforward_size" if name == "inner_size" else name
                raise InputError(
                    f"model.{said} is {size}, which mesh.tensor {tensor} does not divide; "
                    f"nearest mesh.tensor: {nearest_divisors(tensor, size)}"
                )
        for length, _ in self.data.lengths:
            if length % tensor:
                raise InputError(
                    f"data.length_warmup has a length of {length}, which mesh.tensor {tensor} does not divide; "
                    f"nearest: {nearest_multiples(length, tensor)}"
                )
        if self.mesh.pipe > model.num_layers:
            raise InputError(f"mesh.pipe is {self.mesh.pipe}, but model.num_layers is {model.num_layers}; a stage holds at least one layer")
        self._check_stages()

    def _check_stages(self) -> None:
        model, stages, chunks = self.model, self.mesh.pipe, self.pipeline.num_chunks
        if stages * chunks > model.num_layers:
            raise InputError(
                f"mesh.pipe {stages} x pipeline.num_chunks {chunks} = {stages * chunks}, but model.num_layers is {model.num_layers}; each "
                f"chunk holds at least one layer, so pipeline.num_chunks is at most {model.num_layers // stages}"
            )
        counts_of(self.pipeline.partition, (BLOCK,) * model.num_layers, stages * chunks)
        rows = model.padded_vocabulary(self.mesh.tensor) // self.mesh.tensor
        if self.pipeline.head == "shared" and rows % stages:
            raise InputError(
                f"pipeline.head is shared, but mesh.pipe {stages} does not divide the {rows} rows of the padded vocabulary that each "
                f"device along mesh.tensor {self.mesh.tensor} holds; nearest mesh.pipe: {nearest_divisors(stages, rows)}, "
                f"nearest model.vocabulary_multiple: {nearest_multiples(model.vocabulary_multiple, stages)}"
            )

    @property
    def schedule_length(self) -> int:
        """Length of the run in the learning-rate schedule's unit."""
        return self.training.num_steps * (self.training.global_batch_size if self.optimizer.unit == "samples" else 1)

    @property
    def num_microbatches(self) -> int:
        """Microbatches of a step on each data-parallel device, once inferred."""
        each = self.training.global_batch_size // (self.mesh.data * self.mesh.replica)
        if self.pipeline.microbatch_size is not None:
            return each // self.pipeline.microbatch_size
        return self.pipeline.num_microbatches or 1

    @property
    def microbatch_size(self) -> int:
        """Samples of a microbatch on one data-parallel device, once inferred."""
        return self.training.global_batch_size // (self.mesh.data * self.mesh.replica * self.num_microbatches)

    def length_of_step(self, step: int) -> int:
        """Tokens of each sample of a step, which are counted from 1."""
        return next((length for length, last in self.data.lengths if step <= last), self.model.sequence_length)

    def positions_until(self, step: int) -> int:
        """Tokens that one sample a step has after so many steps."""
        total, before = 0, 0
        for length, last in (*self.data.lengths, (self.model.sequence_length, step)):
            total += length * max(min(last, step) - before, 0)
            before = last
        return total
