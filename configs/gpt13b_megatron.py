"""gpt13b laid out as Megatron-LM was in the published comparison: tensor 4, pipe 4, layers recomputed, state not shared.

    python scripts/plan.py --config gpt13b_megatron --cluster v100x4-tcp100 --strategy megatron
    python scripts/pretrain.py --config gpt13b_megatron --data.train data/train --data.validation data/validation

Hardware: 32 V100-32GB or A100-40GB.
"""

from dataclasses import replace

from giantjax.command_line import preset
from giantjax.config import MeshConfig, RunConfig


def config() -> RunConfig:
    base = preset("gpt13b")
    return replace(
        base,
        name="gpt13b_megatron",
        training=replace(base.training, zero_stage=0, recompute="full"),
        mesh=MeshConfig(pipe=4, data=2, tensor=4),
        pipeline=replace(base.pipeline, microbatch_size=8),
    )
