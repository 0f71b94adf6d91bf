"""Slots: what is kept is there when it is read, in no more slots than are held at once."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from giantjax.parallel.schedule import (
    IDLE,
    Action,
    Schedule,
    Slots,
    gpipe,
    in_flight,
    inbox_slots,
    interleaved,
    one_forward_one_backward,
    output_slots,
    residual_slots,
    weight_slots,
    zero_bubble,
)
from tests.parallel.tables import MICROBATCHES, STAGES, any_tables


def check(slots: Slots, written: np.ndarray, read: np.ndarray) -> None:
    """Go through the ticks of a buffer in which `written` is put and from which `read` is taken, cells or IDLE, [K, S]."""
    most = 0
    for stage in range(written.shape[1]):
        memory = np.full(max(1, slots.number), IDLE)
        for tick in range(len(written)):
            assert (slots.read[tick, stage] == IDLE) == (read[tick, stage] == IDLE)
            if read[tick, stage] != IDLE:
                assert memory[slots.read[tick, stage]] == read[tick, stage]
                memory[slots.read[tick, stage]] = IDLE
            place = slots.write[tick, stage]
            # A stage with nothing to keep fills a slot that nothing is in.
            assert place < slots.number and (place == IDLE or memory[place] == IDLE)
            if written[tick, stage] != IDLE:
                assert place != IDLE
                memory[place] = written[tick, stage]
            elif place == IDLE:
                assert slots.number == 0 or (memory != IDLE).all()
            most = max(most, int((memory != IDLE).sum()))
    assert slots.number == most


@settings(deadline=None)
@given(any_tables)
def test_a_slot_holds_what_is_read_from_it(schedule):
    num_stages, num_microbatches = schedule.num_stages, schedule.num_microbatches
    none = np.full_like(schedule.forward, IDLE)
    check(residual_slots(schedule), schedule.forward if schedule.trains else none, schedule.backward)
    check(weight_slots(schedule), schedule.backward if schedule.splits_weight else none, schedule.weight)
    last = (schedule.num_chunks - 1) * num_microbatches
    forward, backward = (np.where(table >= last, table, IDLE)[:, -1:] for table in (schedule.forward, schedule.backward))
    check(output_slots(schedule), forward if schedule.trains else none[:, -1:], backward)
    if schedule.trains:
        assert residual_slots(schedule).number == in_flight(schedule).max()
        own = residual_slots(schedule).of_stage(num_stages - 1)
        check(own, schedule.forward[:, -1:], schedule.backward[:, -1:])
        assert own.number == in_flight(schedule)[-1]


def messages(schedule: Schedule, kind: str) -> list[tuple[int, int, Action]]:
    """(tick after the sender's action, tick of the receiver's, the receiver's action) of all results passed on."""
    when = {action: tick for tick, action in schedule.actions()}
    found = []
    for action, tick in when.items():
        if action.kind == kind:
            places = schedule.num_stages * schedule.num_chunks
            place = action.chunk * schedule.num_stages + action.stage - (1 if kind == "forward" else -1)
            if 0 <= place < places:
                chunk, stage = divmod(place, schedule.num_stages)
                found.append((when[action._replace(stage=stage, chunk=chunk)] + 1, tick, action))
    return found


@settings(deadline=None)
@given(any_tables)
def test_messages_that_wait_have_slots_and_others_have_none(schedule):
    for kind in ("forward", "backward"):
        arrive, use = np.full((2, *schedule.forward.shape), IDLE)
        for there, needed, action in messages(schedule, kind):
            if there < needed:
                cell = action.chunk * schedule.num_microbatches + action.microbatch
                arrive[there, action.stage] = use[needed, action.stage] = cell
        check(inbox_slots(schedule, kind), arrive, use)


@settings(deadline=None)
@given(STAGES, MICROBATCHES, st.integers(1, 6), st.integers(1, 4))
def test_no_message_waits_in_schedules_of_whole_groups(num_stages, num_microbatches, num_groups, num_chunks):
    whole = interleaved(num_stages, num_stages * num_groups, num_chunks)
    few = interleaved(num_stages, min(num_microbatches, num_stages), num_chunks)
    plain = [maker(num_stages, num_microbatches) for maker in (gpipe, one_forward_one_backward, zero_bubble)]
    for schedule in (whole, few, *plain):
        for kind in ("forward", "backward"):
            slots = inbox_slots(schedule, kind)
            assert slots.number == 0
            assert (slots.write == IDLE).all() and (slots.read == IDLE).all()


@settings(deadline=None)
@given(STAGES, MICROBATCHES, st.integers(1, 4))
def test_no_more_messages_wait_than_the_largest_group_has_above_the_stages(num_stages, num_microbatches, num_chunks):
    schedule = interleaved(num_stages, num_microbatches, num_chunks)
    largest = -(-num_microbatches // max(1, num_microbatches // num_stages))
    for kind in ("forward", "backward"):
        assert inbox_slots(schedule, kind).number <= max(0, largest - num_stages)


def test_messages_between_chunks_of_a_large_group_wait():
    """Two stages and a group of three: chunk 1 begins a tick after the first result of chunk 0 is there."""
    slots = inbox_slots(interleaved(2, 3, 2), "forward")
    assert slots.number == 1
    # Results of stage 1 from ticks 1 to 3 arrive in 2 to 4, and are needed in 3 to 5; each takes the place of the last.
    assert slots.read[:6, 0].tolist() == [IDLE, IDLE, IDLE, 0, 0, 0]
    assert slots.write[2:5, 0].tolist() == [0, 0, 0]


def test_steady_1f1b_always_has_a_slot_to_write_to():
    for num_stages in range(1, 9):
        schedule = one_forward_one_backward(num_stages, 2 * num_stages)
        slots = residual_slots(schedule)
        forward = [segment for segment in schedule.segments() if "forward" in segment.kinds]
        assert all((slots.write[segment.first : segment.stop] != IDLE).all() for segment in forward)
        for own in (slots.of_stage(num_stages - 1), output_slots(schedule)):
            assert all((own.write[segment.first : segment.stop] != IDLE).all() for segment in forward)
