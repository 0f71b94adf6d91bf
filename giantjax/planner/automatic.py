"""A run whose config asks for an automatic mesh: the planner's choice for the GPUs there are."""

from dataclasses import replace

from giantjax.cluster import GPU, Cluster, Machine, gpu_of_kind, gpu_of_name
from giantjax.config import RunConfig
from giantjax.errors import InputError
from giantjax.network import network
from giantjax.parallel.nodes import Nodes
from giantjax.planner.explain import mesh_in_words
from giantjax.planner.memory import in_words
from giantjax.planner.plan import Plan
from giantjax.planner.search import Priced, require_fitting, search

STAND_IN = "A100-40GB"
"""What simulated devices are planned as, in nodes of 8, so that a rehearsal on a CPU gets the mesh of the real run."""


def with_plan(config: RunConfig, plan: Plan) -> RunConfig:
    """`config` with the mesh, microbatches, recomputing, sharing and compression of `plan`."""
    mesh = replace(config.mesh, pipe=plan.pipe, replica=plan.replica, data=plan.data, tensor=plan.tensor, plan="config")
    pipeline = replace(
        config.pipeline,
        schedule=plan.schedule,
        num_chunks=plan.num_chunks,
        head=plan.head,
        microbatch_size=plan.microbatch_size,
        num_microbatches=None,
    )
    training = replace(config.training, zero_stage=plan.zero_stage, recompute=plan.recompute, compression=plan.compression)
    return replace(config, mesh=mesh, pipeline=pipeline, training=training)


def plan_of(config: RunConfig) -> Plan:
    """The plan that `config` describes, its mesh resolved."""
    return Plan(
        pipe=config.mesh.pipe,
        replica=config.mesh.replica,
        data=config.mesh.data,
        tensor=config.mesh.tensor,
        microbatch_size=config.microbatch_size,
        num_microbatches=config.num_microbatches,
        schedule=config.pipeline.schedule,
        num_chunks=config.pipeline.num_chunks,
        head=config.pipeline.head,
        recompute=config.training.recompute,
        zero_stage=config.training.zero_stage,
        compression=config.training.compression,
    )


def resolve_mesh(config: RunConfig, machine: Machine, nodes: Nodes, like: Cluster | None = None) -> tuple[RunConfig, str | None]:
    """`config` with its mesh chosen where it asks for that, for the links of `like`, and a sentence that says so.

    One device leaves nothing to choose.

    Raises:
        InputError: no plan fits the GPUs.
    """
    if config.mesh.plan == "config":
        return config, None
    cluster = cluster_of_nodes(machine, nodes, like)
    if cluster.num_gpus == 1:
        return replace(config, mesh=replace(config.mesh, plan="config")), None
    found = search(config, cluster)
    if machine.simulated and not found.fitting:
        best = min(found.too_large, key=lambda one: one.fullest.total, default=None)
    else:
        # Rounding changes the numbers of a run, so plan.py proposes it and a person decides.
        best = next(one for one in require_fitting(config, cluster, found) if one.plan.compression == config.training.compression)
    if best is None:
        raise InputError(
            f"no mesh of {cluster.num_gpus} devices suits {config.name}; set runtime.num_cpu_devices to a number that divides "
            f"training.global_batch_size {config.training.global_batch_size} and its shares"
        )
    return with_plan(config, best.plan), choice_in_words(best, cluster)


def choice_in_words(best: Priced, cluster: Cluster) -> str:
    """The chosen plan and what is expected of it."""
    plan, cost = best.plan, best.cost
    link = f", {cluster.network.node_bandwidth / 1e9:.3g} GB/s {cluster.network.fabric} a node" if cluster.network.measured else ""
    rounded = "" if plan.compression == "none" else f", gradients between nodes in {plan.compression}"
    return (
        f"automatic mesh for {cluster.num_gpus} {cluster.gpu.name}{link}: {mesh_in_words(plan)}, {plan.num_microbatches} microbatches of "
        f"{plan.microbatch_size}, recompute {plan.recompute}, ZeRO {plan.zero_stage}{rounded}; about {cost.seconds:.2g} s a step, "
        f"{cost.samples_per_s:.3g} samples/s, {in_words(best.fullest.total)} on each"
    )


def cluster_of_nodes(machine: Machine, nodes: Nodes, like: Cluster | None = None) -> Cluster:
    """A cluster of `nodes` like this machine, with the links of `like`; of simulated devices, nodes and GPUs like its own.

    Without `like` simulated nodes have up to 8 STAND_INs, and a node has one card of 100 Gb/s InfiniBand.

    Raises:
        InputError: there are several nodes, and `like` has no link between them.
    """
    counts = list(nodes.per_node.values())
    if like and not like.has_link and len(counts) > 1:
        raise InputError(
            f"runtime.cluster {like.name} says nothing of a link, but this job has {len(counts)} nodes; measure them all by "
            "plan.py --measure, or add a table [network] to its file"
        )
    base = like or Cluster("", gpu_of_name(STAND_IN), 1, 8, network("infiniband", 100, 1))
    if machine.simulated:
        total = sum(counts)
        per_node = base.gpus_per_node if total % base.gpus_per_node == 0 else total
        return replace(base, name="simulated", num_nodes=total // per_node, gpus_per_node=per_node)
    gpu = gpu_of_kind(machine.kind) or (like.gpu if like else _unknown(machine))
    name = "this machine" if len(counts) == 1 else f"these {len(counts)} nodes"
    return replace(base, name=name, gpu=gpu, num_nodes=len(counts), gpus_per_node=min(counts))


def _unknown(machine: Machine) -> GPU:
    raise InputError(
        f"mesh.plan is auto, but nothing is known of the speed of {machine.kind}; set mesh.plan to config and the degrees to what divides "
        f"its {machine.num_devices} devices"
    )
