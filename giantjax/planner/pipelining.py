"""What our executor does in a tick of a pipeline, in seconds and bytes: chunks, weight gradients apart, and the head."""

from typing import NamedTuple

from giantjax.config import ModelConfig
from giantjax.planner import timeline
from giantjax.planner.compute import Pass, Processor
from giantjax.planner.exchange import Sizes
from giantjax.planner.links import Place, Span, Wires
from giantjax.planner.plan import Plan
from giantjax.planner.timeline import Duration

PUT, TAKEN = 2, 2
"""Times that what a slot of a pipeline keeps is read or written, as the compiled tick has it: copied there, and taken out."""


class Pipelined(NamedTuple):
    """A step's pipeline."""

    stage: float
    """Seconds of all work of one microbatch on one stage."""
    duration: Duration


def pipelined(
    layers: Pass,
    first: Pass,
    last: Pass,
    weights: float,
    model: ModelConfig,
    plan: Plan,
    processor: Processor,
    sizes: Sizes,
    accumulated: float,
    kept: float,
    hop: float,
    shared_hop: float,
) -> Pipelined:
    """The seconds of a lockstep pipeline.

    Args:
        layers: all layers of a stage, collectives counted.
        first: the embedding, which every stage runs with each action.
        last: head and loss; both ways with the backward action of the end of the model, or of any.
        weights: seconds of the products that give the weights' gradients of all layers of a stage.
        model: for the sizes of what is stashed.
        plan: of the run.
        processor: that moves bytes.
        sizes: of a device's parameters.
        accumulated: seconds to add up the gradients of a microbatch.
        kept: bytes that a microbatch keeps on a stage for its backward pass.
        hop: seconds of a message between neighbours.
        shared_hop: seconds to bring the end of the model to all stages, and as many to bring its cotangents back.
    """
    chunks, head = plan.num_chunks, last.forward + last.backward
    if plan.pipe == 1:
        work = layers + first + last
        stage = work.forward + work.backward + accumulated
        return Pipelined(stage, Duration(plan.num_microbatches * stage, 0.0))
    work = layers.times(1 / chunks) + first + Pass(processor.moved(PUT * kept / chunks), processor.moved(TAKEN * kept / chunks))
    weight = 0.0
    if plan.schedule == "zero-bubble":
        stash = processor.moved(2 * PUT * stash_bytes(model, plan, processor.width) * sizes.stage_layers)
        weight = weights + accumulated + stash
        work += Pass(0.0, stash - weights)
    else:
        work += Pass(0.0, accumulated / chunks)
    if chunks > 1:
        # A chunk's weights are cut out of the stage's for each action.
        cut = processor.moved(2 * processor.width * sizes.cast / chunks)
        work += Pass(cut, cut)
    if plan.head == "everywhere":
        work += Pass(0.0, head)
    crossing = hop + (shared_hop if plan.head == "shared" else 0.0)
    found = timeline.lockstep(
        plan.schedule, plan.pipe, plan.num_microbatches, work.forward, work.backward, crossing, weight=weight, num_chunks=chunks
    )
    if chunks > 1:
        # Compiled, the hops of interleaved ticks do not lie over their work (docs/measurements.md).
        ticks = timeline.num_ticks(plan.schedule, plan.pipe, plan.num_microbatches, chunks)
        found = found._replace(exposed=2 * ticks * crossing)
    stage = chunks * (work.forward + work.backward) + weight
    if plan.head != "everywhere":
        stage += head
        found = Duration(found.work + plan.num_microbatches * head, found.exposed)
    return Pipelined(stage, found)


def shared_hop(message: float, plan: Plan, where: Place, wires: Wires, gpus_per_node: int) -> float:
    """Seconds of the sum over all stages of one device's part of a boundary."""
    nodes = -(-plan.pipe // where.stages_in_node)
    span = Span(max(1, plan.pipe // nodes), nodes)
    return 2 * wires.one_pass(message, span, gpus_per_node / span.inside)


def stash_bytes(model: ModelConfig, plan: Plan, width: int) -> float:
    """Bytes of a layer and microbatch that wait for the weights' gradients: input and output's cotangent of four products.

    What is gathered over `tensor`, or scattered after, is kept whole: the inputs of two products, the cotangents of two.
    """
    tokens, hidden = plan.microbatch_size * model.sequence_length, model.hidden_size
    return width * tokens * (4 * hidden + (4 * hidden + 2 * model.inner_size) / plan.tensor)
