"""veGiantModel's own example: 24 layers, 1024 wide, 16 heads, 345M parameters.

    python scripts/prepare_data.py TEXT... --output data/train
    python scripts/prepare_data.py HELD_OUT_TEXT... --output data/validation
    python scripts/pretrain.py --config gpt_345m --data.train data/train --data.validation data/validation

Hardware: one GPU of 16 GB or more, or several with --mesh.data.
"""

from dataclasses import replace

from giantjax.command_line import preset
from giantjax.config import RunConfig


def config() -> RunConfig:
    base = preset("gpt2_124m")
    return replace(
        base,
        name="gpt_345m",
        model=replace(base.model, num_layers=24, hidden_size=1024, num_heads=16),
        optimizer=replace(base.optimizer, learning_rate=1.5e-4, min_learning_rate=1e-5),
    )
