"""Seconds of a block, of the embedding and of the head on one device, collectives not counted."""

from giantjax.config import ModelConfig
from giantjax.planner.compute import Pass, Processor
from giantjax.planner.plan import Traits

FLASH_RATE = {"V100": 125e12, "A100": 312e12}
"""FLOP/s of the tensor-core instructions that blockwise kernels use, by family; of others the next."""
FLASH_RATE_LATER = 515e12
"""Ampere's instructions on an H100: 1.65 times an A100, by multiprocessors and clock."""
BLOCKWISE = ("flash", "native")
KERNELS = {"eager": 20, "fused": 10, "compiled": 6}
"""Elementwise kernels of a block, forward."""


def attention(processor: Processor, model: ModelConfig, microbatch: int, tensor: int, traits: Traits) -> Pass:
    """The attention core: scores, softmax, context.

    Unless it is blockwise, scores are computed in full and written, and softmax and dropout move them several times.
    A blockwise kernel skips the masked half, and its backward pass makes the scores again (Dao et al., 2022): 2.5 times
    the FLOPs of forward.
    """
    constants, width = processor.constants, processor.width
    length, size, heads = model.sequence_length, model.head_size, model.num_heads / tensor
    elements = microbatch * heads * length * length
    speed = 1.0 if size % 8 == 0 else constants.misaligned
    if traits.attention in BLOCKWISE:
        slower = processor.gpu.half_flops if traits.attention == "native" else FLASH_RATE_LATER
        rate = FLASH_RATE.get(processor.gpu.family, slower) * constants.flash * speed
        flops = 2.0 * elements * size
        return Pass(flops / rate + constants.launch, 2.5 * flops / (rate * constants.flash_backward) + 3 * constants.launch)
    products = processor.product(length, length, size, microbatch * heads, attention=True)
    products = (products + processor.product(length, size, length, microbatch * heads, attention=True)) / speed
    dropped = 2 * width + 1 if traits.dropout else 0
    eager = traits.attention == "eager"
    forward, backward = (7 * width + 1, 7 * width) if eager else (2 * width, 3 * width)
    kernels = 5 if eager else 2
    return Pass(
        products + processor.moved(elements * (forward + dropped), kernels),
        2 * products + processor.moved(elements * (backward + dropped), kernels),
    )


def elementwise(processor: Processor, model: ModelConfig, microbatch: int, tensor: int, traits: Traits) -> Pass:
    """LayerNorms, biases, GELU, dropout and residuals of a block; backward moves half as much again."""
    constants, width, hidden = processor.constants, processor.width, model.hidden_size
    norms, residuals = 4 * width * hidden, 2 * hidden * (3 * width + int(traits.dropout))
    inside = 2 * width * model.inner_size + (2 if traits.attention in BLOCKWISE else 6) * width * hidden
    factor = {"eager": constants.eager, "fused": 1.0, "compiled": constants.compiled}[traits.elementwise]
    outside = (norms + residuals) / (tensor if traits.sequence_parallel else 1)
    tokens = microbatch * model.sequence_length
    seconds = processor.moved(factor * tokens * (outside + inside / tensor), KERNELS[traits.elementwise])
    return Pass(seconds, 1.5 * seconds)


def block(processor: Processor, model: ModelConfig, microbatch: int, tensor: int, traits: Traits) -> Pass:
    """A whole block."""
    hidden, inner, tokens = model.hidden_size, model.inner_size, microbatch * model.sequence_length
    return (
        processor.dense(tokens, hidden, 3 * hidden / tensor)
        + processor.dense(tokens, hidden / tensor, hidden)
        + processor.dense(tokens, hidden, inner / tensor)
        + processor.dense(tokens, inner / tensor, hidden)
        + attention(processor, model, microbatch, tensor, traits)
        + elementwise(processor, model, microbatch, tensor, traits)
    )


def embedding(processor: Processor, model: ModelConfig, microbatch: int) -> Pass:
    """Rows looked up and summed, and their gradients scattered."""
    seconds = processor.moved(3 * processor.width * microbatch * model.sequence_length * model.hidden_size, 3)
    return Pass(seconds, seconds)


def head(processor: Processor, model: ModelConfig, microbatch: int, tensor: int, traits: Traits, stages: int = 1) -> Pass:
    """Logits and loss: the product, and fp32 logits moved several times; `stages` is how many share them."""
    tokens, rows = microbatch * model.sequence_length, model.padded_vocabulary(tensor) / tensor / stages
    forward, backward = {"eager": (16, 16), "fused": (10, 8), "compiled": (6, 6)}[traits.elementwise]
    elements = tokens * rows
    return processor.dense(tokens, model.hidden_size, rows) + Pass(
        processor.moved(elements * forward, 4), processor.moved(elements * backward, 3)
    )
