"""What is trained."""

from dataclasses import dataclass
from typing import Literal

from giantjax.errors import InputError, nearest_divisors, nearest_multiples
from giantjax.fields import above_zero, at_least, check_types


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
