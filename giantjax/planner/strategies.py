"""Plans of the programs that giantjax is measured against, under the same cost model."""

import math
from dataclasses import replace
from typing import Literal

from giantjax.cluster import Cluster
from giantjax.config import RunConfig
from giantjax.errors import InputError, nearest_divisors
from giantjax.planner.plan import MEGATRON, ZERO3, Plan, Traits
from giantjax.planner.search import Priced, divisors, precision_of, price
from giantjax.planner.stage_memory import usable_bytes

Strategy = Literal["auto", "megatron", "zero3"]
MEGATRON_TENSOR, MEGATRON_PIPE = 4, 4
RECOMPUTED = {"megatron": ("none", "full"), "zero3": ("none", "full")}
"""What they could recompute in 2021; the selective policy came a year later (Korthikanti et al., 2022)."""


def baseline(config: RunConfig, cluster: Cluster, strategy: Literal["megatron", "zero3"]) -> list[Priced]:
    """The plans of a baseline, fastest first: only the microbatch and what is recomputed are left to choose.

    `megatron` is Megatron-LM of 2021, tensor 4 x pipe 4 in its default order, data-parallel over what is left. `zero3` is DeepSpeed
    ZeRO stage 3 over all GPUs, without tensor or pipeline parallelism. A plan that does not fit comes after all that do.

    Raises:
        InputError: the cluster or the batch does not divide that way.
    """
    mesh, traits = _mesh(config, cluster, strategy)
    traits = replace(traits, precision=precision_of(config))
    usable = usable_bytes(cluster.gpu, config.runtime.memory_fraction)
    batch = config.training.global_batch_size
    if batch % mesh.ways:
        raise InputError(
            f"training.global_batch_size is {batch}, which {mesh.ways} data-parallel devices of --strategy {strategy} do not divide; "
            f"nearest: {nearest_divisors(mesh.ways, batch)} devices"
        )
    each = batch // mesh.ways
    plans = [
        replace(mesh, microbatch_size=size, num_microbatches=each // size, recompute=recompute)
        for recompute in RECOMPUTED[strategy]
        for size in divisors(each)
        if size <= 64
    ]
    priced = [price(config.model, plan, cluster, traits, usable) for plan in plans]
    return sorted(priced, key=lambda one: (not one.fits, one.cost.seconds if one.fits else one.fullest.total))


def _mesh(config: RunConfig, cluster: Cluster, strategy: str) -> tuple[Plan, Traits]:
    if strategy == "zero3":
        return Plan(replica=cluster.num_nodes, data=cluster.gpus_per_node, zero_stage=3), ZERO3
    tensor, pipe = MEGATRON_TENSOR, MEGATRON_PIPE
    if cluster.gpus_per_node % tensor or cluster.num_gpus % (tensor * pipe) or config.model.num_layers % pipe:
        raise InputError(
            f"--strategy megatron is tensor {tensor} x pipe {pipe}, which {cluster.num_nodes} nodes of {cluster.gpus_per_node} GPUs and "
            f"model.num_layers {config.model.num_layers} do not divide; take nodes of a multiple of {tensor} GPUs, "
            f"{tensor * pipe} or a multiple of them in all, and a multiple of {pipe} layers"
        )
    ways = cluster.num_gpus // (tensor * pipe)
    data = math.gcd(ways, cluster.gpus_per_node // tensor)
    return Plan(pipe=pipe, replica=ways // data, data=data, tensor=tensor), MEGATRON
