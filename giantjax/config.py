"""The frozen dataclasses of one run, checked at construction.

Every leaf is documented once, here; `pretrain.py --help-all` shows the same words. A leaf is addressed on
the command line by its path, `--training.num-steps 100`. This file imports neither jax nor flax.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from giantjax.errors import InputError, did_you_mean, nearest_divisors, nearest_multiples
from giantjax.fields import above_zero, at_least, check_types, is_number, leaves, only

if TYPE_CHECKING:
    # None only until the devices are known; what reads a mesh gets it from `resolve`, with numbers.
    Degree = int
else:
    Degree = int | None


@dataclass(frozen=True)
class ModelConfig:
    """A GPT-2 / GPT-3 shaped decoder."""

    num_layers: int
    """Number of transformer blocks."""
    hidden_size: int
    """Width of the residual stream; a multiple of num_heads."""
    num_heads: int
    """Attention heads in each block."""
    sequence_length: int
    """Tokens in one sample, and the number of learned positions."""
    vocabulary_size: int
    """Token ids the data may hold: 0 up to this number, exclusive."""
    feedforward_size: int | None = None
    """Width of the feed-forward layer; None is 4 x hidden_size."""
    activation: Literal["gelu-tanh", "gelu-erf"] = "gelu-tanh"
    """GELU by its tanh approximation (GPT-2) or exactly (Megatron-core)."""
    head: Literal["tied", "untied"] = "tied"
    """Whether the output projection is the token embedding or has weights of its own."""
    layer_norm_epsilon: float = 1e-5
    """Added to the variance in each LayerNorm."""
    attention_dropout: float = 0.0
    """Probability of dropping an attention weight."""
    hidden_dropout: float = 0.0
    """Probability of dropping an element after the embedding, the attention and the feed-forward layer."""
    init_std: float = 0.02
    """Standard deviation of initial weights; projections into the residual stream get it / sqrt(2 x num_layers)."""
    vocabulary_multiple: int = 128
    """The embedding is padded to a multiple of this times mesh.tensor rows; padding never wins a softmax."""

    def __post_init__(self) -> None:
        check_types(self, "model")
        for name in ("num_layers", "hidden_size", "num_heads", "sequence_length", "vocabulary_size", "vocabulary_multiple"):
            at_least(f"model.{name}", getattr(self, name), 1)
        if self.feedforward_size is not None:
            at_least("model.feedforward_size", self.feedforward_size, 1)
        if self.hidden_size % self.num_heads:
            raise InputError(
                f"model.hidden_size is {self.hidden_size}, which model.num_heads {self.num_heads} does not divide; "
                f"nearest hidden sizes: {nearest_multiples(self.hidden_size, self.num_heads)}, "
                f"nearest head counts: {nearest_divisors(self.num_heads, self.hidden_size)}"
            )
        above_zero("model.layer_norm_epsilon", self.layer_norm_epsilon)
        above_zero("model.init_std", self.init_std)
        for name in ("attention_dropout", "hidden_dropout"):
            if not 0 <= getattr(self, name) < 1:
                raise InputError(f"model.{name} is {getattr(self, name)}; a dropout probability is from 0 up to, but not, 1")

    @property
    def head_size(self) -> int:
        """Width of one attention head."""
        return self.hidden_size // self.num_heads

    @property
    def inner_size(self) -> int:
        """Width of the feed-forward layer."""
        return self.feedforward_size or 4 * self.hidden_size

    def padded_vocabulary(self, tensor: int = 1) -> int:
        """Rows of the embedding when `tensor` devices share it."""
        multiple = self.vocabulary_multiple * tensor
        return -(-self.vocabulary_size // multiple) * multiple


@dataclass(frozen=True)
class TrainingConfig:
    """How long, how much at a time, and at what precision."""

    num_steps: int
    """Optimizer steps of the whole run; starting again with a larger number goes on from the last checkpoint."""
    global_batch_size: int
    """Samples in one optimizer step = microbatch size x microbatches x mesh.data x mesh.replica."""
    eval_every: int = 0
    """Steps between evaluations on data.validation, which also end a run; 0 never evaluates."""
    eval_samples: int = 1024
    """Samples of one evaluation, spread evenly over the validation data; 0 takes all of them."""
    zero_stage: int = 0
    """What the data axis shards: 0 nothing, 1 optimizer state, 2 gradients too, 3 parameters too."""
    compression: Literal["none", "bf16", "int8"] = "none"
    """How gradients are rounded where they cross between nodes, on mesh.replica; what is rounded off is added in the next step."""
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Compute precision; auto is bf16 where the hardware has it, fp16 on V100 and T4, and fp32 on a CPU. Parameters, reductions,
    softmax and loss stay fp32."""
    recompute: str = "none"
    """Activations made again in the backward pass: none (no matrix product is redone), selective (the attention
    core), full (everything but each layer's input), full:K (everything but the input of every K-th layer)."""

    def __post_init__(self) -> None:
        check_types(self, "training")
        at_least("training.num_steps", self.num_steps, 1)
        at_least("training.global_batch_size", self.global_batch_size, 1)
        at_least("training.eval_every", self.eval_every, 0)
        at_least("training.eval_samples", self.eval_samples, 0)
        if self.zero_stage not in (0, 1, 2, 3):
            raise InputError(f"training.zero_stage is {self.zero_stage}; the stages are 0, 1, 2 and 3")
        if self.zero_stage > 1:
            raise InputError(f"training.zero_stage is {self.zero_stage}, which this version does not have yet; use 0 or 1")
        kind, _, interval = self.recompute.partition(":")
        if self.recompute not in ("none", "selective", "full") and not (kind == "full" and interval.isdecimal() and int(interval) > 0):
            raise InputError(f"training.recompute is {self.recompute!r}; the policies are none, selective, full and full:K, such as full:2")

    @property
    def recompute_interval(self) -> int:
        """Layers whose input is kept once between them under `full` (1) and `full:K` (K)."""
        return int(self.recompute.partition(":")[2] or 1)


@dataclass(frozen=True)
class LossScaleConfig:
    """What the loss is multiplied by in fp16, so that small gradients are not lost; a step that overflows is skipped."""

    static: float | None = None
    """A scale that never changes; None starts at `initial` and follows overflows."""
    initial: float = 65536.0
    """The first scale."""
    growth: float = 2.0
    """Factor by which the scale grows after growth_interval steps without overflow."""
    growth_interval: int = 1000
    """Steps without overflow after which the scale grows."""
    backoff: float = 0.5
    """Factor by which the scale falls."""
    hysteresis: int = 2
    """Overflows before the scale falls for the first time since it grew."""
    floor: float = 1.0
    """Least scale."""
    ceiling: float = 16777216.0
    """Largest scale."""
    skip_limit: int = 50
    """Steps skipped in a row at which the run stops."""

    def __post_init__(self) -> None:
        check_types(self, "loss_scale")
        for name in ("growth_interval", "hysteresis", "skip_limit"):
            at_least(f"loss_scale.{name}", getattr(self, name), 1)
        above_zero("loss_scale.floor", self.floor)
        if self.static is not None:
            above_zero("loss_scale.static", self.static)
        if not self.floor <= self.initial <= self.ceiling:
            raise InputError(
                f"loss_scale.initial is {self.initial}; it must lie between loss_scale.floor {self.floor} and "
                f"loss_scale.ceiling {self.ceiling}"
            )
        if self.growth <= 1:
            raise InputError(f"loss_scale.growth is {self.growth}; it must be above 1, such as 2")
        if not 0 < self.backoff < 1:
            raise InputError(f"loss_scale.backoff is {self.backoff}; it must be above 0 and below 1, such as 0.5")


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW and its learning rate."""

    learning_rate: float = 3e-4
    """Peak learning rate."""
    min_learning_rate: float = 0.0
    """Learning rate at the end of the decay."""
    schedule: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    """After the warm-up: cosine or linear decay, constant, or warm-up-stable-decay (constant, then linear at the end)."""
    unit: Literal["steps", "samples"] = "steps"
    """What warmup and decay count."""
    warmup: int = 0
    """Length of the linear warm-up from 0."""
    decay: int | None = None
    """Length of the decay; None is all that follows the warm-up, or for wsd the last fifth of the run."""
    weight_decay: float = 0.1
    """Decoupled weight decay, on matrices only (no bias, no LayerNorm)."""
    beta1: float = 0.9
    """Decay of the first moment."""
    beta2: float = 0.95
    """Decay of the second moment."""
    epsilon: float = 1e-8
    """Added to the root of the second moment, in fp32."""
    clip_norm: float | None = 1.0
    """Gradients are scaled down to this global norm; None never clips."""

    def __post_init__(self) -> None:
        check_types(self, "optimizer")
        above_zero("optimizer.learning_rate", self.learning_rate)
        above_zero("optimizer.epsilon", self.epsilon)
        if not 0 <= self.min_learning_rate <= self.learning_rate:
            raise InputError(
                f"optimizer.min_learning_rate is {self.min_learning_rate}; "
                f"it must lie between 0 and optimizer.learning_rate, {self.learning_rate}"
            )
        at_least("optimizer.warmup", self.warmup, 0)
        if self.decay is not None:
            at_least("optimizer.decay", self.decay, 1)
        if self.weight_decay < 0:
            raise InputError(f"optimizer.weight_decay is {self.weight_decay}; it must be at least 0")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise InputError(f"optimizer.{name} is {getattr(self, name)}; it must be from 0 up to, but not, 1")
        if self.clip_norm is not None:
            above_zero("optimizer.clip_norm", self.clip_norm)


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
    """Model chunks on each stage (interleaved)."""
    partition: str = "uniform"
    """How layers are dealt to stages."""

    def __post_init__(self) -> None:
        check_types(self, "pipeline")
        known = ("gpipe", "1f1b", "interleaved", "zero-bubble")
        if self.schedule not in known and not self.schedule.endswith(".csv"):
            raise InputError(
                f"pipeline.schedule is {self.schedule!r}; it must be {', '.join(known)} or a .csv file{did_you_mean(self.schedule, known)}"
            )
        if self.schedule not in ("gpipe", "1f1b"):
            raise InputError(f"pipeline.schedule is {self.schedule}, which this version does not have yet; use gpipe or 1f1b")
        for name in ("num_microbatches", "microbatch_size"):
            if getattr(self, name) is not None:
                at_least(f"pipeline.{name}", getattr(self, name), 1)
        at_least("pipeline.num_chunks", self.num_chunks, 1)
        only("pipeline.num_chunks", self.num_chunks, 1)
        only("pipeline.partition", self.partition, "uniform")


@dataclass(frozen=True)
class DataConfig:
    """Where tokens come from."""

    train: tuple[str, ...] = ()
    """PREFIX[:WEIGHT] of an indexed pair PREFIX.bin and PREFIX.idx; or stdlib, the source text of Python's own standard
    library, prepared on first use; or synthetic, random tokens to measure throughput."""
    validation: str | None = None
    """PREFIX of held-out data; stdlib brings its own and needs none."""
    prefetch: int = 4
    """Global batches read ahead of the step."""

    def __post_init__(self) -> None:
        check_types(self, "data")
        at_least("data.prefetch", self.prefetch, 1)
        if len(self.train) > 1:
            raise InputError(f"data.train names {len(self.train)} corpora, but this version trains on one; prepare them into one PREFIX")
        for entry in self.train:
            prefix, colon, weight = entry.rpartition(":")
            if colon and is_number(weight):
                raise InputError(f"data.train is {entry!r}, but with one corpus a weight has no meaning; write {prefix}")


@dataclass(frozen=True)
class CheckpointConfig:
    """What is saved, and what may change on resume."""

    every: int = 0
    """Steps between saves; the last step is always saved. 0 saves only that one."""
    keep: int = 3
    """Latest checkpoints kept."""
    keep_every: int | None = None
    """Checkpoints at multiples of this step are kept for good; None keeps only the latest."""
    accept_change: tuple[str, ...] = ()
    """Fields that may differ from the run that is resumed, such as optimizer.learning_rate; each is logged."""

    def __post_init__(self) -> None:
        check_types(self, "checkpoint")
        at_least("checkpoint.every", self.every, 0)
        at_least("checkpoint.keep", self.keep, 1)
        if self.keep_every is not None:
            at_least("checkpoint.keep_every", self.keep_every, 1)


@dataclass(frozen=True)
class LoggingConfig:
    """What is shown while training."""

    every: int = 10
    """Steps between printed lines when stdout is not a terminal."""
    tensorboard: bool = True
    """Write RUN_DIR/tensorboard."""

    def __post_init__(self) -> None:
        check_types(self, "logging")
        at_least("logging.every", self.every, 1)


@dataclass(frozen=True)
class RuntimeConfig:
    """Devices and processes."""

    num_cpu_devices: int | None = None
    """Run on this many simulated CPU devices in each process; None uses the GPUs there are, or one CPU device."""
    coordinator: str | None = None
    """HOST:PORT of process 0 in a job of several processes; None is what the launcher says."""
    num_processes: int | None = None
    """Processes of the job; None is what the launcher says, and 1 runs alone whatever it says."""
    process_id: int | None = None
    """Which of them this one is, from 0; None is what the launcher says."""
    start_timeout: float = 300.0
    """Seconds that the processes of a job wait for each other before training."""
    cluster: str | None = None
    """A cluster file, or the name of a cluster: its transport settings are exported before JAX starts, and an automatic mesh
    is planned for its links. None leaves NCCL to itself."""
    compilation_cache: str = "auto"
    """Folder of compiled programs; auto is giantjax/compiled in the user's cache folder, off compiles anew each time."""
    memory_fraction: float = 0.92
    """Part of a GPU's memory that JAX may take."""

    def __post_init__(self) -> None:
        check_types(self, "runtime")
        if self.num_cpu_devices is not None:
            at_least("runtime.num_cpu_devices", self.num_cpu_devices, 1)
        if self.num_processes is not None:
            at_least("runtime.num_processes", self.num_processes, 1)
        if self.process_id is not None:
            at_least("runtime.process_id", self.process_id, 0)
        above_zero("runtime.start_timeout", self.start_timeout)
        if not 0 < self.memory_fraction <= 1:
            raise InputError(f"runtime.memory_fraction is {self.memory_fraction}; it must be above 0 and at most 1")


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
        if self.mesh.pipe > model.num_layers:
            raise InputError(f"mesh.pipe is {self.mesh.pipe}, but model.num_layers is {model.num_layers}; a stage holds at least one layer")

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
