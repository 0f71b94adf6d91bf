"""The published comparison of veGiantModel: 40 layers, 5120 wide, sequence 256, batch 1536, on a mesh that the planner chooses.

    python scripts/plan.py --config gpt13b --cluster v100x4-tcp100
    python scripts/prepare_data.py TEXT... --output data/train
    python scripts/prepare_data.py HELD_OUT_TEXT... --output data/validation
    python scripts/pretrain.py --config gpt13b --data.train data/train --data.validation data/validation

Hardware: four nodes of 8 V100-32GB or A100-40GB; `plan.py` says how long a step takes. gpt13b_v100x4, gpt13b_a100x4 and
gpt13b_megatron are the same run on a mesh of their own.
"""

from dataclasses import replace

from giantjax.command_line import preset
from giantjax.config import MeshConfig, RunConfig


def config() -> RunConfig:
    base = preset("gpt3_6b7")
    return replace(
        base,
        name="gpt13b",
        model=replace(base.model, num_layers=40, hidden_size=5120, num_heads=40, sequence_length=256),
        training=replace(base.training, num_steps=762_939, global_batch_size=1536),
        optimizer=replace(base.optimizer, learning_rate=1e-4, min_learning_rate=1e-5, warmup=1_464_843),
        mesh=MeshConfig(plan="auto"),
        pipeline=replace(base.pipeline, microbatch_size=8),
    )
