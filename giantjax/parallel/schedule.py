"""Pipeline schedules by name, as tables that the executor runs, the simulator prices and a file can hold.

The devices execute exactly these tables (`giantjax.parallel.pipeline`), and the planner prices exactly these tables
(`giantjax.parallel.simulate`). What a table is, `giantjax.parallel.schedule_table` says; its names can be had from here.
"""

import numpy as np
from jaxtyping import Int

from giantjax.errors import InputError, did_you_mean
from giantjax.parallel.schedule_file import read_schedule
from giantjax.parallel.schedule_table import (
    IDLE,
    KINDS,
    LETTERS,
    Action,
    Kind,
    Mode,
    Schedule,
    Segment,
    dependencies,
    in_flight,
    text,
    validate,
)
from giantjax.parallel.slots import Slots, inbox_slots, output_slots, residual_slots, weight_slots

__all__ = [
    "IDLE",
    "KINDS",
    "LETTERS",
    "Action",
    "Kind",
    "Mode",
    "Schedule",
    "Segment",
    "Slots",
    "dependencies",
    "forward_only",
    "gpipe",
    "in_flight",
    "inbox_slots",
    "interleaved",
    "one_forward_one_backward",
    "output_slots",
    "residual_slots",
    "schedule_of_name",
    "text",
    "validate",
    "weight_slots",
    "zero_bubble",
]


def gpipe(num_stages: int, num_microbatches: int) -> Schedule:
    """All forward, then all backward (Huang et al., 2019): every microbatch is in flight at once."""
    _check_sizes(num_stages, num_microbatches)
    turn = num_microbatches + num_stages - 1
    microbatch, stage = np.indices((num_microbatches, num_stages))
    return _from_ticks("gpipe", microbatch + stage, turn + microbatch + num_stages - 1 - stage)


def one_forward_one_backward(num_stages: int, num_microbatches: int) -> Schedule:
    """1F1B (Narayanan et al., 2019) in lockstep: at most 2S - 1 microbatches are in flight, whatever their number.

    Forward of microbatch m runs on stage s in tick m + s and backward in tick m + 2S - 1 - s, so that after S ticks
    of forward alone and before S ticks of backward alone every tick has both: (M + S - 1)(f + b) in all.
    """
    _check_sizes(num_stages, num_microbatches)
    microbatch, stage = np.indices((num_microbatches, num_stages))
    return _from_ticks("1f1b", microbatch + stage, microbatch + 2 * num_stages - 1 - stage)


def interleaved(num_stages: int, num_microbatches: int, num_chunks: int) -> Schedule:
    """Interleaved 1F1B (Narayanan et al., 2021) in lockstep: the ramps cost what one chunk costs, not a whole stage.

    Microbatches go through the chunks in groups of S: a group's chunk 0, then its chunk 1, and so on, backward the other
    way round. The k-th forward action runs on stage s in tick k + s and the k-th backward action in tick
    CS + k + S - 1 - s, so every result is needed in the tick it arrives. The step takes (M + (S - 1)/C)(f + b), f and b
    being those of all C chunks, and at most CS + S - 1 chunks are in flight, the activations of S + (S - 1)/C microbatches.

    Where S does not divide M, the groups are as few and as equal as groups of at least S can be. The step takes as
    long, but messages between chunks wait, and as many more chunks are in flight as C - 1 times what the largest
    group has above S. Fewer microbatches than stages leave gaps in the table: CS + M - 1 ticks of f/C and of b/C.
    """
    _check_sizes(num_stages, num_microbatches, num_chunks)
    groups = np.array_split(np.arange(num_microbatches), max(1, num_microbatches // num_stages))
    # Of each microbatch's group: its first microbatch, and how many actions it takes to the same microbatch's next chunk.
    first = np.concatenate([np.full(len(group), group[0]) for group in groups])
    turn = np.maximum(np.concatenate([np.full(len(group), len(group)) for group in groups]), num_stages)
    chunk, microbatch, stage = np.indices((num_chunks, num_microbatches, num_stages))
    number = num_chunks * first[microbatch] + microbatch - first[microbatch]
    forward_at = number + chunk * turn[microbatch] + stage
    begin = (num_chunks - 1) * turn.max() + num_stages
    backward_at = begin + number + (num_chunks - 1 - chunk) * turn[microbatch] + num_stages - 1 - stage
    return _from_ticks("interleaved", forward_at, backward_at)


def zero_bubble(num_stages: int, num_microbatches: int, num_waiting: int | None = None) -> Schedule:
    """ZB-H1 (Qi et al., 2023) in lockstep: 1F1B whose weight gradients are computed apart, on all stages in the same ticks.

    Backward computes the gradient of its input alone. The weight gradient of microbatch m runs in tick m + 2S, one after
    stage 0, the last of all, has its input gradient: (M + S - 1)(f + b) + M w in all, which no table without switch ticks
    betters. A weight gradient that fell into other ticks on one stage than on another would be waited for twice.

    As many microbatches as in 1F1B wait for backward, and at most S for their weight gradient, these on the last stage:
    with both counted, at most 2S. With `num_waiting` v below S no more than v wait, and weight gradients take M + S - v
    ticks: what lies between 1F1B and this.
    """
    _check_sizes(num_stages, num_microbatches)
    if num_waiting is not None and num_waiting < 1:
        raise InputError(f"{num_waiting} microbatches may wait for their weight gradients; each waits a tick, so at least 1 has to")
    microbatch, stage = np.indices((num_microbatches, num_stages))
    forward_at, backward_at = microbatch + stage, microbatch + 2 * num_stages - 1 - stage
    weight_at = backward_at + np.minimum(stage + 1, num_waiting or num_stages)
    return _from_ticks("zero-bubble", forward_at, backward_at, weight_at)


def forward_only(num_stages: int, num_microbatches: int, num_chunks: int = 1) -> Schedule:
    """Forward of every microbatch, for evaluation."""
    whole = interleaved(num_stages, num_microbatches, num_chunks)
    num_ticks = int(np.flatnonzero((whole.forward != IDLE).any(axis=1))[-1]) + 1
    idle = np.full((num_ticks, num_stages), IDLE, np.int32)
    return Schedule("forward-only", num_microbatches, num_chunks, whole.forward[:num_ticks], idle, idle)


def schedule_of_name(name: str, num_stages: int, num_microbatches: int, num_chunks: int = 1) -> Schedule:
    """The schedule that `pipeline.schedule` names.

    What a file comes to, `giantjax.parallel.schedule_file` says.

    Raises:
        InputError: there is none of that name, or it is for other stages, microbatches or chunks.
    """
    if name.endswith(".csv"):
        return _of_file(name, num_stages, num_microbatches, num_chunks)
    if name == "interleaved":
        return interleaved(num_stages, num_microbatches, num_chunks)
    makers = {"gpipe": gpipe, "1f1b": one_forward_one_backward, "zero-bubble": zero_bubble, "forward-only": forward_only}
    if name not in makers:
        names = [*makers, "interleaved"]
        raise InputError(f"pipeline.schedule is {name}; it must be {', '.join(names)} or a .csv file{did_you_mean(name, names)}")
    if num_chunks != 1:
        raise InputError(f"pipeline.num_chunks is {num_chunks}, but schedule {name} has 1 chunk a stage; only interleaved has more")
    return makers[name](num_stages, num_microbatches)


def _of_file(path: str, num_stages: int, num_microbatches: int, num_chunks: int) -> Schedule:
    schedule = read_schedule(path)
    for found, given, what, field in (
        (schedule.num_stages, num_stages, "stages (rows)", "mesh.pipe"),
        (schedule.num_chunks, num_chunks, "chunks on each stage", "pipeline.num_chunks"),
        (schedule.num_microbatches, num_microbatches, "microbatches", "pipeline.num_microbatches"),
    ):
        if found != given:
            raise InputError(f"pipeline.schedule is {path}, a schedule of {found} {what}, but {field} is {given}")
    if not schedule.trains:
        raise InputError(f"pipeline.schedule is {path}, a schedule of forward actions alone, which trains nothing")
    return schedule


def _check_sizes(num_stages: int, num_microbatches: int, num_chunks: int = 1) -> None:
    if min(num_stages, num_microbatches, num_chunks) < 1:
        chunks = "" if num_chunks == 1 else f" of {num_chunks} chunks"
        raise InputError(f"a schedule of {num_stages} stages{chunks} and {num_microbatches} microbatches is empty; each must be at least 1")


def _from_ticks(
    name: str,
    forward_at: Int[np.ndarray, "*C M S"],
    backward_at: Int[np.ndarray, "*C M S"] | None = None,
    weight_at: Int[np.ndarray, "*C M S"] | None = None,
) -> Schedule:
    """The table in which each action of (chunk, if there are several, microbatch, stage) stands in the tick given for it."""
    num_microbatches, num_stages = forward_at.shape[-2:]
    given = [ticks for ticks in (forward_at, backward_at, weight_at) if ticks is not None]
    tables = np.full((3, max(int(ticks.max()) for ticks in given) + 1, num_stages), IDLE, np.int32)
    cell, stage = np.indices((forward_at.size // num_stages, num_stages))
    for table, ticks in zip(tables, given, strict=False):
        table[ticks.reshape(cell.shape), stage] = cell
    return Schedule(name, num_microbatches, len(cell) // num_microbatches, *tables)
