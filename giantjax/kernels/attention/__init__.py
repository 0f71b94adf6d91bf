"""Causal attention."""

from giantjax.kernels.attention.xla import cached_attention, causal_attention

__all__ = ["cached_attention", "causal_attention"]
