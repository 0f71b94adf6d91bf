"""What the executor reads of a schedule, tick by tick: cells, slots of buffers, and runs of ticks that do the same."""

import itertools
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from giantjax.parallel.schedule import IDLE, KINDS, Kind, Mode, Schedule, Slots, inbox_slots, output_slots, residual_slots, weight_slots


class Run(NamedTuple):
    """Ticks [first, stop) with one loop body."""

    first: int
    stop: int
    kinds: tuple[Kind, ...]
    mode: Mode
    delivers: bool
    """Whether forward results hop at the beginning of each tick."""
    shares_head: bool
    """Whether all stages compute a microbatch's loss together."""
    always: frozenset[str]
    """The buffers that have a slot to write to in each tick, on each stage."""


@dataclass(frozen=True, eq=False)
class Ticks:
    """A schedule as the executor runs it; made by `ticks_of`."""

    schedule: Schedule
    slots: dict[str, Slots]
    """Of each buffer: `residuals`, `stash`, `outputs`, `inbox forward`, `inbox backward`."""
    columns: dict[str, Int[np.ndarray, "K S"]]
    """Cells of each kind; `residuals write` and `residuals read` and so on; [K, 1] for what is the same on all stages."""
    branches: tuple[tuple[Kind, ...], ...]
    """The sets of kinds that a stage's cells of one tick hold; column `branch` numbers them."""
    runs: tuple[Run, ...]


def ticks_of(schedule: Schedule, shares_head: bool) -> Ticks:
    """The tables of `schedule`; with `shares_head` its backward actions are one tick later.

    Then the last stage's result goes to all stages at the beginning of the tick after, and the cotangents of all come back
    at its end.
    """
    head = np.full((schedule.num_ticks, 1), IDLE, np.int32)
    if shares_head:
        schedule = _backward_later(schedule)
        head = _later(_model_ends(schedule))
    slots = {"inbox forward": inbox_slots(schedule, "forward"), "inbox backward": inbox_slots(schedule, "backward")}
    if schedule.trains:
        ready = replace(schedule, forward=_later(schedule.forward)) if shares_head else schedule
        slots |= {"residuals": residual_slots(schedule), "outputs": output_slots(ready)}
    if schedule.splits_weight:
        slots["stash"] = weight_slots(schedule)
    slots = {name: found for name, found in slots.items() if found.number}
    columns: dict[str, Int[np.ndarray, "K S"]] = {kind: schedule.table(kind) for kind in KINDS}
    for name, found in slots.items():
        columns |= {f"{name} write": found.write, f"{name} read": found.read}
    there = np.stack([schedule.table(kind) != IDLE for kind in KINDS], -1)
    flags = [flags for flags in itertools.product((False, True), repeat=len(KINDS)) if (there == flags).all(-1).any()]
    columns["branch"] = np.argmax([(there == found).all(-1) for found in flags], axis=0).astype(np.int32)
    columns["head"] = head
    branches = tuple(tuple(itertools.compress(KINDS, found)) for found in flags)
    return Ticks(schedule, slots, columns, branches, _runs(schedule, slots, head))


def _later(table: Int[np.ndarray, "K S"]) -> Int[np.ndarray, "K S"]:
    """The table one tick later; its last row must be empty."""
    return np.roll(table, 1, axis=0)


def _backward_later(schedule: Schedule) -> Schedule:
    """The schedule with an empty tick at its end, and backward and weight actions one tick later."""
    empty = np.full((1, schedule.num_stages), IDLE, np.int32)
    forward, backward, weight = (np.concatenate([table, empty]) for table in (schedule.forward, schedule.backward, schedule.weight))
    return replace(schedule, forward=forward, backward=_later(backward), weight=_later(weight))


def _model_ends(schedule: Schedule) -> Int[np.ndarray, "K 1"]:
    """The microbatch whose last chunk runs forward on the last stage."""
    first = (schedule.num_chunks - 1) * schedule.num_microbatches
    cells = schedule.forward[:, -1:]
    return np.where(cells >= first, cells - first, IDLE)


def _runs(schedule: Schedule, slots: dict[str, Slots], head: Int[np.ndarray, "K 1"]) -> tuple[Run, ...]:
    forward = schedule.forward != IDLE
    # Every forward result but those that end the model is received in the tick after.
    sent = forward.sum(axis=1) > (_model_ends(schedule) != IDLE)[:, 0]
    delivers = forward.any(axis=1)
    delivers[1:] |= sent[:-1]
    runs = []
    for segment in schedule.segments():
        first = segment.first
        marks = zip(delivers[first : segment.stop].tolist(), (head[first : segment.stop, 0] != IDLE).tolist(), strict=True)
        for (delivers_here, shares_here), ticks in itertools.groupby(marks):
            stop = first + len(list(ticks))
            always = frozenset(name for name, found in slots.items() if (found.write[first:stop] != IDLE).all())
            runs.append(Run(first, stop, segment.kinds, segment.mode, delivers_here, shares_here, always))
            first = stop
    return tuple(runs)
