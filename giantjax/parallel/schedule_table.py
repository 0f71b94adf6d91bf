"""What a pipeline schedule is: a table that can be printed, checked, simulated and drawn without a device.

A table says what each stage does in each tick. Stages move from tick to tick together: in one tick every stage runs at
most one backward action, then at most one weight-gradient action, then at most one forward action, and what it produces
travels to its neighbour at the end of the tick. An action therefore depends only on actions of earlier ticks.

The devices execute exactly these tables (`giantjax.parallel.pipeline`), and the planner prices exactly these
tables (`giantjax.parallel.simulate`).
"""

import itertools
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Int

from giantjax.errors import InputError

Kind = Literal["backward", "weight", "forward"]
Mode = Literal["lockstep", "switch"]
KINDS: tuple[Kind, ...] = ("backward", "weight", "forward")
"""In the order in which a tick runs them."""
LETTERS: dict[Kind, str] = {"forward": "F", "backward": "B", "weight": "W"}
IDLE = -1


class Action(NamedTuple):
    """One piece of work of one stage."""

    kind: Kind
    stage: int
    microbatch: int
    chunk: int = 0

    def __str__(self) -> str:
        chunk = f" of chunk {self.chunk}" if self.chunk else ""
        return f"{self.kind} of microbatch {self.microbatch}{chunk} on stage {self.stage}"


@dataclass(frozen=True, eq=False)
class Schedule:
    """Which microbatch each stage works on in each tick; K ticks, S stages.

    A cell holds `chunk * num_microbatches + microbatch`, or IDLE. A stage holds `num_chunks` chunks of the model;
    the model runs through chunk 0 of every stage, then chunk 1 of every stage, and so on.
    """

    name: str
    num_microbatches: int
    num_chunks: int
    forward: Int[np.ndarray, "K S"]
    backward: Int[np.ndarray, "K S"]
    weight: Int[np.ndarray, "K S"]
    """Where the weight gradient is an action of its own; all IDLE where backward computes it."""

    @property
    def num_ticks(self) -> int:
        """K."""
        return self.forward.shape[0]

    @property
    def num_stages(self) -> int:
        """S."""
        return self.forward.shape[1]

    @property
    def splits_weight(self) -> bool:
        """Whether weight gradients are actions of their own."""
        return bool((self.weight != IDLE).any())

    @property
    def trains(self) -> bool:
        """Whether there is a backward pass at all."""
        return bool((self.backward != IDLE).any())

    def table(self, kind: Kind) -> Int[np.ndarray, "K S"]:
        """The cells of one kind."""
        return {"forward": self.forward, "backward": self.backward, "weight": self.weight}[kind]

    def actions(self) -> list[tuple[int, Action]]:
        """(tick, action) of everything there is to do, in the order in which it happens."""
        found = []
        for tick in range(self.num_ticks):
            for kind in KINDS:
                for stage in range(self.num_stages):
                    cell = int(self.table(kind)[tick, stage])
                    if cell != IDLE:
                        chunk, microbatch = divmod(cell, self.num_microbatches)
                        found.append((tick, Action(kind, stage, microbatch, chunk)))
        return found

    def segments(self) -> list["Segment"]:
        """The longest runs of ticks of the same kinds and mode; each becomes one loop on the devices."""
        there = np.stack([self.table(kind) != IDLE for kind in KINDS], axis=2)
        occurs = np.asarray(there.any(axis=1))
        lockstep = np.asarray((there == occurs[:, None]).all(axis=2).any(axis=1))
        keys = np.column_stack([occurs, lockstep])
        starts = [0, *(np.flatnonzero((keys[1:] != keys[:-1]).any(axis=1)) + 1), self.num_ticks]
        return [
            Segment(
                int(first),
                int(stop),
                tuple(kind for kind, found in zip(KINDS, occurs[first], strict=True) if found),
                "lockstep" if lockstep[first] else "switch",
            )
            for first, stop in itertools.pairwise(starts)
        ]


class Segment(NamedTuple):
    """Ticks [first, stop) in which these kinds of work occur."""

    first: int
    stop: int
    kinds: tuple[Kind, ...]
    mode: Mode
    """`lockstep` where some stage has work of every kind, so that others lose nothing by running all kinds, to no effect,
    beside it; `switch` where each stage has to run its own cells alone, lest all take longer than any of them needs."""


def validate(schedule: Schedule) -> None:
    """Make sure that every action stands in the table once, after all it depends on.

    Raises:
        InputError: a cell holds no action, or an action is missing, doubled, or stands before what it needs; the sentence
            names it and the tick.
    """
    _check_cells(schedule)
    when: dict[Action, int] = {}
    for tick, action in schedule.actions():
        if action in when:
            raise InputError(f"schedule {schedule.name}: the {action} stands in tick {when[action]} and again in tick {tick}")
        when[action] = tick
    for action in _expected(schedule):
        if action not in when:
            raise InputError(f"schedule {schedule.name}: the {action} is missing from ticks 0 to {schedule.num_ticks - 1}")
        for needed in dependencies(schedule, action):
            if needed in when and when[needed] >= when[action]:
                order = "in the same tick as" if when[needed] == when[action] else "before"
                raise InputError(
                    f"schedule {schedule.name}: the {action} stands in tick {when[action]}, {order} the {needed} it waits for "
                    f"(tick {when[needed]})"
                )


def _check_cells(schedule: Schedule) -> None:
    """Make sure that the three tables are of one shape and that every cell is IDLE or an action there is."""
    limit = schedule.num_chunks * schedule.num_microbatches
    for kind in KINDS:
        table = schedule.table(kind)
        if table.shape != schedule.forward.shape:
            raise InputError(f"schedule {schedule.name}: the {kind} table is {table.shape}, the forward table {schedule.forward.shape}")
        for tick, stage in np.argwhere((table < IDLE) | (table >= limit)):
            raise InputError(
                f"schedule {schedule.name}: the {kind} cell of stage {stage} in tick {tick} holds {table[tick, stage]}; "
                f"cells hold {IDLE} for idle, or 0 to {limit - 1} for {schedule.num_chunks} x {schedule.num_microbatches} microbatches"
            )


def _expected(schedule: Schedule) -> list[Action]:
    """All there is to do; a schedule that has weight gradients has backward actions too, present or missing."""
    backward: list[Kind] = ["backward"] if schedule.trains or schedule.splits_weight else []
    kinds: list[Kind] = ["forward", *backward] + (["weight"] if schedule.splits_weight else [])
    return [
        Action(kind, stage, microbatch, chunk)
        for microbatch in range(schedule.num_microbatches)
        for chunk in range(schedule.num_chunks)
        for stage in range(schedule.num_stages)
        for kind in kinds
    ]


def dependencies(schedule: Schedule, action: Action) -> list[Action]:
    """The actions whose results `action` needs."""
    kind, stage, microbatch, chunk = action
    last_stage, last_chunk = schedule.num_stages - 1, schedule.num_chunks - 1
    if kind == "weight":
        return [Action("backward", stage, microbatch, chunk)]
    if kind == "forward":
        if stage > 0:
            return [Action("forward", stage - 1, microbatch, chunk)]
        return [Action("forward", last_stage, microbatch, chunk - 1)] if chunk > 0 else []
    own = [Action("forward", stage, microbatch, chunk)]
    if stage < last_stage:
        return [*own, Action("backward", stage + 1, microbatch, chunk)]
    return [*own, Action("backward", 0, microbatch, chunk + 1)] if chunk < last_chunk else own


def in_flight(schedule: Schedule) -> Int[np.ndarray, "S"]:
    """The most microbatches whose forward has run and whose backward has not, on each stage."""
    begun = np.cumsum(schedule.forward != IDLE, axis=0)
    ended = np.cumsum(schedule.backward != IDLE, axis=0)
    return (begun - ended).max(axis=0)


def text(schedule: Schedule) -> str:
    """The table as text: a line a stage, a column a tick, `F3`, `B3` and `W3` for the actions of microbatch 3, `F3.1` in chunk 1.

    Ticks are numbered, with a slash behind those in which each stage runs its own cells alone.
    """
    columns = []
    for segment in schedule.segments():
        for tick in range(segment.first, segment.stop):
            cells = []
            for stage in range(schedule.num_stages):
                found = [LETTERS[kind] + _cell_words(schedule, int(schedule.table(kind)[tick, stage])) for kind in KINDS]
                cells.append(" ".join(word for word in found if len(word) > 1))
            number = f"{tick}/" if segment.mode == "switch" else f"{tick}"
            width = max(map(len, [*cells, number]))
            columns.append([number.rjust(width)] + [cell.ljust(width) for cell in cells])
    names = ["tick", *(f"stage {stage}" for stage in range(schedule.num_stages))]
    width = max(map(len, names))
    return "\n".join(" | ".join([name.ljust(width), *(column[row] for column in columns)]).rstrip() for row, name in enumerate(names))


def _cell_words(schedule: Schedule, cell: int) -> str:
    if cell == IDLE:
        return ""
    chunk, microbatch = divmod(cell, schedule.num_microbatches)
    return f"{microbatch}" + (f".{chunk}" if schedule.num_chunks > 1 else "")
