"""How a run's steps are taken: their number and size, their precision, and the optimizer."""

from dataclasses import dataclass
from typing import Literal

from giantjax.errors import InputError
from giantjax.fields import above_zero, at_least, check_types


def recompute_interval(recompute: str) -> int:
    """Layers whose input is kept once between them under the policy `recompute`: K of `full:K`, else 1."""
    return int(recompute.partition(":")[2] or 1)


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
    """What devices along mesh.data share: 0 nothing, 1 optimizer state, 2 gradients too, 3 parameters too. 2 and 3 send gradients and
    parameters in every microbatch, over links that should be those inside a node; the numbers stay the same."""
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
        kind, _, interval = self.recompute.partition(":")
        if self.recompute not in ("none", "selective", "full") and not (kind == "full" and interval.isdecimal() and int(interval) > 0):
            raise InputError(f"training.recompute is {self.recompute!r}; the policies are none, selective, full and full:K, such as full:2")


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
