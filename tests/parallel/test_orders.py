"""The published schedules as others run them: their orders, and their bubbles and memory as the papers have them."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from giantjax.parallel.orders import interleaved_orders, megatron_orders, zero_bubble_orders
from giantjax.parallel.schedule import Action, gpipe, interleaved, one_forward_one_backward, zero_bubble
from giantjax.parallel.simulate import Costs, asynchronous, lockstep
from tests.parallel.tables import MICROBATCHES, STAGES

CHUNKS = st.integers(1, 4)
SECONDS = st.floats(0.1, 10)
EXACT = 1e-12


def words(orders: list[list[Action]]) -> list[str]:
    return [" ".join(f"{action.kind[0].upper()}{action.microbatch}" for action in order) for order in orders]


@settings(deadline=None, max_examples=50)
@given(STAGES, MICROBATCHES, SECONDS, SECONDS)
def test_megatron_1f1b_takes_as_long_with_half_the_microbatches_in_flight(num_stages, num_microbatches, forward, backward):
    schedule = one_forward_one_backward(num_stages, num_microbatches)
    timeline = asynchronous(schedule, Costs(forward, backward), megatron_orders(num_stages, num_microbatches))
    assert timeline.step_time == pytest.approx((num_microbatches + num_stages - 1) * (forward + backward), rel=EXACT)
    assert timeline.in_flight.tolist() == [min(num_stages - stage, num_microbatches) for stage in range(num_stages)]


def test_megatron_1f1b_by_hand():
    orders = megatron_orders(3, 4)
    assert words(orders) == ["F0 F1 F2 B0 F3 B1 B2 B3", "F0 F1 B0 F2 B1 F3 B2 B3", "F0 B0 F1 B1 F2 B2 F3 B3"]
    assert all(action.stage == stage for stage, order in enumerate(orders) for action in order)


@settings(deadline=None, max_examples=50)
@given(STAGES, MICROBATCHES, CHUNKS, SECONDS, SECONDS)
def test_interleaved_has_the_published_bubble_in_both_executions(num_stages, num_microbatches, num_chunks, forward, backward):
    """(S - 1)/(CM) of the useful time (Narayanan et al., 2021), whether S divides M, as there, or not; M is at least S."""
    num_microbatches = max(num_stages, num_microbatches)
    schedule = interleaved(num_stages, num_microbatches, num_chunks)
    costs = Costs(forward / num_chunks, backward / num_chunks)
    bubble = (num_stages - 1) / (num_chunks * num_microbatches)
    for timeline in (lockstep(schedule, costs), asynchronous(schedule, costs, interleaved_orders(schedule))):
        useful = num_microbatches * (forward + backward)
        assert timeline.step_time / useful - 1 == pytest.approx(bubble, rel=1e-9, abs=1e-9)
        # Of whole groups no more is held than in the paper, which lockstep does not add to.
        if num_microbatches % num_stages == 0:
            held = [(num_chunks - 1) * num_stages + 2 * (num_stages - 1 - stage) + 1 for stage in range(num_stages)]
            assert timeline.in_flight.tolist() == [min(number, num_chunks * num_microbatches) for number in held]


def test_interleaved_by_hand():
    """Two stages of two chunks, four microbatches: stage 0 is four forward actions ahead, stage 1 two."""
    schedule = interleaved(2, 4, 2)
    orders = interleaved_orders(schedule)
    assert words(orders) == [
        "F0 F1 F0 F1 F2 B0 F3 B1 F2 B0 F3 B1 B2 B3 B2 B3",
        "F0 F1 F0 B0 F1 B1 F2 B0 F3 B1 F2 B2 F3 B3 B2 B3",
    ]
    assert [action.chunk for action in orders[1]] == [0, 0, 1, 1, 1, 1, 0, 0, 0, 0, 1, 1, 1, 1, 0, 0]


def test_orders_of_gpipe_from_its_table():
    assert words(interleaved_orders(gpipe(1, 2))) == ["F0 F1 B0 B1"]


@settings(deadline=None, max_examples=50)
@given(STAGES, MICROBATCHES, SECONDS, SECONDS, st.floats(0, 1))
def test_zero_bubble_has_the_published_bubble_and_memory(num_stages, num_microbatches, forward, backward, share):
    """ZB-H1: (S - 1)(f + b - w), S microbatches in flight (Qi et al., 2023, table 2), for M of at least S and w up to f and b."""
    num_microbatches, weight = max(num_stages, num_microbatches), share * min(forward, backward)
    schedule, costs = zero_bubble(num_stages, num_microbatches), Costs(forward, backward, weight)
    timeline = asynchronous(schedule, costs, zero_bubble_orders(num_stages, num_microbatches))
    useful = num_microbatches * (forward + backward + weight)
    assert timeline.step_time == pytest.approx(useful + (num_stages - 1) * (forward + backward - weight), rel=1e-9)
    assert max(timeline.in_flight) == num_stages
    # In lockstep a weight gradient fills no wait: only the ramps no longer have any.
    assert lockstep(schedule, costs).step_time == pytest.approx(useful + (num_stages - 1) * (forward + backward), rel=1e-9)


def test_zero_bubble_by_hand():
    assert words(zero_bubble_orders(2, 3)) == ["F0 F1 B0 W0 F2 B1 W1 B2 W2", "F0 B0 F1 B1 W0 F2 B2 W1 W2"]
