"""What data parallelism exchanges: gradients, shared parameters, and the tied embedding; and the optimizer's own time."""

from dataclasses import dataclass

from giantjax.cluster import Cluster
from giantjax.config import ModelConfig
from giantjax.planner.compute import Processor
from giantjax.planner.flops import num_parameters
from giantjax.planner.links import Place, Span, Wires
from giantjax.planner.plan import Plan, Traits

PCIE_BANDWIDTH, HOST_BANDWIDTH = 12e9, 100e9
"""Bytes/s at line rate: of a GPU's 16 lanes of PCIe 3, and of a node's memory."""
ADAM_BYTES = 44
"""Moved a parameter by the optimizer: gradient, parameter and moments, their norm, and the compute copy."""

BYTES_A_VALUE = {"none": 4.0, "bf16": 2.0, "int8": 1 + 4 / 256}
"""Of a gradient between nodes: `giantjax.parallel.collectives` rounds it so, an int8 scale for every 256."""
ROUNDED_BYTES = 36
"""Moved a rounded value: gradient and old error read, their sum written; rounded; decoded to keep what that took off; decoded to be
used. What comes in is added up on the way."""


@dataclass(frozen=True)
class Sizes:
    """Parameters on one device."""

    layer: float
    table: float
    """Of what is in no layer, on the stages that have it: the embedding; with us also positions, the last LayerNorm and an untied head."""
    stage: float
    """Of the fullest stage."""
    cast: float
    """Of `stage`, the weights of matrix products, which have a copy in the compute type."""
    whole: float = 0.0
    """Of `table`, what every device of `tensor` has all of."""
    stage_layers: float = 0.0
    """Layers of the fullest stage."""
    token: float = 0.0
    """Of `table`, the embedding of tokens, and as much again where the head is not tied to it."""

    @property
    def matrices(self) -> float:
        """Of `cast`, what is in layers."""
        return self.cast - self.token

    def exchanged(self, plan: Plan, traits: Traits) -> float:
        """Those that a stage's data-parallel devices exchange among themselves: ours has the embedding on every stage of a pipeline,
        and adds up its gradients over stages and data-parallel devices at once."""
        return self.stage - (self.table if traits.execution == "lockstep" and plan.pipe > 1 else 0)


def sizes_of(model: ModelConfig, plan: Plan, layers: float, traits: Traits) -> Sizes:
    """Parameters on a device of the fullest stage, which holds `layers` layers."""
    hidden, rows = model.hidden_size, model.padded_vocabulary(plan.tensor)
    outside = rows * (2 if model.head == "untied" else 1) * hidden + model.sequence_length * hidden
    layer = (num_parameters(model, plan.tensor) - outside) / model.num_layers / plan.tensor
    table = rows * hidden / plan.tensor
    matrices = (4 * hidden + 2 * model.inner_size) * hidden / plan.tensor
    if traits.execution == "lockstep":
        # LayerNorms and the biases of row-parallel products lie on every device of `tensor`.
        layer += 6 * hidden * (1 - 1 / plan.tensor)
        whole = (model.sequence_length + 2) * hidden
        shared = table * (2 if model.head == "untied" else 1) + whole
        return Sizes(layer, shared, layer * layers + shared, matrices * layers + table, whole, layers, table)
    return Sizes(layer, table, layer * layers + table, layer * layers + table)


def accumulated_bytes(plan: Plan, traits: Traits) -> float:
    """Bytes a parameter moved in each microbatch: gradients added up, and weights cast."""
    if traits.execution == "lockstep":
        # Written and read whole and added as shares; and weights written as they are gathered, twice.
        return 8 + 16 / plan.data + (4 if plan.zero_stage == 3 else 0) if plan.zero_stage >= 2 else 16
    cast = 6 / (plan.ways if plan.zero_stage == 3 else 1) if traits.casts_weights else 0
    if plan.zero_stage >= 2:
        return 4 + cast
    return 10 + cast


def zero_ways(plan: Plan, traits: Traits) -> int:
    """Devices that share the optimizer's state: ours inside a node only."""
    return plan.ways if traits.shares_across else plan.data


def exchange_seconds(
    sizes: Sizes, plan: Plan, cluster: Cluster, where: Place, traits: Traits, wires: Wires, *, cover: float, ending: float
) -> float:
    """Seconds by which data parallelism makes the step longer.

    Others' ZeRO 2 and 3 gather parameters and scatter gradients in every microbatch, over the work `cover` of one, whose layers wait
    for what they need; otherwise gradients are reduced once, after the last microbatch or over `ending`, its backward layers, which
    only the part of the transfer inside the node disturbs. What ours does in every tick is in `sharing_seconds`.
    """
    if plan.ways == 1:
        return 0.0
    rings = cluster.gpus_per_node / where.data.inside if where.data.nodes > 1 else 1.0
    # A collective of one parameter at a time runs on one ring, which leaves a node through one card.
    cards = rings if traits.gathers == "parameter" else None
    contention = wires.constants.contention

    def one_pass(width: float) -> float:
        return wires.one_pass(sizes.exchanged(plan, traits) * width, where.data, rings, cards if plan.zero_stage >= 2 else None)

    if plan.zero_stage >= 2 and traits.execution == "asynchronous":
        gathers = 2 if plan.zero_stage == 3 else 1
        moving = gathers * one_pass(2) + one_pass(traits.gradient_bytes)
        moving += (gathers + 1) * (sizes.stage - sizes.table) / sizes.layer * wires.constants.collective_latency
        exposed = max(0.0, moving - cover) + contention * min(moving, cover) if traits.overlap_data else moving
        return plan.num_microbatches * exposed
    gathered = (2 if traits.shares_across else 4) if plan.zero_stage else traits.gradient_bytes
    moving = one_pass(traits.gradient_bytes) + one_pass(gathered)
    if traits.execution == "lockstep" or (plan.zero_stage and not traits.shares_across):
        moving = _inside_first(sizes, plan, where, traits, wires, rings)
    if not traits.overlap_data:
        return moving
    inside = 2 * wires.one_pass(sizes.exchanged(plan, traits) * traits.gradient_bytes, Span(where.data.inside, 1), 1)
    return max(0.0, moving - ending) + contention * min(inside, ending)


def _inside_first(sizes: Sizes, plan: Plan, where: Place, traits: Traits, wires: Wires, rings: float) -> float:
    """Gradients scattered inside the node, shares reduced across nodes, gradients or under ZeRO parameters gathered inside.

    From ZeRO 2 on gradients have been scattered in ticks, and under 3 parameters are gathered there.
    """
    inside, across = Span(where.data.inside, 1), Span(1, where.data.nodes)
    share = sizes.exchanged(plan, traits) / where.data.inside
    spread = sum(wires.one_pass(sizes.stage * width, inside, 1) for width in widths_inside(plan, traits))
    return spread + 2 * wires.one_pass(share * bytes_across(plan, traits), across, rings * where.data.inside)


def widths_inside(plan: Plan, traits: Traits) -> tuple[int, ...]:
    """Bytes a parameter of each reduce-scatter and all-gather inside the node after the last tick."""
    return (traits.gradient_bytes, 4)[max(0, plan.zero_stage - 1) :]


def bytes_across(plan: Plan, traits: Traits) -> float:
    """Bytes of a gradient between replicas."""
    return traits.gradient_bytes if plan.compression == "none" else BYTES_A_VALUE[plan.compression]


def rounding_seconds(sizes: Sizes, plan: Plan, processor: Processor) -> float:
    """Seconds of rounding the gradients that cross between replicas, and of keeping what that takes off."""
    return 0.0 if plan.compression == "none" else processor.moved(sizes.stage / plan.data * ROUNDED_BYTES, 20)


def feedback_bytes(sizes: Sizes, plan: Plan) -> float:
    """Bytes of the fp32 errors of a device's summands, and of its part of the sums, as `compressed_sum` keeps them."""
    return 0.0 if plan.compression == "none" else 4 * sizes.stage / plan.data * (1 + 1 / plan.replica)


def tied_span(plan: Plan, where: Place, traits: Traits) -> Span:
    """Devices that add up the gradients of the embedding: its first and last stage, or with us all stages and replicas of a share."""
    crossing = -(-plan.pipe // where.stages_in_node)
    if traits.execution == "asynchronous":
        return Span(1, 2) if crossing > 1 else Span(2, 1)
    nodes = crossing * where.data.nodes
    if plan.compression != "none":
        # Exactly over stages first, then rounded over replicas.
        return Span(max(1, plan.pipe // crossing), crossing)
    return Span(max(1, plan.pipe * plan.replica // nodes), nodes)


def tied_seconds(sizes: Sizes, plan: Plan, cluster: Cluster, where: Place, traits: Traits, wires: Wires) -> float:
    """Seconds to add up the gradients of the embedding over stages, and with us over replicas."""
    if plan.pipe == 1:
        return 0.0
    span = tied_span(plan, where, traits)
    share = plan.data if traits.execution == "lockstep" else 1
    rings = cluster.gpus_per_node / span.inside if span.nodes > 1 else 1
    if traits.execution == "asynchronous" and span.nodes > 1:
        rings = cluster.gpus_per_node / where.stages_in_node
    seconds = 2 * wires.one_pass(sizes.table * traits.gradient_bytes / share, span, rings)
    if plan.compression != "none":
        seconds += 2 * wires.one_pass(sizes.table * bytes_across(plan, traits) / share, Span(1, where.data.nodes), cluster.gpus_per_node)
    return seconds


def optimizer_seconds(owned: float, plan: Plan, cluster: Cluster, processor: Processor, traits: Traits) -> float:
    """Seconds of the update of `owned` parameters a device."""
    if traits.offload == "none":
        return processor.moved(owned * ADAM_BYTES, 20)
    pcie, host = PCIE_BANDWIDTH * processor.constants.host, HOST_BANDWIDTH * processor.constants.host
    seconds = owned * 6 / pcie + owned * cluster.gpus_per_node * 30 / host
    return seconds + (plan.num_microbatches * owned * 6 / pcie if traits.offload == "everything" else 0.0)
