"""Bytes of a step between nodes and inside them."""

from giantjax.planner.compute import Pass
from giantjax.planner.exchange import Sizes, bytes_across, tied_span, widths_inside
from giantjax.planner.links import Place, Span
from giantjax.planner.plan import Plan, Traits
from giantjax.planner.sharing import gathered_bytes, num_turns, scattered_bytes
from giantjax.planner.timeline import num_ticks


def step_bytes(
    plan: Plan,
    where: Place,
    traits: Traits,
    sizes: Sizes,
    boundary: float,
    passes: Pass,
    layers: float,
    width: int,
) -> tuple[dict[str, float], float]:
    """Bytes between nodes by what is sent, and bytes inside nodes; `width` is that of an activation."""
    network: dict[str, float] = {}
    nvlink, devices = 0.0, plan.num_devices

    def ring(name: str, num_bytes: float, span: Span, groups: float, times: float) -> None:
        nonlocal nvlink
        if span.size == 1 or not num_bytes:
            return
        steps = times * groups * num_bytes * (span.size - 1) / span.size
        if span.nodes > 1:
            network[name] = network.get(name, 0.0) + steps * span.nodes
        nvlink += steps * span.nodes * (span.inside - (1 if span.nodes > 1 else 0))

    lockstep = traits.execution == "lockstep"
    ticks = num_turns(plan) if lockstep else plan.num_microbatches
    ring("tensor collectives", boundary, where.tensor, devices / plan.tensor, ticks * layers * (passes.forward + passes.backward))
    groups, own, across = devices / plan.ways, sizes.exchanged(plan, traits), bytes_across(plan, traits)
    if plan.zero_stage >= 2 and not lockstep:
        widths = (4 if plan.zero_stage == 3 else 2) + traits.gradient_bytes
        ring("shared parameters and gradients", sizes.stage * widths, where.data, groups, plan.num_microbatches)
    elif lockstep or (plan.zero_stage and not traits.shares_across):
        if plan.zero_stage >= 2:
            moved = scattered_bytes(sizes) + gathered_bytes(sizes, plan, width)
            ring("shared parameters and gradients", moved, Span(plan.data, 1), devices / plan.data, ticks)
        once = sizes.stage * sum(widths_inside(plan, traits))
        ring("gradients", once, Span(where.data.inside, 1), groups * where.data.nodes, 1)
        ring("gradients", own * 2 * across / where.data.inside, Span(1, where.data.nodes), groups * where.data.inside, 1)
    else:
        ring("gradients", own * (traits.gradient_bytes + (2 if plan.zero_stage else traits.gradient_bytes)), where.data, groups, 1)
    if plan.pipe > 1:
        copies = 1 if traits.sharded_boundary else plan.tensor
        sent = 2 * num_messages(plan, traits) * plan.ways * boundary * copies
        nodes = -(-plan.pipe // where.stages_in_node)
        # Between chunks the last stage sends to the first.
        around = int(plan.num_chunks > 1)
        if nodes > 1:
            network["pipeline messages"] = sent * (nodes - 1 + around)
        nvlink += sent * (plan.pipe - nodes + (around if nodes == 1 else 0))
        if plan.head == "shared":
            ring("shared head", boundary, Span(max(1, plan.pipe // nodes), nodes), plan.ways, 4 * plan.num_microbatches)
        span = tied_span(plan, where, traits)
        # What `tensor` does not divide is scattered over it before it crosses.
        table = sizes.table - sizes.whole * (1 - 1 / plan.tensor)
        ring("tied embedding", table * traits.gradient_bytes * 2 * _tied_groups(plan, traits), span, 1, 1)
        if plan.compression != "none":
            ring("tied embedding", table * across * 2, Span(1, where.data.nodes), plan.pipe * plan.tensor, 1)
    return network, nvlink


def num_messages(plan: Plan, traits: Traits) -> int:
    """Messages on each boundary in each direction; a lockstep program sends in every tick that has the kind."""
    if traits.execution == "lockstep":
        return num_ticks(plan.schedule, plan.pipe, plan.num_microbatches, plan.num_chunks)
    return plan.num_microbatches * plan.num_chunks


def _tied_groups(plan: Plan, traits: Traits) -> int:
    """How many whole embeddings are added up at once, one device's part of `tensor` counted as one."""
    if traits.execution == "asynchronous":
        return plan.tensor * plan.ways
    return plan.tensor * (1 if plan.compression == "none" else plan.replica)
