"""Seconds of a step and the bytes it sends, from a model, a plan, a cluster and the traits of the software."""

from dataclasses import dataclass

from giantjax.cluster import Cluster
from giantjax.config import ModelConfig
from giantjax.planner import timeline
from giantjax.planner.compute import Pass, Processor
from giantjax.planner.constants import FITTED, Constants
from giantjax.planner.exchange import (
    accumulated_bytes,
    exchange_seconds,
    optimizer_seconds,
    rounding_seconds,
    sizes_of,
    tied_seconds,
    zero_ways,
)
from giantjax.planner.flops import flops_per_sample
from giantjax.planner.layer import BLOCKWISE, attention, block, embedding, head
from giantjax.planner.links import Wires, place
from giantjax.planner.pipelining import pipelined, shared_hop
from giantjax.planner.plan import Plan, Traits
from giantjax.planner.sharing import sharing_seconds
from giantjax.planner.stage_memory import kept_bytes
from giantjax.planner.traffic import step_bytes

TENSOR_HIDDEN = 0.7
"""Share of tensor-parallel collectives that lies over products where a program splits both (Transformer Engine's user buffers)."""


@dataclass(frozen=True)
class StepCost:
    """What one step costs."""

    seconds: float
    samples_per_s: float
    mfu: float
    """Model FLOP/s, nothing recomputed counted, as a share of the GPUs' peak in 16 bits."""
    bubble: float
    """Share of the pipeline's time, messages aside, that its mean stage has no work of its own."""
    exposed_network_s: float
    """Seconds that the step is longer for what travels between nodes."""
    network_bytes: float
    """Sent between nodes, all nodes together."""
    nvlink_bytes: float
    """Sent inside nodes, all GPUs together."""
    parts: dict[str, float]
    """Seconds by what they go to; they add up to `seconds`."""
    network_parts: dict[str, float]
    """Of `network_bytes`, by what is sent."""


def step_cost(model: ModelConfig, plan: Plan, cluster: Cluster, traits: Traits, constants: Constants = FITTED) -> StepCost:
    """Price one step.

    A step is its pipeline (layers, tensor-parallel collectives, accumulation, messages), what data parallelism exchanges in
    and after it, and the optimizer.
    """
    processor, wires, where = Processor(cluster.gpu, constants, traits.precision), Wires(cluster, constants), place(plan, cluster)
    lockstep = traits.execution == "lockstep"
    boundary = plan.microbatch_size * model.sequence_length * model.hidden_size * processor.width
    gather = wires.one_pass(boundary, where.tensor, cluster.gpus_per_node / where.tensor.inside) if plan.tensor > 1 else 0.0
    if traits.overlap_tensor:
        gather *= 1 - TENSOR_HIDDEN
    passes = _tensor_passes(plan, traits)
    layer = _layer(processor, model, plan, traits) + passes.times(gather)
    layers = _layers(model, plan, traits)
    sizes = sizes_of(model, plan, layers, traits)
    first, ways = embedding(processor, model, plan.microbatch_size), plan.pipe if plan.head == "shared" else 1
    last = head(processor, model, plan.microbatch_size, plan.tensor, traits, ways)
    per_microbatch = processor.moved(sizes.stage * accumulated_bytes(plan, traits))

    hop, crosses = 0.0, plan.pipe > where.stages_in_node
    if plan.pipe > 1:
        message = boundary / (plan.tensor if traits.sharded_boundary else 1)
        hop = wires.message(message, cluster.gpus_per_node / where.stages_in_node, crosses=crosses)
    if lockstep:
        found = pipelined(
            layer.times(layers),
            first,
            last,
            layers * _weight_products(processor, model, plan),
            model,
            plan,
            processor,
            sizes,
            per_microbatch,
            kept_bytes(model, plan, traits, processor.width) * layers,
            hop,
            shared_hop(boundary / plan.tensor, plan, where, wires, cluster.gpus_per_node) if plan.head == "shared" else 0.0,
        )
        stages, duration = [found.stage] * plan.pipe, found.duration
    else:
        stages = _stages(layer, first, last, layers, plan, traits, per_microbatch)
        hidden = 1 - constants.contention if traits.overlap_pipe else 0.0
        duration = timeline.asynchronous(stages, plan.num_microbatches, hop, plan.num_chunks, hidden)

    sharing = sharing_seconds(sizes, plan, wires, layers, processor.width) if lockstep else 0.0
    rounding = rounding_seconds(sizes, plan, processor)
    exchange = exchange_seconds(sizes, plan, cluster, where, traits, wires, cover=max(stages), ending=layers * layer.backward)
    owned = sizes.stage / (zero_ways(plan, traits) if plan.zero_stage else 1)
    optimizer = optimizer_seconds(owned, plan, cluster, processor, traits)
    tied = tied_seconds(sizes, plan, cluster, where, traits, wires)
    seconds = duration.total + sharing + exchange + rounding + optimizer + tied
    collectives = plan.num_microbatches * layers * gather * (passes.forward + passes.backward)
    useful = plan.num_microbatches * sum(stages) / plan.pipe
    network, nvlink = step_bytes(plan, where, traits, sizes, boundary, passes, layers, processor.width)
    flops = flops_per_sample(model) * plan.samples / (plan.num_devices * cluster.gpu.half_flops)
    tensor_crosses = where.tensor.nodes > 1
    exposed = (duration.exposed if crosses else 0.0) + (exchange if where.data.nodes > 1 else 0.0) + (tied if crosses else 0.0)
    return StepCost(
        seconds=seconds,
        samples_per_s=plan.samples / seconds,
        mfu=flops / seconds,
        bubble=1 - useful / duration.work,
        exposed_network_s=exposed + (collectives if tensor_crosses else 0.0),
        network_bytes=sum(network.values()),
        nvlink_bytes=nvlink,
        parts={
            "computing": useful - collectives,
            "tensor collectives": collectives,
            "bubble": duration.work - useful,
            "pipeline messages": duration.exposed,
            "data-parallel collectives": sharing + exchange,
            "tied embedding": tied,
            "rounding": rounding,
            "optimizer": optimizer,
        },
        network_parts=network,
    )


def _layer(processor: Processor, model: ModelConfig, plan: Plan, traits: Traits) -> Pass:
    """A block with what its recompute policy makes again; blockwise attention always makes its scores again."""
    whole = block(processor, model, plan.microbatch_size, plan.tensor, traits)
    again = 0.0
    if plan.recompute_kind == "full":
        again = whole.forward
        if traits.execution == "lockstep" and plan.recompute == "full":
            # No backward pass needs the result of a layer's last product.
            again -= processor.dense(
                plan.microbatch_size * model.sequence_length, model.inner_size / plan.tensor, model.hidden_size
            ).forward
    elif plan.recompute_kind == "selective" and traits.attention not in BLOCKWISE:
        again = attention(processor, model, plan.microbatch_size, plan.tensor, traits).forward
    return Pass(whole.forward, whole.backward + again)


def _weight_products(processor: Processor, model: ModelConfig, plan: Plan) -> float:
    """Seconds of the products that give the gradients of a block's weights."""
    hidden, inner, tokens = model.hidden_size, model.inner_size, plan.microbatch_size * model.sequence_length
    shapes = (
        (hidden, 3 * hidden / plan.tensor),
        (hidden / plan.tensor, hidden),
        (hidden, inner / plan.tensor),
        (inner / plan.tensor, hidden),
    )
    return sum(processor.product(inputs, outputs, tokens) for inputs, outputs in shapes)


def _tensor_passes(plan: Plan, traits: Traits) -> Pass:
    """Reduce-scatters and all-gathers of a boundary in one block; an all-reduce is two.

    Two all-reduces forward and two backward (Shoeybi et al., 2019), or as many bytes in halves; with sequence parallelism the
    inputs of weight gradients, and of what is redone, are gathered anew (three in the compiled step), unless forward runs again anyway.
    """
    if plan.recompute_kind == "full":
        return Pass(4.0, 8.0)
    return Pass(4.0, 7.0 if traits.sequence_parallel else 4.0)


def _layers(model: ModelConfig, plan: Plan, traits: Traits) -> float:
    """Layers of the fullest stage; a lockstep program pads all stages to it."""
    if traits.execution == "lockstep":
        return -(-model.num_layers // (plan.pipe * plan.num_chunks)) * plan.num_chunks
    return (model.num_layers + (2 if traits.balanced else 0)) / plan.pipe


def _stages(layer: Pass, first: Pass, last: Pass, layers: float, plan: Plan, traits: Traits, per_microbatch: float) -> list[float]:
    """Seconds of forward and backward of a microbatch on each stage, each stage on its own."""
    stages = [layers * (layer.forward + layer.backward) + per_microbatch] * plan.pipe
    ends = {0: first, plan.pipe - 1: last} if plan.pipe > 1 else {0: first + last}
    for stage, end in ends.items():
        stages[stage] += end.forward + end.backward
        if traits.balanced and plan.pipe > 1:
            stages[stage] -= layer.forward + layer.backward
    return stages
