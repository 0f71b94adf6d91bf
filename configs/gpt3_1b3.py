"""GPT-3 XL (Brown et al., 2020): 1.3B parameters, a batch of a million tokens.

    python scripts/prepare_data.py TEXT... --output data/train
    python scripts/prepare_data.py HELD_OUT_TEXT... --output data/validation
    python scripts/pretrain.py --config gpt3_1b3 --data.train data/train --data.validation data/validation

Hardware: one GPU of 40 GB or more, or several with --mesh.data.
"""

from dataclasses import replace

from giantjax.command_line import preset
from giantjax.config import RunConfig


def config() -> RunConfig:
    base = preset("gpt_345m")
    return replace(
        base,
        name="gpt3_1b3",
        model=replace(base.model, hidden_size=2048, num_heads=16, sequence_length=2048),
        training=replace(base.training, num_steps=286_102, recompute="selective"),
        optimizer=replace(base.optimizer, learning_rate=2e-4, min_learning_rate=2e-5, unit="samples", warmup=183_105),
        pipeline=replace(base.pipeline, microbatch_size=1),
    )
