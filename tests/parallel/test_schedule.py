"""The named schedules: their ticks, what they take in lockstep, and what they hold, against published bounds."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from giantjax.errors import InputError
from giantjax.parallel.schedule import (
    IDLE,
    KINDS,
    forward_only,
    gpipe,
    in_flight,
    interleaved,
    one_forward_one_backward,
    residual_slots,
    schedule_of_name,
    validate,
    weight_slots,
    zero_bubble,
)
from tests.parallel.tables import MAKERS, MICROBATCHES, STAGES

CHUNKS = st.integers(1, 4)


@settings(deadline=None)
@given(STAGES, MICROBATCHES)
def test_slots(num_stages, num_microbatches):
    """1F1B needs 2S - 1 slots at most, whatever M is; GPipe needs M."""
    steady, all_at_once = one_forward_one_backward(num_stages, num_microbatches), gpipe(num_stages, num_microbatches)
    assert residual_slots(steady).number == min(2 * num_stages - 1, num_microbatches)
    assert residual_slots(all_at_once).number == num_microbatches
    assert in_flight(steady).tolist() == [min(2 * (num_stages - stage) - 1, num_microbatches) for stage in range(num_stages)]
    assert in_flight(all_at_once).tolist() == [num_microbatches] * num_stages


def ticks_with(schedule) -> dict[str, int]:
    """In how many ticks each kind of work occurs: what it takes in lockstep."""
    return {kind: int((schedule.table(kind) != IDLE).any(axis=1).sum()) for kind in KINDS}


@settings(deadline=None)
@given(STAGES, MICROBATCHES, st.sampled_from(MAKERS))
def test_named_schedules_waste_no_tick(num_stages, num_microbatches, maker):
    schedule = maker(num_stages, num_microbatches)
    if schedule.name not in ("chunked", "split"):
        assert {segment.mode for segment in schedule.segments()} == {"lockstep"}
        assert all(segment.kinds for segment in schedule.segments())


@settings(deadline=None)
@given(STAGES, MICROBATCHES, CHUNKS)
def test_interleaved_takes_a_chunk_less_for_every_stage_but_one(num_stages, num_microbatches, num_chunks):
    """M + (S - 1)/C times forward and backward of all chunks: CM + S - 1 ticks of a chunk's, whether S divides M or not."""
    schedule = interleaved(num_stages, num_microbatches, num_chunks)
    validate(schedule)
    ticks = num_chunks * num_microbatches + num_stages - 1
    if num_microbatches < num_stages:
        ticks = num_chunks * num_stages + num_microbatches - 1
    assert ticks_with(schedule) == {"forward": ticks, "backward": ticks, "weight": 0}
    assert ticks <= num_chunks * (num_microbatches + num_stages - 1)


@settings(deadline=None)
@given(STAGES, st.integers(1, 8), CHUNKS)
def test_interleaved_of_whole_groups_is_the_published_one(num_stages, num_groups, num_chunks):
    """As many chunks in flight as in Megatron-LM: (C - 1)S + 2(S - 1 - s) + 1; a tick for each virtual microbatch."""
    num_microbatches = num_groups * num_stages
    schedule = interleaved(num_stages, num_microbatches, num_chunks)
    held = [(num_chunks - 1) * num_stages + 2 * (num_stages - 1 - stage) + 1 for stage in range(num_stages)]
    assert in_flight(schedule).tolist() == [min(number, num_chunks * num_microbatches) for number in held]
    for stage in range(num_stages):
        group, chunk, microbatch = np.indices((num_groups, num_chunks, num_stages)).reshape(3, -1)
        cells = chunk * num_microbatches + group * num_stages + microbatch
        assert schedule.forward[stage : stage + len(cells), stage].tolist() == cells.tolist()
        back = (num_chunks - 1 - chunk) * num_microbatches + group * num_stages + microbatch
        first = num_chunks * num_stages + num_stages - 1 - stage
        assert schedule.backward[first : first + len(cells), stage].tolist() == back.tolist()


@settings(deadline=None)
@given(STAGES, MICROBATCHES, CHUNKS)
def test_interleaved_holds_no_more_than_its_largest_group_asks_for(num_stages, num_microbatches, num_chunks):
    schedule = interleaved(num_stages, num_microbatches, num_chunks)
    num_groups = max(1, num_microbatches // num_stages)
    largest = max(num_stages, -(-num_microbatches // num_groups))
    assert residual_slots(schedule).number <= (num_chunks - 1) * largest + 2 * num_stages - 1


@settings(deadline=None)
@given(STAGES, MICROBATCHES)
def test_interleaved_of_one_chunk_is_1f1b(num_stages, num_microbatches):
    one, plain = interleaved(num_stages, num_microbatches, 1), one_forward_one_backward(num_stages, num_microbatches)
    assert all(np.array_equal(one.table(kind), plain.table(kind)) for kind in KINDS)


@settings(deadline=None)
@given(STAGES, MICROBATCHES)
def test_zero_bubble_computes_weight_gradients_on_all_stages_at_once(num_stages, num_microbatches):
    """(M + S - 1)(f + b) + M w, with as much in flight as in 1F1B and at most S more weight gradients to come."""
    schedule = zero_bubble(num_stages, num_microbatches)
    validate(schedule)
    ticks = num_microbatches + num_stages - 1
    assert ticks_with(schedule) == {"forward": ticks, "backward": ticks, "weight": num_microbatches}
    plain = one_forward_one_backward(num_stages, num_microbatches)
    assert residual_slots(schedule).number == residual_slots(plain).number
    assert weight_slots(schedule).number == min(num_stages, num_microbatches)
    # Both together.
    begun, ended = (np.cumsum(schedule.table(kind) != IDLE, axis=0) for kind in ("forward", "weight"))
    assert (begun - ended).max() <= 2 * num_stages
    # No weight gradient stands in the tick of an input gradient it needs.
    when = {action: tick for tick, action in schedule.actions()}
    assert all(tick > when[action._replace(kind="backward")] for action, tick in when.items() if action.kind == "weight")


@pytest.mark.parametrize("maker", [gpipe, one_forward_one_backward, zero_bubble, forward_only])
@pytest.mark.parametrize("sizes", [(0, 4), (4, 0)])
def test_empty_schedules_are_refused(maker, sizes):
    with pytest.raises(InputError, match=f"{sizes[0]} stages and {sizes[1]} microbatches is empty"):
        maker(*sizes)


def test_chunks_that_are_none_are_refused():
    with pytest.raises(InputError, match="2 stages of 0 chunks and 4 microbatches is empty"):
        interleaved(2, 4, 0)


def test_schedules_have_names():
    for name in ("gpipe", "1f1b", "forward-only", "zero-bubble", "interleaved"):
        assert schedule_of_name(name, 2, 3).name == name
    assert schedule_of_name("interleaved", 2, 3, 4).num_chunks == 4
    with pytest.raises(InputError, match=r"pipeline.schedule is zigzag; it must be gpipe, 1f1b, .*interleaved or a .csv file"):
        schedule_of_name("zigzag", 2, 3)
    with pytest.raises(
        InputError, match=r"pipeline.num_chunks is 2, but schedule zero-bubble has 1 chunk a stage; only interleaved has more"
    ):
        schedule_of_name("zero-bubble", 2, 3, 2)


@settings(deadline=None)
@given(STAGES, MICROBATCHES, st.integers(1, 8))
def test_zero_bubble_of_fewer_waiting_weight_gradients_lies_between(num_stages, num_microbatches, num_waiting):
    """(M + S - v) w for weight gradients, v of them waiting at most, and in step unless there is too little to do."""
    schedule = zero_bubble(num_stages, num_microbatches, num_waiting)
    validate(schedule)
    waiting = min(num_waiting, num_stages)
    assert weight_slots(schedule).number == min(waiting, num_microbatches)
    assert ticks_with(schedule)["weight"] == num_microbatches + num_stages - waiting
    if num_microbatches > waiting:
        assert {segment.mode for segment in schedule.segments()} == {"lockstep"}


def test_weight_gradients_that_do_not_wait_are_refused():
    with pytest.raises(InputError, match="0 microbatches may wait for their weight gradients; each waits a tick, so at least 1 has to"):
        zero_bubble(2, 4, 0)
