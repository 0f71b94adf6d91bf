"""Simulated timelines against formulas, and against what every execution has to obey."""

import itertools
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from giantjax.errors import InputError
from giantjax.parallel.orders import megatron_orders, table_orders
from giantjax.parallel.schedule import (
    IDLE,
    KINDS,
    Action,
    Schedule,
    dependencies,
    forward_only,
    gpipe,
    in_flight,
    one_forward_one_backward,
)
from giantjax.parallel.simulate import Costs, Link, Sends, asynchronous, lockstep
from giantjax.parallel.timeline import Timeline
from tests.parallel.tables import ALONE, MICROBATCHES, STAGES, any_tables, chunked, split

FEW = st.integers(1, 12)
SECONDS = st.floats(0.1, 10)
EXACT = 1e-12
"""Relative: what summing some hundred durations in fp64 may cost."""


def slow(seconds: float) -> Link:
    """A link that takes `seconds` for each message, whatever its size."""
    return Link(seconds, 1e9)


def runs(schedule: Schedule, costs: Costs) -> list[Timeline]:
    """The schedule in every way it can be run."""
    orders = [None] + ([megatron_orders(schedule.num_stages, schedule.num_microbatches)] if schedule.name in ("1f1b", "gpipe") else [])
    both: tuple[Sends, ...] = ("overlap", "block")
    ways = itertools.product(orders, both)
    return [lockstep(schedule, costs), *(asynchronous(schedule, costs, order, sends) for order, sends in ways)]


@st.composite
def workloads(draw: st.DrawFn) -> tuple[Schedule, Costs]:
    """A schedule with durations that differ from stage to stage, on a link of any speed."""
    schedule = draw(any_tables)
    shape = (schedule.num_stages, schedule.num_chunks)
    durations = [draw(st.lists(SECONDS, min_size=shape[0] * shape[1], max_size=shape[0] * shape[1])) for _ in KINDS]
    forward, backward, weight = (np.reshape(seconds, shape) for seconds in durations)
    link = draw(st.none() | st.builds(Link, st.floats(0, 5), st.floats(1, 100)))
    return schedule, Costs(forward, backward, weight if schedule.splits_weight else 0.0, link, draw(st.floats(0, 100)))


@settings(deadline=None, max_examples=50)
@given(workloads())
def test_every_run_does_everything_once_and_waits_for_what_it_needs(workload):
    schedule, costs = workload
    expected = sorted(action for _, action in schedule.actions())
    durations = costs.durations(schedule)
    for timeline in runs(schedule, costs):
        event_of = {event.action: event for event in timeline.events}
        transfer_of = {transfer.action: transfer for transfer in timeline.transfers}
        assert sorted(event.action for event in timeline.events) == expected
        assert len(timeline.transfers) == len(transfer_of)
        for action, start, end in timeline.events:
            assert end - start == pytest.approx(durations[action.kind][action.stage, action.chunk], rel=EXACT, abs=1e-9)
            assert end <= timeline.step_time
            for needed in dependencies(schedule, action):
                arrived = event_of[needed].end
                if needed.stage != action.stage:
                    assert arrived <= transfer_of[needed].start
                    assert transfer_of[needed].receiver == action.stage
                    arrived = transfer_of[needed].end
                assert arrived <= start
        for stage in range(schedule.num_stages):
            own = [event for event in timeline.events if event.stage == stage]
            assert all(before.end <= after.start for before, after in itertools.pairwise(own))


@settings(deadline=None, max_examples=50)
@given(workloads())
def test_a_wire_carries_one_message_at_a_time(workload):
    schedule, costs = workload
    for timeline in runs(schedule, costs):
        for transfer in timeline.transfers:
            assert transfer.end - transfer.start == pytest.approx(costs.hop, abs=1e-9)
            assert 0 <= transfer.exposed <= costs.hop * (1 + 1e-9) + 1e-9
        wires = {(transfer.sender, transfer.receiver) for transfer in timeline.transfers}
        for wire in wires:
            used = [transfer for transfer in timeline.transfers if (transfer.sender, transfer.receiver) == wire]
            assert all(before.end <= after.start for before, after in itertools.pairwise(used))


@settings(deadline=None, max_examples=50)
@given(workloads())
def test_lockstep_adds_what_the_busiest_stage_of_each_tick_takes(workload):
    schedule, costs = workload
    durations, work = costs.durations(schedule), 0.0
    for segment in schedule.segments():
        for tick in range(segment.first, segment.stop):
            busy = np.zeros(schedule.num_stages)
            for kind in segment.kinds:
                for stage, cell in enumerate(schedule.table(kind)[tick]):
                    if segment.mode == "lockstep":
                        busy[stage] += durations[kind].max()
                    elif cell != IDLE:
                        busy[stage] += durations[kind][stage, cell // schedule.num_microbatches]
            work += busy.max()
    timeline = lockstep(schedule, costs)
    assert timeline.step_time == pytest.approx(work + timeline.exposed_transfer, rel=EXACT)
    free = lockstep(schedule, Costs(costs.forward, costs.backward, costs.weight))
    assert free.step_time == pytest.approx(work, rel=EXACT)
    assert free.exposed_transfer == 0


@settings(deadline=None, max_examples=50)
@given(STAGES, MICROBATCHES, SECONDS, SECONDS, st.sampled_from([gpipe, one_forward_one_backward]))
def test_lockstep_of_equal_stages_has_the_textbook_bubble(num_stages, num_microbatches, forward, backward, maker):
    timeline = lockstep(maker(num_stages, num_microbatches), Costs(forward, backward))
    turns = num_microbatches + num_stages - 1
    assert timeline.step_time == pytest.approx(turns * (forward + backward), rel=EXACT)
    assert timeline.bubble_by_stage == pytest.approx(num_stages * [(num_stages - 1) / turns], rel=EXACT, abs=EXACT)
    assert timeline.bubble == pytest.approx((num_stages - 1) / turns, rel=EXACT, abs=EXACT)


@settings(deadline=None, max_examples=50)
@given(st.integers(2, 8), MICROBATCHES, SECONDS, SECONDS, SECONDS)
def test_lockstep_1f1b_exposes_what_its_docstring_says(num_stages, num_microbatches, forward, backward, hop):
    timeline = lockstep(one_forward_one_backward(num_stages, num_microbatches), Costs(forward, backward, link=slow(hop)))
    fill_and_drain = 2 * (num_stages - 1) * hop
    between = (num_microbatches - 1) * (max(0, hop - backward) + max(0, hop - forward))
    assert timeline.exposed_transfer == pytest.approx(fill_and_drain + between, rel=1e-9, abs=1e-9)


@settings(deadline=None, max_examples=50)
@given(st.integers(2, 8), MICROBATCHES, SECONDS, SECONDS, st.floats(0, 1))
def test_a_hop_shorter_than_the_work_beside_it_is_hidden(num_stages, num_microbatches, forward, backward, share):
    schedule = one_forward_one_backward(num_stages, num_microbatches)
    timeline = lockstep(schedule, Costs(forward, backward, link=slow(share * min(forward, backward))))
    when = {action: tick for tick, action in schedule.actions()}
    both = [(schedule.forward[tick] != IDLE).any() and (schedule.backward[tick] != IDLE).any() for tick in range(schedule.num_ticks)]
    hidden = 0
    for transfer in timeline.transfers:
        # A result travels beside the backward work of the next tick, a gradient beside the forward work of its own.
        if both[when[transfer.action] + (transfer.action.kind == "forward")]:
            assert transfer.exposed == pytest.approx(0, abs=1e-9)
            hidden += 1
    # The last forward results of all are those of the last stage, which go nowhere.
    assert hidden >= 2 * (num_stages - 1) * max(0, num_microbatches - num_stages)


def test_a_message_travels_beside_weight_gradients_too():
    """Two stages, three microbatches, f, b, w = 2, 3, 1: ticks F F BF BWF BW BW W.

    A hop has b + w = 4 before F in the tick of all three, and w + f = 3 after B; else b before F, f or w after B.
    """
    schedule = split(2, 3)
    costs = Costs(2, 3, 1, slow(3))
    assert lockstep(schedule, costs).exposed_transfer == 3 + (3 - 2) + 0 + (3 - 1)
    # Forward results arrive a second after B in the tick without W, and with the end of W in the tick with it.
    timeline = lockstep(schedule, Costs(2, 3, 1, slow(4)))
    assert [transfer.exposed for transfer in timeline.transfers if transfer.action.kind == "forward"] == [4, 1, 0]
    assert [transfer.exposed for transfer in timeline.transfers if transfer.action.kind == "backward"] == [2, 2, 3]
    assert timeline.step_time == 4 * 2 + 4 * 3 + 4 * 1 + 4 + 1 + 2 + 2 + 3


def test_switch_ticks_by_hand():
    """Two stages that do one thing each, two microbatches, f = 2, b = 3, hop 1: ticks F F B BF B B, the fourth a switch."""
    assert lockstep(ALONE, Costs(2, 3)).step_time == 2 + 2 + 3 + max(2, 3) + 3 + 3
    timeline = lockstep(ALONE, Costs(2, 3, link=slow(1)))
    # Stage 1 waits for F0; F1 travels beside B0 of stage 1, whose result the whole fourth tick waits for; B1 last of all.
    assert [(event.start, event.end) for event in timeline.events] == [(0, 2), (3, 5), (9, 12), (16, 19), (3, 5), (5, 8), (9, 11), (12, 15)]
    assert [(str(transfer.action)[:8], transfer.exposed) for transfer in timeline.transfers] == [
        ("forward ", 1),
        ("forward ", 0),
        ("backward", 1),
        ("backward", 1),
    ]
    assert timeline.exposed_transfer == 3


@settings(deadline=None, max_examples=50)
@given(workloads())
def test_free_stages_are_no_slower_than_lockstep_and_no_faster_than_their_work(workload):
    schedule, costs = workload
    if schedule.num_chunks > 1:  # Several messages share a wire, which the two executions fill in different orders.
        return
    timeline = asynchronous(schedule, costs)
    assert timeline.step_time <= lockstep(schedule, costs).step_time * (1 + EXACT)
    assert timeline.step_time * (1 + EXACT) >= timeline.busy.max()
    way = sum(event.end - event.start for event in timeline.events if event.action.microbatch == 0 and event.action.kind != "weight")
    hops = (schedule.num_stages - 1) * (1 + schedule.trains)
    assert timeline.step_time * (1 + EXACT) >= way + hops * costs.hop


@settings(deadline=None, max_examples=50)
@given(workloads(), st.floats(0, 10), st.floats(0, 10))
def test_slower_links_and_blocking_sends_never_help(workload, one, other):
    schedule, costs = workload
    fast, late = (Costs(costs.forward, costs.backward, costs.weight, slow(seconds)) for seconds in sorted([one, other]))
    before, after = runs(schedule, fast), runs(schedule, late)
    for quick, timeline in zip(before, after, strict=True):
        assert quick.step_time <= timeline.step_time
        assert quick.exposed_transfer <= timeline.exposed_transfer + 1e-9
        assert timeline.exposed_transfer >= 0
    for overlap, block in zip(after[1::2], after[2::2], strict=True):
        assert overlap.step_time <= block.step_time


def test_two_stages_by_hand():
    """One microbatch, f = 1, b = 2, a hop of 3 s: F, hop, F B, hop, B."""
    schedule, costs = one_forward_one_backward(2, 1), Costs(1, 2, link=Link(1, 100), message_bytes=200)
    for timeline in runs(schedule, costs):
        assert [(event.start, event.end) for event in timeline.events] == [(0, 1), (10, 12), (4, 5), (5, 7)]
        assert [(t.sender, t.receiver, t.start, t.end, t.exposed) for t in timeline.transfers] == [(0, 1, 1, 4, 3), (1, 0, 7, 10, 3)]
        assert (timeline.step_time, timeline.exposed_transfer) == (12, 6)
        assert timeline.bubble == timeline.bubble_by_stage.tolist()[0] == 1 - 3 / 12


def test_blocking_sends_keep_the_sender():
    """Two microbatches forward, f = 1, hop 2: the second starts after the first message, and the receiver waits for it."""
    schedule, costs = forward_only(2, 2), Costs(1, link=slow(2))
    overlap, block = (asynchronous(schedule, costs, sends=sends) for sends in ("overlap", "block"))
    assert [event.start for event in overlap.events] == [0, 1, 3, 5]
    assert [event.start for event in block.events] == [0, 3, 3, 6]
    assert [transfer.exposed for transfer in overlap.transfers] == [2, 1]
    assert [transfer.exposed for transfer in block.transfers] == [2, 2]


def test_unequal_stages_wait_for_the_slowest_in_lockstep():
    schedule = one_forward_one_backward(2, 3)
    timeline = lockstep(schedule, Costs([1, 2], [2, 3]))
    assert timeline.step_time == 4 * (2 + 3)
    assert timeline.busy.tolist() == [9, 15]
    assert timeline.bubble_by_stage == pytest.approx([11 / 20, 5 / 20])
    assert timeline.bubble == pytest.approx(8 / 20)


@settings(deadline=None)
@given(STAGES, FEW, st.sampled_from([gpipe, one_forward_one_backward, chunked]), st.booleans())
def test_in_flight_is_what_the_table_says(num_stages, num_microbatches, maker, wait):
    schedule = maker(num_stages, num_microbatches)
    costs = Costs(1, 2, link=slow(0.5))
    timeline = lockstep(schedule, costs) if wait else asynchronous(schedule, costs)
    assert timeline.in_flight.tolist() == in_flight(schedule).tolist()
    assert timeline.peak_activation_bytes(10).tolist() == (10 * in_flight(schedule)).tolist()
    sizes = np.arange(num_stages)
    assert timeline.peak_activation_bytes(sizes).tolist() == (sizes * in_flight(schedule)).tolist()


def test_in_flight_ends_with_the_last_action_of_a_microbatch():
    assert lockstep(forward_only(3, 5), Costs(1)).in_flight.tolist() == [1, 1, 1]
    assert lockstep(split(2, 8), Costs(1, 1, 1)).in_flight.tolist() == [4, 2]
    assert lockstep(split(2, 8, late=2), Costs(1, 1, 1)).in_flight.tolist() == [5, 3]


def test_durations_may_be_given_for_each_chunk():
    schedule = chunked(2, 1)
    timeline = lockstep(schedule, Costs([[1, 2], [3, 4]], 1))
    assert {(a.stage, a.chunk): end - start for a, start, end in timeline.events if a.kind == "forward"} == {
        (0, 0): 1,
        (0, 1): 2,
        (1, 0): 3,
        (1, 1): 4,
    }
    assert timeline.step_time == 4 * 4 + 4 * 1


def test_orders_that_wait_for_each_other_are_named():
    schedule = one_forward_one_backward(2, 2)
    first, second = table_orders(schedule)
    first = [Action(kind, 0, microbatch) for microbatch in (0, 1) for kind in ("forward", "backward")]
    second = [Action(kind, 1, microbatch) for microbatch in (1, 0) for kind in ("forward", "backward")]
    with pytest.raises(
        InputError,
        match=r"^the orders of the stages wait for each other: "
        "the backward of microbatch 0 on stage 0 waits for the backward of microbatch 0 on stage 1, "
        "which comes after the forward of microbatch 1 on stage 1; "
        "the forward of microbatch 1 on stage 1 waits for the forward of microbatch 1 on stage 0, "
        "which comes after the backward of microbatch 0 on stage 0$",
    ):
        asynchronous(schedule, Costs(1, 1), [first, second])


def test_an_order_that_waits_for_itself_is_named():
    schedule = one_forward_one_backward(2, 1)
    first, second = table_orders(schedule)
    # Stage 0 waits for stage 1, which waits for itself alone.
    with pytest.raises(
        InputError,
        match=r"^the orders of the stages wait for each other: the backward of microbatch 0 on stage 1 waits for "
        "the forward of microbatch 0 on stage 1, which comes after the backward of microbatch 0 on stage 1$",
    ):
        asynchronous(schedule, Costs(1, 1), [first, second[::-1]])


@settings(deadline=None)
@given(STAGES, st.integers(1, 6), st.sampled_from([gpipe, chunked, split]), st.data())
def test_any_order_runs_or_is_refused(num_stages, num_microbatches, maker, data):
    schedule = maker(num_stages, num_microbatches)
    orders = [data.draw(st.permutations(order)) if data.draw(st.booleans()) else order for order in table_orders(schedule)]
    costs = Costs(1, 1, 1 if schedule.splits_weight else 0)
    try:
        timeline = asynchronous(schedule, costs, orders)
    except InputError as error:
        assert " waits for the " in str(error)
    else:
        assert [event.action for event in timeline.events] == [action for order in orders for action in order]


def test_orders_of_other_actions_are_refused():
    schedule, costs = one_forward_one_backward(2, 2), Costs(1, 1)
    first, second = table_orders(schedule)
    for orders, words in [
        ([first], "orders for 1 stages, but schedule 1f1b has 2"),
        ([first, second[:-1]], "the order of stage 1 lacks the backward of microbatch 1 on stage 1"),
        ([first, [*second, second[0]]], "the order of stage 1 holds the forward of microbatch 0 on stage 1 2 times"),
        ([second, first], "the order of stage 0 holds the forward of microbatch 0 on stage 1, which is none of its"),
        (megatron_orders(2, 3), "the order of stage 0 holds the forward of microbatch 2 on stage 0, which is none of its"),
    ]:
        with pytest.raises(InputError, match=words):
            asynchronous(schedule, costs, orders)


def test_invalid_tables_are_refused():
    schedule = one_forward_one_backward(2, 2)
    broken = Schedule("broken", 2, 1, schedule.forward, schedule.backward[::-1], schedule.weight)
    for simulate in (lockstep, asynchronous):
        with pytest.raises(InputError, match="schedule broken"):
            simulate(broken, Costs(1, 1))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Link(-1, 1), "a link of -1 s"),
        (lambda: Link(0, 0), "0 bytes/s"),
        (lambda: Costs(-1), "durations of forward are -1.0 s"),
        (lambda: Costs(1, [1, float("nan")]), "durations of backward"),
        (lambda: Costs(1, 1, message_bytes=-1), "a message of -1 bytes"),
        (lambda: lockstep(gpipe(3, 2), Costs([1, 1], 1)), r"durations of forward have shape \(2,\); for 3 stages of 1 chunks .* \(3,\)"),
        (lambda: lockstep(chunked(2, 2), Costs(1, [[1, 1, 1]])), r"durations of backward have shape \(1, 3\)"),
        (lambda: lockstep(gpipe(2, 2), Costs(1, 1, 1)), "schedule gpipe computes them in its backward actions"),
    ],
)
def test_impossible_costs_are_refused(make, words):
    with pytest.raises(InputError, match=words):
        make()


def test_nothing_takes_no_time():
    timeline = lockstep(gpipe(2, 2), Costs(0))
    assert (timeline.step_time, timeline.bubble) == (0, 0)


def test_planning_needs_no_jax():
    code = "import sys, giantjax.parallel.draw, giantjax.parallel.simulate; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
