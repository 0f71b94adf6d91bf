"""Pipeline schedules as values: tables that can be printed, checked, simulated and drawn without a device.

A table says what each stage does in each tick. Stages move in lockstep: in one tick every stage runs at most one
backward action, then at most one weight-gradient action, then at most one forward action, and what it produces
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
        """Runs of ticks in which the same kinds of work occur anywhere; each becomes one loop on the devices."""
        present = np.stack([(self.table(kind) != IDLE).any(axis=1) for kind in KINDS], axis=1)
        starts = [0, *(np.flatnonzero((present[1:] != present[:-1]).any(axis=1)) + 1), self.num_ticks]
        return [
            Segment(int(first), int(stop), tuple(kind for kind, there in zip(KINDS, present[first], strict=True) if there))
            for first, stop in itertools.pairwise(starts)
        ]


class Segment(NamedTuple):
    """Ticks [first, stop) in which these kinds of work occur."""

    first: int
    stop: int
    kinds: tuple[Kind, ...]


def gpipe(num_stages: int, num_microbatches: int) -> Schedule:
    """All forward, then all backward (Huang et al., 2019): every microbatch is in flight at once."""
    _check_sizes(num_stages, num_microbatches)
    turn = num_microbatches + num_stages - 1
    microbatch, stage = np.meshgrid(np.arange(num_microbatches), np.arange(num_stages), indexing="ij")
    return _from_ticks("gpipe", microbatch + stage, turn + microbatch + num_stages - 1 - stage)


def one_forward_one_backward(num_stages: int, num_microbatches: int) -> Schedule:
    """1F1B (Narayanan et al., 2019) in lockstep: at most 2S - 1 microbatches are in flight, whatever their number.

    Forward of microbatch m runs on stage s in tick m + s and backward in tick m + 2S - 1 - s, so that after S ticks
    of forward alone and before S ticks of backward alone every tick has both: (M + S - 1)(f + b) in all.
    """
    _check_sizes(num_stages, num_microbatches)
    microbatch, stage = np.meshgrid(np.arange(num_microbatches), np.arange(num_stages), indexing="ij")
    return _from_ticks("1f1b", microbatch + stage, microbatch + 2 * num_stages - 1 - stage)


def forward_only(num_stages: int, num_microbatches: int) -> Schedule:
    """Forward of every microbatch, for evaluation."""
    _check_sizes(num_stages, num_microbatches)
    microbatch, stage = np.meshgrid(np.arange(num_microbatches), np.arange(num_stages), indexing="ij")
    return _from_ticks("forward-only", microbatch + stage, None)


def schedule_of_name(name: str, num_stages: int, num_microbatches: int) -> Schedule:
    """The schedule that `pipeline.schedule` names.

    Raises:
        InputError: there is none of that name.
    """
    makers = {"gpipe": gpipe, "1f1b": one_forward_one_backward, "forward-only": forward_only}
    if name not in makers:
        raise InputError(f"pipeline.schedule is {name}, which this version does not have yet; it has {', '.join(makers)}")
    return makers[name](num_stages, num_microbatches)


def _check_sizes(num_stages: int, num_microbatches: int) -> None:
    if num_stages < 1 or num_microbatches < 1:
        raise InputError(f"a schedule of {num_stages} stages and {num_microbatches} microbatches is empty; each must be at least 1")


def _from_ticks(name: str, forward_at: Int[np.ndarray, "M S"], backward_at: Int[np.ndarray, "M S"] | None) -> Schedule:
    """The table in which action (m, s) stands in the tick given for it."""
    num_microbatches, num_stages = forward_at.shape
    num_ticks = int(max(forward_at.max(), -1 if backward_at is None else backward_at.max())) + 1
    forward, backward, weight = np.full((3, num_ticks, num_stages), IDLE, np.int32)
    microbatch, stage = np.indices(forward_at.shape)
    forward[forward_at, stage] = microbatch
    if backward_at is not None:
        backward[backward_at, stage] = microbatch
    return Schedule(name, num_microbatches, 1, forward, backward, weight)


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
            # Within a tick, a stage's own backward comes before its weight gradient.
            same_tick = needed.stage == action.stage and KINDS.index(needed.kind) < KINDS.index(action.kind)
            if needed in when and when[needed] >= when[action] + same_tick:
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


class Slots(NamedTuple):
    """Where a stage keeps what a forward action leaves for its backward action."""

    number: int
    """Slots a stage needs."""
    write: Int[np.ndarray, "K S"]
    """Slot that the tick's forward action fills; where there is none, one that nothing is in, or IDLE."""
    read: Int[np.ndarray, "K S"]
    """Slot that the tick's backward action takes."""

    def of_stage(self, stage: int) -> "Slots":
        """The columns of one stage, with as many slots as it needs by itself."""
        write, read = self.write[:, [stage]], self.read[:, [stage]]
        number = int(read.max()) + 1
        return Slots(number, np.where(write < number, write, IDLE), read)


def residual_slots(schedule: Schedule) -> Slots:
    """Slots by liveness: a slot is free again in the tick whose backward action has taken it.

    Backward runs before forward in a tick, so that the forward action of the same tick may fill the slot anew. Where a stage
    has nothing to do, `write` names a slot that is free, as all but small 1F1B schedules and GPipe's last ticks have.
    """
    write = np.full(schedule.forward.shape, IDLE, np.int32)
    read = np.full(schedule.forward.shape, IDLE, np.int32)
    taken: dict[tuple[int, int], set[int]] = {}
    number = 1
    for stage in range(schedule.num_stages):
        held: dict[int, int] = {}
        free: list[int] = []
        for tick in range(schedule.num_ticks):
            done = int(schedule.backward[tick, stage])
            if done != IDLE:
                read[tick, stage] = held.pop(done)
                free.append(int(read[tick, stage]))
            begun = int(schedule.forward[tick, stage])
            if begun != IDLE:
                slot = min(free, default=len(held) + len(free))
                if slot in free:
                    free.remove(slot)
                held[begun] = slot
                write[tick, stage] = slot
                number = max(number, slot + 1)
            else:
                taken[tick, stage] = set(held.values())
    for place, slots in taken.items():
        write[place] = min(set(range(number)) - slots, default=IDLE)
    return Slots(number, write, read)


def in_flight(schedule: Schedule) -> Int[np.ndarray, "S"]:
    """The most microbatches whose forward has run and whose backward has not, on each stage."""
    begun = np.cumsum(schedule.forward != IDLE, axis=0)
    ended = np.cumsum(schedule.backward != IDLE, axis=0)
    return (begun - ended).max(axis=0)


def text(schedule: Schedule) -> str:
    """The table as text: a line a stage, a column a tick, `F3` and `B3` for the actions of microbatch 3."""
    columns = []
    for tick in range(schedule.num_ticks):
        cells = []
        for stage in range(schedule.num_stages):
            found = [LETTERS[kind] + _cell_words(schedule, int(schedule.table(kind)[tick, stage])) for kind in KINDS]
            cells.append(" ".join(word for word in found if len(word) > 1))
        width = max(len(cell) for cell in [*cells, str(tick)])
        columns.append([str(tick).rjust(width)] + [cell.ljust(width) for cell in cells])
    names = ["tick", *(f"stage {stage}" for stage in range(schedule.num_stages))]
    width = max(map(len, names))
    return "\n".join(" | ".join([name.ljust(width), *(column[row] for column in columns)]).rstrip() for row, name in enumerate(names))


def _cell_words(schedule: Schedule, cell: int) -> str:
    if cell == IDLE:
        return ""
    chunk, microbatch = divmod(cell, schedule.num_microbatches)
    return f"{microbatch}" + (f".{chunk}" if schedule.num_chunks > 1 else "")
