"""gpt13b on four nodes of 8 A100-40GB: the planner's choice for 800 Gb/s, written down.

    python scripts/plan.py --config gpt13b_a100x4 --cluster a100x4-rdma800
    python scripts/pretrain.py --config gpt13b_a100x4 --data.train data/train --data.validation data/validation

Hardware: 32 A100-40GB; expected: 7.1 s a step, 217 samples/s (docs/planner.md).
"""

from dataclasses import replace

from giantjax.command_line import preset
from giantjax.config import MeshConfig, RunConfig


def config() -> RunConfig:
    base = preset("gpt13b")
    return replace(
        base,
        name="gpt13b_a100x4",
        training=replace(base.training, zero_stage=1, recompute="selective"),
        mesh=MeshConfig(pipe=4, data=2, tensor=4),
        pipeline=replace(base.pipeline, microbatch_size=24, head="shared"),
    )
