"""Compaction: the same work, valid, never slower, with no more held than said; the published orders become our tables."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from giantjax.errors import InputError
from giantjax.parallel.compact import MESSAGE, compact, laid_out
from giantjax.parallel.orders import interleaved_orders, megatron_orders, table_orders, zero_bubble_orders
from giantjax.parallel.schedule import (
    KINDS,
    Schedule,
    in_flight,
    interleaved,
    one_forward_one_backward,
    validate,
    weight_slots,
    zero_bubble,
)
from giantjax.parallel.simulate import Costs, lockstep
from tests.parallel.tables import any_tables, random_tables

SIZES = st.tuples(st.integers(2, 8), st.integers(1, 24))


def equal(one: Schedule, other: Schedule) -> bool:
    return all(np.array_equal(one.table(kind), other.table(kind)) for kind in KINDS)


def seconds(schedule: Schedule) -> float:
    costs = Costs(1, 1, 1, MESSAGE) if schedule.splits_weight else Costs(1, 2, link=MESSAGE)
    return lockstep(schedule, costs).step_time


@settings(deadline=None)
@given(any_tables)
def test_compacting_keeps_orders_and_never_costs(schedule):
    found = compact(schedule)
    validate(found)
    assert seconds(found) <= seconds(schedule)
    switches = any(segment.mode == "switch" for segment in schedule.segments())
    assert (in_flight(found) <= (2 * in_flight(schedule) - 1 if switches else in_flight(schedule))).all()
    assert switches or weight_slots(found).number <= weight_slots(schedule).number
    for before, after in zip(table_orders(schedule), table_orders(found), strict=True):
        for kind in KINDS:
            assert [action for action in before if action.kind == kind] == [action for action in after if action.kind == kind]


@settings(deadline=None)
@given(random_tables)
def test_orders_are_laid_out_one_action_a_tick(schedule):
    orders = table_orders(schedule)
    found = laid_out("orders", schedule.num_microbatches, schedule.num_chunks, orders)
    validate(found)
    assert table_orders(found) == orders
    assert np.sum([found.table(kind) >= 0 for kind in KINDS], axis=0).max() == 1


@settings(deadline=None)
@given(SIZES)
def test_orders_of_1f1b_become_lockstep_1f1b(sizes):
    """One action a tick takes 2(M + S - 1) ticks of whichever of f and b is longer; in step they take (M + S - 1)(f + b)."""
    orders = laid_out("1f1b", sizes[1], 1, megatron_orders(*sizes))
    assert equal(compact(orders), one_forward_one_backward(*sizes))


@settings(deadline=None, max_examples=30)
@given(st.tuples(st.integers(2, 8), st.integers(1, 24), st.integers(2, 4)))
def test_orders_of_interleaved_1f1b_become_the_lockstep_table(sizes):
    schedule = interleaved(*sizes)
    orders = laid_out("interleaved", sizes[1], sizes[2], interleaved_orders(schedule))
    assert equal(compact(orders), schedule)


@pytest.mark.parametrize("sizes", [(2, 8), (3, 8), (4, 8), (4, 12), (8, 16)])
def test_orders_of_zero_bubble_become_the_lockstep_table(sizes):
    orders = laid_out("zero-bubble", sizes[1], 1, zero_bubble_orders(*sizes))
    assert equal(compact(orders), zero_bubble(*sizes))


def test_what_stays_cheaper_uncompacted_stays():
    """With messages that arrive at once, ZB-H1 is faster with each stage on its own: three actions of S + M - 1 overlap."""
    orders = laid_out("zero-bubble", 8, 1, zero_bubble_orders(4, 8))
    assert compact(orders, Costs(1, 1, 1)) is orders
    assert any(segment.mode == "switch" for segment in orders.segments())
    assert lockstep(orders, Costs(1, 1, 1)).step_time == 3 * 8 + 3
    assert lockstep(zero_bubble(4, 8), Costs(1, 1, 1)).step_time == 3 * 8 + 2 * 3


def test_schedules_in_step_stay_as_they_are():
    for schedule in (one_forward_one_backward(4, 6), interleaved(3, 7, 2), zero_bubble(4, 8)):
        assert equal(compact(schedule), schedule)


def test_orders_that_wait_for_each_other_are_refused():
    first, second = megatron_orders(2, 2)
    with pytest.raises(InputError, match="wait for each other"):
        laid_out("ring", 2, 1, [first, second[::-1]])
