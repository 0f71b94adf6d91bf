"""Memory a run needs, from its configuration alone."""

from dataclasses import dataclass

from giantjax.config import RunConfig, recompute_interval
from giantjax.planner.flops import num_parameters


@dataclass(frozen=True)
class MemoryNeed:
    """Bytes on one device."""

    state: int
    """fp32 parameters and two moments, or under ZeRO its share of what is shared."""
    gradients: int
    """fp32 gradients, and compute copies of the parameters where they are not fp32."""
    activations: int
    """What the backward pass keeps of one microbatch, and its logits."""

    @property
    def total(self) -> int:
        """All of it, in bytes."""
        return self.state + self.gradients + self.activations


def memory_need(config: RunConfig, precision: str, pipe: int = 1, tensor: int = 1, data: int = 1) -> MemoryNeed:
    """Bytes a device of the run needs when it computes in `precision`, fp32 or bf16, on `pipe` stages of `tensor` devices.

    `data` devices share what the run's ZeRO stage says.

    Activations follow Korthikanti et al. (2022), in elements per token and layer: what the recompute policy keeps,
    plus what one layer needs while its backward pass runs. Under 1F1B the first stage holds `pipe` microbatches of
    1/`pipe` of the layers, so that stages do not divide activations.
    """
    model, width = config.model, 4 if precision == "fp32" else 2
    parameters = -(-num_parameters(model, tensor) // (pipe * tensor))
    hidden, tokens = model.hidden_size, config.microbatch_size * model.sequence_length
    weights = model.num_heads * model.sequence_length
    dense = 6 * hidden + model.inner_size
    kept = {"none": dense + weights, "selective": dense, "full": hidden}[config.training.recompute.partition(":")[0]]
    interval = recompute_interval(config.training.recompute)
    layer = width * tokens * (16 * hidden + 2 * weights) * interval
    logits = 2 * 4 * tokens * model.padded_vocabulary(tensor)
    activations = (width * tokens * kept * -(-model.num_layers // interval) + layer + logits) // tensor
    copies = 0 if precision == "fp32" else 2
    moments, gradients, weights = (data if config.training.zero_stage >= stage else 1 for stage in (1, 2, 3))
    state = 8 * parameters // moments + 4 * parameters // weights
    return MemoryNeed(state, 4 * parameters // gradients + copies * parameters // weights, activations)


def checkpoint_bytes(config: RunConfig) -> int:
    """Bytes of one checkpoint on disk: fp32 parameters and two moments."""
    return 12 * num_parameters(config.model, config.mesh.tensor)


def in_words(num_bytes: float) -> str:
    """`24.0 GiB`, in the largest unit that leaves a number of at least 1."""
    for unit, size in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes:.0f} bytes"
