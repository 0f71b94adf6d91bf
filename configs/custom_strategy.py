"""gpt13b with every choice made by hand: layers dealt to stages, a schedule of one's own, and the axes' places in a node.

    python scripts/pretrain.py --config custom_strategy --data.train data/train --data.validation data/validation

custom_strategy.csv is what `search_schedule` (docs/schedules.md) found for 48 microbatches on 4 stages that may hold 7 of them and 2
waiting weight gradients each. The last stage, which has the head, holds fewer layers and alone computes it (docs/partition.md).
Data-parallel GPUs are the closest neighbours in a node, tensor-parallel ones come next.

Hardware: 32 A100-40GB; it shows what can be chosen, and the planner's own choice (gpt13b_a100x4) is faster.
"""

from dataclasses import replace
from pathlib import Path

from giantjax.command_line import preset
from giantjax.config import MeshConfig, RunConfig


def config() -> RunConfig:
    base = preset("gpt13b")
    return replace(
        base,
        name="custom_strategy",
        training=replace(base.training, zero_stage=1, recompute="full"),
        mesh=MeshConfig(pipe=4, data=2, tensor=4, inside=("data", "tensor")),
        pipeline=replace(
            base.pipeline,
            schedule=str(Path(__file__).with_suffix(".csv")),
            microbatch_size=16,
            partition="manual:11,10,10,9",
            head="last",
        ),
    )
