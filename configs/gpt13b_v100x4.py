"""gpt13b on four nodes of 8 V100-32GB: the planner's choice for 100 Gb/s TCP, written down.

    python scripts/plan.py --config gpt13b_v100x4 --cluster v100x4-tcp100
    python scripts/pretrain.py --config gpt13b_v100x4 --data.train data/train --data.validation data/validation

Hardware: 32 V100-32GB; expected, in fp16: 17 s a step, 91 samples/s (docs/planner.md).
"""

from dataclasses import replace

from giantjax.command_line import preset
from giantjax.config import MeshConfig, RunConfig


def config() -> RunConfig:
    base = preset("gpt13b")
    return replace(
        base,
        name="gpt13b_v100x4",
        training=replace(base.training, recompute="none"),
        mesh=MeshConfig(pipe=8, tensor=4),
        pipeline=replace(base.pipeline, microbatch_size=16, head="shared"),
    )
