"""The fastest schedule whose activations fit: a search between 1F1B and zero bubble, and below."""

import functools
import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from giantjax.errors import InputError
from giantjax.parallel.compact import laid_out
from giantjax.parallel.orders import megatron_orders, zero_bubble_orders
from giantjax.parallel.schedule import gpipe, one_forward_one_backward, zero_bubble
from giantjax.parallel.schedule_beam import BACKWARD, FORWARD, Problem, beam_table
from giantjax.parallel.schedule_file import write_schedule
from giantjax.parallel.schedule_program import exact_table
from giantjax.parallel.schedule_table import Schedule
from giantjax.parallel.simulate import Costs, lockstep
from giantjax.parallel.slots import residual_slots, weight_slots

NAME = "searched"
EXACT = 9
"""Stages times microbatches up to which an integer program is solved too, in seconds or minutes."""


class Found(NamedTuple):
    """A schedule and what it takes."""

    schedule: Schedule
    step_time: float
    """In lockstep, in the unit of the durations."""
    memory: float
    """What its slots take on each stage, in the unit of the limit."""
    num_segments: int
    """Loops that the devices compile."""


def search_schedule(
    num_stages: int,
    num_microbatches: int,
    costs: Costs,
    limit: float,
    *,
    activation: float = 1.0,
    stash: float = 1.0,
    per_segment: float = 0.0,
    path: str | Path | None = None,
) -> Found:
    """The fastest schedule of one chunk a stage that holds no more than `limit`.

    Every stage has the same slots, so a schedule takes `activation` times the most microbatches that any stage holds between
    forward and backward, plus `stash` times the most that any holds between backward and weight gradient. Weight gradients
    are apart or not, whichever is faster. Candidates are the named schedules, ZB-H1 with fewer weight gradients waiting,
    1F1B and ZB-H1 with stages on their own, and for each number of slots that fits a beam search over lockstep ticks and
    one over ticks in which each stage does one thing; of small pipelines with free messages also the exact optimum of
    tables up to 3M + 2S ticks. All are priced by `simulate.lockstep`. A larger limit never gives a slower schedule.

    Args:
        num_stages: S.
        num_microbatches: M.
        costs: durations with weight gradients apart, 0 where they cannot be; the search takes the slowest stage's for all,
            the prices are exact. A schedule that does not split backward takes `backward` and `weight` for it.
        limit: of what a stage may hold, in any unit.
        activation: what a microbatch takes from forward to backward, in that unit.
        stash: what it takes from backward to its weight gradient.
        per_segment: seconds that a step may be longer for each segment fewer, each of which is a loop to compile. Tables
            for tight limits have many, up to one a tick.
        path: where to write the schedule, if anywhere; `pipeline.schedule` takes it.

    Raises:
        InputError: a size, a cost or the limit is impossible; the sentence says the least limit that works.
    """
    if not (math.isfinite(activation) and activation > 0 and math.isfinite(stash) and stash >= 0 and per_segment >= 0):
        raise InputError(
            f"an activation of {activation}, a stash of {stash} and {per_segment} s a segment cannot be; "
            "the first must be above 0, the others 0 or more"
        )
    if not limit >= activation:
        raise InputError(
            f"a limit of {limit} holds no microbatch in flight; the least that works is {activation}, one activation on each stage"
        )

    def rated(schedule: Schedule) -> Found:
        memory = activation * residual_slots(schedule).number + stash * weight_slots(schedule).number
        return Found(schedule, lockstep(schedule, _costs_of(schedule, costs)).step_time, memory, len(schedule.segments()))

    def worth(found: Found) -> tuple[float, int, float]:
        # Rounded, for sums of the same seconds in another order differ.
        return float(f"{found.step_time + per_segment * found.num_segments:.9g}"), found.num_segments, found.memory

    splits = bool(np.any(costs.weight))
    fits = [found for found in map(rated, _named(num_stages, num_microbatches, splits)) if found.memory <= limit]
    most_residuals, most_weights = min(2 * num_stages - 1, num_microbatches), min(num_stages, num_microbatches) if splits else 0
    for residuals, weights in itertools.product(range(most_residuals, 0, -1), range(most_weights, -1, -1)):
        problem = _problem(num_stages, num_microbatches, residuals, weights, costs, per_segment)
        # With r in flight, each microbatch waits for the r-th before it to have gone through all stages and back.
        least = -(-num_microbatches // residuals) * num_stages * (problem.seconds[BACKWARD] + problem.seconds[FORWARD])
        if activation * residuals + stash * weights <= limit and all(worth(found)[0] > least for found in fits):
            fits += [rated(_beam_table(problem, one)) for one in (False, True)]
    if num_stages * num_microbatches <= EXACT and costs.hop == 0:
        for weights in {0, most_weights}:
            problem = _problem(num_stages, num_microbatches, most_residuals, weights, costs, per_segment)
            num_ticks = 3 * num_microbatches + 2 * num_stages
            table = exact_table(NAME, problem, num_ticks, limit, activation, stash if weights else None)
            fits += [rated(table)] if table else []
    best = min(fits, key=worth)
    if path is not None:
        write_schedule(best.schedule, path)
    return best


_beam_table = functools.lru_cache(maxsize=1024)(functools.partial(beam_table, NAME))


def _named(num_stages: int, num_microbatches: int, splits: bool) -> Iterator[Schedule]:
    """Schedules that need no search."""
    yield gpipe(num_stages, num_microbatches)
    yield one_forward_one_backward(num_stages, num_microbatches)
    yield laid_out(NAME, num_microbatches, 1, megatron_orders(num_stages, num_microbatches))
    if splits:
        for number in range(1, num_stages + 1):
            yield zero_bubble(num_stages, num_microbatches, number)
        yield laid_out(NAME, num_microbatches, 1, zero_bubble_orders(num_stages, num_microbatches))


def _costs_of(schedule: Schedule, costs: Costs) -> Costs:
    """The costs of a schedule that splits backward, or does not."""
    return costs if schedule.splits_weight else replace(costs, backward=np.add(costs.backward, costs.weight), weight=0.0)


def _problem(num_stages: int, num_microbatches: int, residuals: int, weights: int, costs: Costs, per_segment: float) -> Problem:
    """The problem of equal stages as slow as the slowest."""
    backward, weight, forward = (float(np.max(seconds)) for seconds in (costs.backward, costs.weight, costs.forward))
    seconds = (backward, weight, forward) if weights else (backward + weight, 0.0, forward)
    return Problem(num_stages, num_microbatches, residuals, weights, seconds, costs.hop, per_segment)
