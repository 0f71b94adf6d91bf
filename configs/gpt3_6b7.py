"""GPT-3 6.7B (Brown et al., 2020): a batch of two million tokens.

    python scripts/prepare_data.py TEXT... --output data/train
    python scripts/prepare_data.py HELD_OUT_TEXT... --output data/validation
    python scripts/pretrain.py --config gpt3_6b7 --data.train data/train --data.validation data/validation

Hardware: its optimizer state alone is 80 GB, so several GPUs have to share it.
"""

from dataclasses import replace

from giantjax.command_line import preset
from giantjax.config import RunConfig


def config() -> RunConfig:
    base = preset("gpt3_1b3")
    return replace(
        base,
        name="gpt3_6b7",
        model=replace(base.model, num_layers=32, hidden_size=4096, num_heads=32),
        training=replace(base.training, num_steps=143_051, global_batch_size=1024),
        optimizer=replace(base.optimizer, learning_rate=1.2e-4, min_learning_rate=1.2e-5),
    )
