"""GPT-3 175B (Brown et al., 2020): a batch of 3.2 million tokens.

    python scripts/prepare_data.py TEXT... --output data/train
    python scripts/prepare_data.py HELD_OUT_TEXT... --output data/validation
    python scripts/pretrain.py --config gpt3_175b --data.train data/train --data.validation data/validation

Hardware: 128 nodes of 8 A100-40GB; the mesh is chosen by the planner.
"""

from dataclasses import replace

from giantjax.command_line import preset
from giantjax.config import RunConfig


def config() -> RunConfig:
    base = preset("gpt13b")
    return replace(
        base,
        name="gpt3_175b",
        model=replace(base.model, num_layers=96, hidden_size=12_288, num_heads=96, sequence_length=2048),
        training=replace(base.training, num_steps=95_367),
        optimizer=replace(base.optimizer, learning_rate=6e-5, min_learning_rate=6e-6, warmup=183_105),
        pipeline=replace(base.pipeline, microbatch_size=1),
    )
