"""The frozen dataclasses of one run, checked at construction.

Every leaf is documented once, in the section that holds it; `pretrain.py --help-all` shows the same words. A leaf is addressed on
the command line by its path, `--training.num-steps 100`. Nothing here imports jax or flax.
"""

from giantjax.config.data import DataConfig
from giantjax.config.files import CheckpointConfig, LoggingConfig
from giantjax.config.mesh import MeshConfig, PipelineConfig
from giantjax.config.model import ModelConfig
from giantjax.config.run import RunConfig
from giantjax.config.runtime import RuntimeConfig
from giantjax.config.training import LossScaleConfig, OptimizerConfig, TrainingConfig, recompute_interval

__all__ = [
    "CheckpointConfig",
    "DataConfig",
    "LoggingConfig",
    "LossScaleConfig",
    "MeshConfig",
    "ModelConfig",
    "OptimizerConfig",
    "PipelineConfig",
    "RunConfig",
    "RuntimeConfig",
    "TrainingConfig",
    "recompute_interval",
]
