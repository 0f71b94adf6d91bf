"""Bytes of a step between nodes and inside them."""

from giantjax.planner.compute import Pass
from giantjax.planner.exchange import Sizes
from giantjax.planner.links import Place, Span
from giantjax.planner.plan import Plan, Traits


def step_bytes(
    plan: Plan,
    where: Place,
    traits: Traits,
    sizes: Sizes,
    boundary: float,
    passes: Pass,
    layers: float,
) -> tuple[dict[str, float], float]:
    """Bytes between nodes by what is sent, and bytes inside nodes."""
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

    ticks = plan.num_microbatches + (plan.pipe - 1 if traits.execution == "lockstep" else 0)
    ring("tensor collectives", boundary, where.tensor, devices / plan.tensor, ticks * layers * (passes.forward + passes.backward))
    groups = devices / plan.ways
    if plan.zero_stage >= 2:
        widths = (4 if plan.zero_stage == 3 else 2) + traits.gradient_bytes
        ring("shared parameters and gradients", sizes.stage * widths, where.data, groups, plan.num_microbatches)
    elif plan.zero_stage and not traits.shares_across:
        ring("gradients", sizes.stage * (traits.gradient_bytes + 4), Span(where.data.inside, 1), groups * where.data.nodes, 1)
        ring("gradients", sizes.stage * 2 * traits.gradient_bytes, Span(1, where.data.nodes), groups, 1)
    else:
        ring("gradients", sizes.stage * (traits.gradient_bytes + (2 if plan.zero_stage else traits.gradient_bytes)), where.data, groups, 1)
    if plan.pipe > 1:
        copies = 1 if traits.sharded_boundary else plan.tensor
        sent = 2 * num_messages(plan, traits) * plan.ways * boundary * copies
        crossing = -(-plan.pipe // where.stages_in_node) - 1
        if crossing:
            network["pipeline messages"] = sent * crossing
        nvlink += sent * (plan.pipe - 1 - crossing)
        held = sizes.table * traits.gradient_bytes * 2
        if traits.execution == "lockstep":
            copies_of = plan.replica if plan.zero_stage else plan.ways
            ring("tied embedding", held, Span(where.stages_in_node, crossing + 1), plan.tensor * copies_of, 1)
        else:
            ring("tied embedding", held, Span(1, 2) if crossing else Span(2, 1), plan.tensor * plan.ways, 1)
    return network, nvlink


def num_messages(plan: Plan, traits: Traits) -> int:
    """Messages on each boundary in each direction; a lockstep program sends in every tick that has the kind."""
    return (plan.num_microbatches + plan.pipe - 1 if traits.execution == "lockstep" else plan.num_microbatches) * plan.num_chunks
