"""Stages' own orders brought into step: tables in which forward and backward share ticks wherever that takes less time."""

from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Int

from giantjax.parallel.orders import Orders, table_orders
from giantjax.parallel.schedule_table import IDLE, KINDS, Action, Schedule, dependencies, in_flight
from giantjax.parallel.simulate import Costs, Link, deadlock, lockstep

MESSAGE = Link(latency=0.1, bandwidth=1)
"""In units of a forward action."""


def laid_out(name: str, num_microbatches: int, num_chunks: int, orders: Orders) -> Schedule:
    """The table in which each stage works through its order, one action a tick, each as early as its inputs allow.

    Args:
        name: of the schedule.
        num_microbatches: M.
        num_chunks: C.
        orders: all there is to do, each action once.

    Raises:
        InputError: the orders wait for each other; the sentence names the actions.
    """
    bare = _table(name, num_microbatches, num_chunks, len(orders), {})
    when: dict[Action, int] = {}
    ahead = [list(order)[::-1] for order in orders]
    tick = 0
    while any(ahead):
        ready = [order for order in ahead if order and all(when.get(needed, tick) < tick for needed in dependencies(bare, order[-1]))]
        if not ready:
            raise deadlock(bare, {stage: order[-1] for stage, order in enumerate(ahead) if order}, set(when))
        for order in ready:
            when[order.pop()] = tick
        tick += 1
    return _table(name, num_microbatches, num_chunks, len(orders), when)


def compact(schedule: Schedule, costs: Costs | None = None) -> Schedule:
    """The same work in fewer, fuller ticks, where that takes less time: F and B of a stage in one tick, all stages' W in the same ones.

    Each stage keeps its order of forward actions, that of backward actions and that of weight gradients; each action
    stands as early as its inputs and the memory allow. Weight gradients, which cost every stage the ticks they occur in
    anywhere, all move to the first tick in which all stages have one to compute.

    A table without switch ticks becomes one that holds no more on any stage. In one with them stages ran on their own, and
    used results half a tick later where tables do a whole tick later: there n microbatches in flight may become 2n - 1, as
    they do from Megatron-LM's 1F1B to ours, and more weight gradients wait.

    Of the table as it is and the compacted ones the one that takes least time in lockstep is taken; of two that take the
    same, the one of fewer segments, each of which is a program of its own, and then the one that holds less. What remains
    of stages that do one thing each are switch ticks.

    Args:
        schedule: any valid table.
        costs: what it takes; None for equal stages with b = 2f, or f = b = w where weight gradients are apart, and messages
            of f/10, which lockstep hides and switch ticks do not.
    """
    if costs is None:
        costs = Costs(1, 1, 1, MESSAGE) if schedule.splits_weight else Costs(1, 2, link=MESSAGE)
    limit = in_flight(schedule)
    tables = [_compacted(schedule, limit)]
    if any(segment.mode == "switch" for segment in schedule.segments()):
        tables.append(_compacted(schedule, 2 * limit - 1))
    else:
        tables = [table for table in tables if (_waiting_weights(table) <= _waiting_weights(schedule)).all()]
    return min(
        [schedule, *tables], key=lambda table: (lockstep(table, costs).step_time, len(table.segments()), int(in_flight(table).max()))
    )


def _waiting_weights(schedule: Schedule) -> Int[np.ndarray, "S"]:
    """The most microbatches whose weight gradients alone have not been computed, on each stage."""
    if not schedule.splits_weight:
        return np.zeros(schedule.num_stages, int)
    return (np.cumsum(schedule.backward != IDLE, axis=0) - np.cumsum(schedule.weight != IDLE, axis=0)).max(axis=0)


def _compacted(schedule: Schedule, limit: Int[np.ndarray, "S"]) -> Schedule:
    """Everything as early as it can be with up to `limit` in flight on each stage, which is at least what `schedule` has."""
    orders = table_orders(schedule)
    ahead = {kind: [[action for action in order if action.kind == kind][::-1] for order in orders] for kind in KINDS}
    when: dict[Action, int] = {}
    held = np.zeros(schedule.num_stages, int)
    tick, both = 0, [[ahead[kind][stage] for kind in KINDS if kind != "weight"] for stage in range(schedule.num_stages)]
    while any(map(any, both)):
        for stage, own in enumerate(both):
            for order in own:
                free = order and (order[-1].kind == "backward" or held[stage] < limit[stage])
                if free and all(when.get(needed, tick) < tick for needed in dependencies(schedule, order[-1])):
                    held[stage] += 1 if order[-1].kind == "forward" else -1
                    when[order.pop()] = tick
        tick += 1
    when |= _aligned(ahead["weight"], when)
    return _table(schedule.name, schedule.num_microbatches, schedule.num_chunks, schedule.num_stages, when)


def _aligned(weights: Sequence[Sequence[Action]], when: Mapping[Action, int]) -> dict[Action, int]:
    """The same ticks for all stages' weight gradients, given last first, each after the last of their input gradients."""
    ticks: dict[Action, int] = {}
    tick = -1
    for row in zip(*(order[::-1] for order in weights), strict=True):
        tick = max(tick, *(when[action._replace(kind="backward")] for action in row)) + 1
        ticks |= dict.fromkeys(row, tick)
    return ticks


def _table(name: str, num_microbatches: int, num_chunks: int, num_stages: int, when: Mapping[Action, int]) -> Schedule:
    tables = {kind: np.full((max(when.values(), default=0) + 1, num_stages), IDLE, np.int32) for kind in KINDS}
    for action, tick in when.items():
        tables[action.kind][tick, action.stage] = action.chunk * num_microbatches + action.microbatch
    return Schedule(name, num_microbatches, num_chunks, tables["forward"], tables["backward"], tables["weight"])
