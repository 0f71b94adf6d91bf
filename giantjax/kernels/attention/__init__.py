"""Causal attention."""

from giantjax.kernels.attention.xla import causal_attention

__all__ = ["causal_attention"]
