"""What our ZeRO 2 and 3 move inside a node in every tick, beside what is exchanged once a step."""

from giantjax.planner.exchange import Sizes
from giantjax.planner.links import Span, Wires
from giantjax.planner.plan import Plan
from giantjax.planner.timeline import num_ticks

COLLECTIVES = {2: 1, 3: 7}
"""Of a layer and microbatch, as compiled programs combine them: gradients in one, weights in about three each time."""


def num_turns(plan: Plan) -> float:
    """Ticks that have a forward action, as turns of a whole stage, and as many that have a backward one; idle ones share too."""
    return num_ticks(plan.schedule, plan.pipe, plan.num_microbatches, plan.num_chunks) / plan.num_chunks


def scattered_bytes(sizes: Sizes) -> float:
    """Bytes of the whole fp32 gradients of a backward action."""
    return 4 * sizes.stage


def gathered_bytes(sizes: Sizes, plan: Plan, width: int) -> float:
    """Bytes of what is made whole for a forward and a backward action: under ZeRO 2 nothing.

    Layers have theirs gathered for each, and in the groups of `full:K` twice for backward; the rest is gathered where it is used, the
    embedding in fp32 for it is looked up.
    """
    if plan.zero_stage < 3:
        return 0.0
    layers = width * sizes.matrices + 4 * (sizes.stage - sizes.table - sizes.matrices)
    looked_up = 4 * (sizes.token + sizes.whole)
    head = width * sizes.token
    return layers * (3 if plan.recompute_interval > 1 else 2) + looked_up + head


def sharing_seconds(sizes: Sizes, plan: Plan, wires: Wires, layers: float, width: int) -> float:
    """Seconds of it, as if a tick waited for all.

    Compiled programs lay a part over compute: weights of the feed-forward layer gathered while attention runs, gradients scattered while
    the next layer's are computed.
    """
    if plan.zero_stage < 2 or plan.data == 1:
        return 0.0
    seconds = wires.one_pass(scattered_bytes(sizes) + gathered_bytes(sizes, plan, width), Span(plan.data, 1), 1)
    return num_turns(plan) * (seconds + layers * COLLECTIVES[plan.zero_stage] * wires.constants.collective_latency)
