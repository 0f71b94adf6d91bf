"""giantjax: pretraining of GPT models on clusters with fast nodes and slow networks."""

__version__ = "0.1.0"
