"""What each stage does, one action after the other, where stages run on their own: the published schedules as they are run elsewhere."""

from collections.abc import Sequence

from giantjax.parallel.schedule_table import Action, Schedule

Orders = Sequence[Sequence[Action]]
"""What each stage does, one action after the other."""


def table_orders(schedule: Schedule) -> list[list[Action]]:
    """What each stage does in the order of the table."""
    orders: list[list[Action]] = [[] for _ in range(schedule.num_stages)]
    for _, action in schedule.actions():
        orders[action.stage].append(action)
    return orders


def megatron_orders(num_stages: int, num_microbatches: int) -> list[list[Action]]:
    """1F1B as Megatron-LM runs it, each stage on its own (Narayanan et al., 2021, figure 4, above).

    Stage s runs S - 1 - s forward actions, then forward and backward in turn, then the backward actions left, so that
    at most S - s microbatches are in flight on it.
    """
    forward = [[Action("forward", stage, microbatch) for microbatch in range(num_microbatches)] for stage in range(num_stages)]
    return [_in_turn(ahead, [a._replace(kind="backward") for a in ahead], num_stages - 1 - stage) for stage, ahead in enumerate(forward)]


def interleaved_orders(schedule: Schedule) -> list[list[Action]]:
    """Interleaved 1F1B as Megatron-LM runs it (the same, figure 4, below), from the lockstep table.

    Each stage keeps the table's order of forward actions and that of backward actions. With C chunks and groups of n
    microbatches, stage s runs (C - 1) n + 2(S - 1 - s) forward actions, then forward and backward in turn.
    """
    orders = table_orders(schedule)
    kinds = [action.kind for action in orders[-1]]
    # On the last stage the loss of the first microbatch is all that its first backward action waits for.
    least = kinds.index("backward") - 1 if schedule.trains else len(kinds)
    both = [[[action for action in order if action.kind == kind] for kind in ("forward", "backward")] for order in orders]
    return [_in_turn(forward, backward, least + 2 * (len(orders) - 1 - stage)) for stage, (forward, backward) in enumerate(both)]


def zero_bubble_orders(num_stages: int, num_microbatches: int) -> list[list[Action]]:
    """ZB-H1 (Qi et al., 2023, figure 2): 1F1B in which stage s is s weight gradients behind.

    What it is behind with fills its wait at the end, when the stages before it still pass gradients on. No more than S
    microbatches are in flight on any stage, their weight gradients counted in.
    """
    orders = []
    for stage, order in enumerate(megatron_orders(num_stages, num_microbatches)):
        late = [Action("weight", stage, microbatch) for microbatch in range(num_microbatches)]
        whole = []
        for action in order:
            whole.append(action)
            if action.kind == "backward" and action.microbatch >= stage:
                whole.append(late.pop(0))
        orders.append([*whole, *late])
    return orders


def _in_turn(forward: Sequence[Action], backward: Sequence[Action], ahead: int) -> list[Action]:
    """`ahead` forward actions, then forward and backward in turn, then the backward actions left."""
    ahead = min(ahead, len(forward))
    pairs = [[*forward[ahead + i : ahead + i + 1], action] for i, action in enumerate(backward)]
    return [*forward[:ahead], *(action for pair in pairs for action in pair)]
