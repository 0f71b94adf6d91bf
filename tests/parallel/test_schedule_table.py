"""Tables: what `validate` refuses, how they are cut and printed."""

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from giantjax.errors import InputError
from giantjax.parallel.schedule import IDLE, KINDS, Action, Schedule, dependencies, gpipe, one_forward_one_backward, text, validate
from tests.parallel.tables import ALONE, MAKERS, MICROBATCHES, STAGES, any_tables, chunked, split


@settings(deadline=None)
@given(STAGES, MICROBATCHES, st.sampled_from(MAKERS))
def test_each_action_stands_once_and_after_what_it_needs(num_stages, num_microbatches, maker):
    schedule = maker(num_stages, num_microbatches)
    validate(schedule)
    when = {action: tick for tick, action in schedule.actions()}
    kinds = 1 + schedule.trains + schedule.splits_weight
    assert len(schedule.actions()) == len(when) == kinds * schedule.num_chunks * num_stages * num_microbatches
    for action, tick in when.items():
        for needed in dependencies(schedule, action):
            assert when[needed] < tick


def is_valid(schedule: Schedule) -> bool:
    """What `validate` has to find out, said in another way: from when each microbatch is where in the model."""
    number, stages = schedule.num_chunks * schedule.num_microbatches, np.arange(schedule.num_stages)
    when = {}
    for kind in KINDS:
        table = schedule.table(kind)
        optional = kind == "weight" or (kind == "backward" and not schedule.splits_weight)
        if optional and (table == IDLE).all():
            continue
        if any(sorted(column[column != IDLE]) != list(range(number)) for column in table.T):
            return False
        # In ticks, [microbatch, place in the model].
        ticks = np.stack([np.argsort(table[:, stage], kind="stable")[-number:] for stage in stages], axis=1)
        when[kind] = ticks.reshape(schedule.num_chunks, schedule.num_microbatches, -1).swapaxes(0, 1).reshape(schedule.num_microbatches, -1)
    good = (np.diff(when["forward"]) > 0).all()
    if "backward" in when:
        good &= (np.diff(when["backward"]) < 0).all() and (when["backward"] > when["forward"]).all()
    if "weight" in when:
        good &= (when["weight"] > when["backward"]).all()
    return bool(good)


def changed(schedule: Schedule, kind: str, table: np.ndarray) -> Schedule:
    tables: dict[str, Any] = {kind: table}
    return dataclasses.replace(schedule, **tables)


@st.composite
def mutations(draw: st.DrawFn) -> tuple[Schedule, Schedule]:
    """A valid table, and one with something dropped, doubled, swapped, moved or put out of range."""
    schedule = draw(st.sampled_from([gpipe, one_forward_one_backward, chunked, split]))(draw(st.integers(1, 5)), draw(st.integers(1, 8)))
    kind = draw(st.sampled_from([kind for kind in KINDS if (schedule.table(kind) != IDLE).any()]))
    table = schedule.table(kind).copy()
    tick, other = draw(st.tuples(*2 * [st.integers(0, schedule.num_ticks - 1)]))
    stage = draw(st.integers(0, schedule.num_stages - 1))
    match draw(st.sampled_from(["set", "copy", "swap", "swap ticks", "shift a stage", "shift"])):
        case "set":
            table[tick, stage] = draw(st.integers(-3, schedule.num_chunks * schedule.num_microbatches + 2))
        case "copy":
            table[tick, stage] = table[other, stage]
        case "swap":
            table[[tick, other], stage] = table[[other, tick], stage]
        case "swap ticks":
            table[[tick, other]] = table[[other, tick]]
        case "shift a stage":
            table[:, stage] = np.roll(table[:, stage], draw(st.integers(-3, 3)))
        case "shift":
            table = np.roll(table, draw(st.integers(-3, 3)), axis=0)
    return schedule, changed(schedule, kind, table)


@settings(deadline=None, max_examples=300)
@given(mutations())
def test_what_is_wrong_is_refused_and_nothing_else(mutation):
    before, after = mutation
    assert is_valid(before)
    if is_valid(after):
        validate(after)
        return
    with pytest.raises(
        InputError, match=r"(forward|backward|weight) (of microbatch \d|cell).* on stage \d.*tick|cell of stage \d in tick \d"
    ):
        validate(after)


@st.composite
def action_of_table(draw: st.DrawFn) -> tuple[Schedule, int, Action]:
    """A table of two microbatches or more, and one of its actions with the tick it stands in."""
    maker = draw(st.sampled_from([gpipe, one_forward_one_backward, chunked, split]))
    schedule = maker(draw(st.integers(1, 8)), draw(st.integers(2, 16)))
    return (schedule, *draw(st.sampled_from(schedule.actions())))


def cell_of(schedule: Schedule, action: Action) -> int:
    return action.chunk * schedule.num_microbatches + action.microbatch


@settings(deadline=None, max_examples=100)
@given(action_of_table())
def test_a_dropped_action_is_named(case):
    schedule, tick, action = case
    table = schedule.table(action.kind).copy()
    table[tick, action.stage] = IDLE
    with pytest.raises(InputError, match=f"the {action} is missing from ticks 0 to {schedule.num_ticks - 1}$"):
        validate(changed(schedule, action.kind, table))


@settings(deadline=None, max_examples=100)
@given(action_of_table(), st.data())
def test_a_doubled_action_is_named_with_both_ticks(case, data):
    schedule, tick, action = case
    table = schedule.table(action.kind).copy()
    idle = np.flatnonzero(table[:, action.stage] == IDLE).tolist()
    assume(idle)
    again = data.draw(st.sampled_from(idle))
    table[again, action.stage] = cell_of(schedule, action)
    first, second = sorted([tick, again])
    with pytest.raises(InputError, match=f"the {action} stands in tick {first} and again in tick {second}$"):
        validate(changed(schedule, action.kind, table))


@settings(deadline=None, max_examples=100)
@given(action_of_table(), st.one_of(st.integers(-100, -2), st.integers(0, 100)))
def test_a_cell_out_of_range_is_named(case, beyond):
    schedule, tick, action = case
    cell = beyond if beyond < 0 else beyond + schedule.num_chunks * schedule.num_microbatches
    table = schedule.table(action.kind).copy()
    table[tick, action.stage] = cell
    with pytest.raises(InputError, match=f"the {action.kind} cell of stage {action.stage} in tick {tick} holds {cell};"):
        validate(changed(schedule, action.kind, table))


@settings(deadline=None, max_examples=100)
@given(st.integers(1, 8), st.integers(1, 16), st.data())
@example(1, 1, None)
def test_swapped_ticks_of_1f1b_are_refused(num_stages, num_microbatches, data):
    """Every tick but the last has an action that one of the next tick waits for."""
    schedule = one_forward_one_backward(num_stages, num_microbatches)
    choice = st.integers(0, schedule.num_ticks - 1)
    ticks = data.draw(st.tuples(choice, choice)) if data else (0, 1)
    assume(ticks[0] != ticks[1])
    tables = np.stack([schedule.forward, schedule.backward])
    tables[:, ticks] = tables[:, ticks[::-1]]
    with pytest.raises(InputError, match=r"stands in tick \d+, (before|in the same tick as) the .* it waits for \(tick \d+\)"):
        validate(dataclasses.replace(schedule, forward=tables[0], backward=tables[1]))


def test_backward_before_its_forward_is_refused():
    schedule = one_forward_one_backward(1, 2)
    early = changed(schedule, "backward", np.roll(schedule.backward, -1, axis=0))
    with pytest.raises(
        InputError,
        match=r"^schedule 1f1b: the backward of microbatch 0 on stage 0 stands in tick 0, in the same tick as "
        r"the forward of microbatch 0 on stage 0 it waits for \(tick 0\)$",
    ):
        validate(early)


def test_weight_gradients_without_backward_are_refused():
    schedule = split(2, 2)
    bare = changed(schedule, "backward", np.full_like(schedule.backward, IDLE))
    with pytest.raises(InputError, match="backward of microbatch 0 on stage 0 is missing"):
        validate(bare)


def test_tables_of_two_sizes_are_refused():
    schedule = gpipe(2, 2)
    with pytest.raises(InputError, match=r"the weight table is \(3, 2\), the forward table \(6, 2\)"):
        validate(changed(schedule, "weight", schedule.weight[:3]))


@settings(deadline=None)
@given(any_tables)
def test_segments_are_the_longest_runs_of_the_same_kinds_and_mode(schedule):
    segments = schedule.segments()
    assert [segment.first for segment in segments] == [0, *(segment.stop for segment in segments[:-1])]
    assert segments[-1].stop == schedule.num_ticks
    for segment in segments:
        for tick in range(segment.first, segment.stop):
            there = [{kind for kind in KINDS if schedule.table(kind)[tick, stage] != IDLE} for stage in range(schedule.num_stages)]
            assert segment.kinds == tuple(kind for kind in KINDS if kind in set().union(*there))
            # The busiest stage has as many kinds of work as there are, or each runs its own alone.
            assert segment.mode == ("lockstep" if max(map(len, there)) == len(segment.kinds) else "switch")
    assert all(left[2:] != right[2:] for left, right in itertools.pairwise(segments))


def test_stages_that_do_one_thing_each_are_switched():
    """In tick 3 one stage goes backward while the other goes forward."""
    validate(ALONE)
    assert ALONE.segments() == [
        (0, 2, ("forward",), "lockstep"),
        (2, 3, ("backward",), "lockstep"),
        (3, 4, ("backward", "forward"), "switch"),
        (4, 6, ("backward",), "lockstep"),
    ]


@settings(deadline=None)
@given(STAGES, MICROBATCHES)
def test_segments_of_1f1b_fill_repeat_and_drain(num_stages, num_microbatches):
    fill, *repeat, drain = one_forward_one_backward(num_stages, num_microbatches).segments()
    assert fill == (0, num_stages, ("forward",), "lockstep")
    both = num_stages + num_microbatches - 1
    assert repeat == ([(num_stages, both, ("backward", "forward"), "lockstep")] if num_microbatches > 1 else [])
    assert drain == (both, both + num_stages, ("backward",), "lockstep")
    assert [segment.kinds for segment in gpipe(num_stages, num_microbatches).segments()] == [("forward",), ("backward",)]
    assert split(2, 4).segments()[2].kinds == ("backward", "weight", "forward")


def test_text_of_1f1b():
    assert text(one_forward_one_backward(2, 3)).splitlines() == [
        "tick    |  0 |  1 |     2 |     3 |  4 |  5",
        "stage 0 | F0 | F1 | F2    | B0    | B1 | B2",
        "stage 1 |    | F0 | B0 F1 | B1 F2 | B2 |",
    ]


def test_text_shows_chunks_weight_gradients_and_switch_ticks():
    assert text(chunked(1, 1)).splitlines() == [
        "tick    |    0 |    1 |    2 |    3",
        "stage 0 | F0.0 | F0.1 | B0.1 | B0.0",
    ]
    assert text(ALONE).splitlines() == [
        "tick    |  0 |  1 |  2 | 3/ |  4 |  5",
        "stage 0 | F0 | F1 |    | B0 |    | B1",
        "stage 1 |    | F0 | B0 | F1 | B1 |",
    ]
    assert text(split(1, 2)).splitlines() == [
        "tick    |  0 |     1 |     2 |  3",
        "stage 0 | F0 | B0 F1 | B1 W0 | W1",
    ]


@settings(deadline=None, max_examples=50)
@given(any_tables)
def test_text_lines_up_and_shows_every_action(schedule):
    lines = [line.split("|") for line in text(schedule).splitlines()]
    assert len(lines) == schedule.num_stages + 1
    assert {len(line) for line in lines} == {schedule.num_ticks + 1}
    assert all(len({len(cell) for cell in column}) == 1 for column in zip(*(line[:-1] for line in lines), strict=True))
    assert sum(len(cell.split()) for line in lines[1:] for cell in line[1:]) == len(schedule.actions())
