"""Where a stage keeps what it will need in a later tick: slots of buffers, assigned by liveness.

Within a tick a buffer is read before it is written, so what is written may take the slot that the tick has just read.
"""

from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Int

from giantjax.parallel.schedule_table import IDLE, Action, Schedule, dependencies


class Slots(NamedTuple):
    """The slots of one buffer, tick by tick and stage by stage."""

    number: int
    """Slots a stage needs; 0 where nothing is ever kept."""
    write: Int[np.ndarray, "K S"]
    """Slot that the tick fills; where it has nothing to keep, one that nothing is in, or IDLE where there is none."""
    read: Int[np.ndarray, "K S"]
    """Slot that the tick takes, or IDLE."""

    def of_stage(self, stage: int) -> "Slots":
        """The columns of one stage, with as many slots as it needs by itself."""
        write, read = self.write[:, [stage]], self.read[:, [stage]]
        number = int(read.max()) + 1
        return Slots(number, np.where(write < number, write, IDLE), read)


def residual_slots(schedule: Schedule) -> Slots:
    """What forward leaves for backward: written by the tick's forward action, read by its backward action.

    Some slot is free where a stage has nothing to write, in all but small 1F1B schedules and GPipe's last ticks.
    """
    return _assign(schedule.forward, schedule.backward)


def output_slots(schedule: Schedule) -> Slots:
    """What the last stage's last chunk sends to nobody, kept for the loss, which is part of its backward action; [K, 1]."""
    first = (schedule.num_chunks - 1) * schedule.num_microbatches
    forward, backward = schedule.forward[:, -1:], schedule.backward[:, -1:]
    return _assign(np.where(forward >= first, forward, IDLE), np.where(backward >= first, backward, IDLE))


def weight_slots(schedule: Schedule) -> Slots:
    """What backward leaves for the weight gradient: written by the tick's backward action, read by its weight action."""
    return _assign(schedule.backward, schedule.weight)


def inbox_slots(schedule: Schedule, kind: Literal["forward", "backward"]) -> Slots:
    """Messages that wait: what arrives in a tick is written, and read by the action that needs it in a later tick.

    A message is there in the tick after its sender's action. One that is needed in that very tick has no slot: `read` is
    IDLE where the action takes what has just arrived. So there are no slots at all in GPipe, in 1F1B, and in interleaved
    1F1B with whole groups of microbatches.
    """
    when = {action: tick for tick, action in schedule.actions() if action.kind == kind}
    arrive, use = np.full((2, *schedule.forward.shape), IDLE, np.int32)
    for action, tick in when.items():
        cell = action.chunk * schedule.num_microbatches + action.microbatch
        for sender in _senders(schedule, action):
            if when[sender] + 1 < tick:
                arrive[when[sender] + 1, action.stage] = use[tick, action.stage] = cell
    return _assign(arrive, use)


def _senders(schedule: Schedule, action: Action) -> list[Action]:
    """The action whose message `action` needs; even with a single stage, which sends to itself from chunk to chunk."""
    return [needed for needed in dependencies(schedule, action) if needed.kind == action.kind]


def _assign(begin: Int[np.ndarray, "K S"], end: Int[np.ndarray, "K S"]) -> Slots:
    """The lowest free slot for each cell, from the tick in which it stands in `begin` to that in which it stands in `end`."""
    write, read = np.full((2, *begin.shape), IDLE, np.int32)
    taken: dict[tuple[int, int], set[int]] = {}
    number = 0
    for stage in range(begin.shape[1]):
        ends = set(end[:, stage].tolist()) - {IDLE}
        held: dict[int, int] = {}
        for tick in range(len(begin)):
            begun, done = int(begin[tick, stage]), int(end[tick, stage])
            if done != IDLE:
                read[tick, stage] = held.pop(done)
            if begun in ends:
                slots = set(held.values())
                held[begun] = write[tick, stage] = next(slot for slot in range(len(held) + 1) if slot not in slots)
                number = max(number, held[begun] + 1)
            else:
                taken[tick, stage] = set(held.values())
    for place, slots in taken.items():
        write[place] = min(set(range(number)) - slots, default=IDLE)
    return Slots(number, write, read)
