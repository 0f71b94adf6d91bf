"""gpt13b with everything shared inside a node (ZeRO 3), and a pipeline between the nodes in the place of ZeRO's own traffic there.

    python scripts/plan.py --config gpt13b_zero3 --cluster a100x4-rdma800 --strategy zero3
    python scripts/pretrain.py --config gpt13b_zero3 --data.train data/train --data.validation data/validation

The first line prices what it is to be compared with, ZeRO-3 over all GPUs.

Hardware: 32 A100-40GB or V100-32GB; expected: 10 s a step, 152 samples/s on A100s at 800 Gb/s RDMA; 24 s, 63 samples/s on V100s at
100 Gb/s TCP, in fp16 (docs/planner.md).
"""

from dataclasses import replace

from giantjax.command_line import preset
from giantjax.config import MeshConfig, RunConfig


def config() -> RunConfig:
    base = preset("gpt13b")
    return replace(
        base,
        name="gpt13b_zero3",
        training=replace(base.training, zero_stage=3, recompute="full"),
        mesh=MeshConfig(pipe=4, data=8),
        pipeline=replace(base.pipeline, microbatch_size=16),
    )
