"""Floating-point operations of a model."""

from giantjax.config import ModelConfig


def num_parameters(model: ModelConfig, tensor: int = 1) -> int:
    """Parameters, the padding of the vocabulary for `tensor` devices included."""
    hidden, inner, rows = model.hidden_size, model.inner_size, model.padded_vocabulary(tensor)
    attention = 4 * hidden * hidden + 4 * hidden
    feedforward = 2 * hidden * inner + inner + hidden
    block = attention + feedforward + 4 * hidden
    embeddings = (rows * (2 if model.head == "untied" else 1) + model.sequence_length) * hidden
    return model.num_layers * block + embeddings + 2 * hidden


def flops_per_sample(model: ModelConfig) -> float:
    """FLOPs of forward and backward of one sample, nothing recomputed, for MFU (Chowdhery et al., 2022).

    A matrix product costs 2 per weight and token forward and twice that backward; attention scores and their use
    cost 2 s h each a token, counted in full although a causal kernel may skip half (as Narayanan et al., 2021 do).
    """
    hidden, length = model.hidden_size, model.sequence_length
    dense = model.num_layers * (4 * hidden * hidden + 2 * hidden * model.inner_size) + model.vocabulary_size * hidden
    attention = model.num_layers * 2 * length * hidden
    return 6.0 * length * (dense + attention)
