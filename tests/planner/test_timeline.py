"""The closed forms of a schedule's time are the simulator's."""

import itertools

import pytest

from giantjax.parallel import simulate
from giantjax.parallel.orders import megatron_orders
from giantjax.parallel.schedule import gpipe, interleaved, one_forward_one_backward, zero_bubble
from giantjax.planner import timeline

SIZES = list(itertools.product((1, 2, 3, 4, 8), (1, 2, 3, 8, 17), (0.0, 0.1, 1.5, 4.0)))


@pytest.mark.parametrize(("schedule", "name"), [(one_forward_one_backward, "1f1b"), (gpipe, "gpipe")])
def test_lockstep_is_exact(schedule, name):
    for stages, microbatches, hop in SIZES:
        costs = simulate.Costs(1.0, 2.0, link=simulate.Link(hop, 1e12), message_bytes=0)
        expected = simulate.lockstep(schedule(stages, microbatches), costs)
        found = timeline.lockstep(name, stages, microbatches, 1.0, 2.0, hop)
        assert found.total == pytest.approx(expected.step_time)
        assert found.exposed == pytest.approx(expected.exposed_transfer)


@pytest.mark.parametrize("slowest", [1.0, 1.3])
def test_asynchronous_with_free_messages_is_exact_where_the_last_stage_is_slowest(slowest):
    for stages, microbatches, _ in SIZES:
        forward, backward = ([1.0] * (stages - 1) + [slowest], [2.0] * (stages - 1) + [2 * slowest])
        schedule = one_forward_one_backward(stages, microbatches)
        orders = megatron_orders(stages, microbatches)
        expected = simulate.asynchronous(schedule, simulate.Costs(forward, backward), orders, "block")
        found = timeline.asynchronous([f + b for f, b in zip(forward, backward, strict=True)], microbatches, 0.0)
        assert found.total == pytest.approx(expected.step_time)


def test_asynchronous_never_takes_longer_than_its_closed_form_where_another_stage_is_slowest():
    for stages, microbatches, place in itertools.product((2, 4, 8), (4, 16), (0, 1)):
        work = [1.3 if stage == place else 1.0 for stage in range(stages)]
        costs = simulate.Costs(work, [2 * one for one in work])
        orders = megatron_orders(stages, microbatches)
        taken = simulate.asynchronous(one_forward_one_backward(stages, microbatches), costs, orders, "block").step_time
        found = timeline.asynchronous([3 * one for one in work], microbatches, 0.0).total
        assert taken <= found * (1 + 1e-9) and found <= 1.16 * taken


def test_messages_that_block_are_within_three_percent():
    for stages, microbatches, hop in itertools.product((4, 8), (8, 32), (0.03, 0.1, 0.3)):
        costs = simulate.Costs(1.0, 2.0, link=simulate.Link(hop, 1e12), message_bytes=0)
        orders = megatron_orders(stages, microbatches)
        taken = simulate.asynchronous(one_forward_one_backward(stages, microbatches), costs, orders, "block").step_time
        assert timeline.asynchronous([3.0] * stages, microbatches, hop).total == pytest.approx(taken, rel=0.03)


def test_lockstep_with_chunks_and_weight_gradients_is_exact():
    for stages, chunks, hop in itertools.product((2, 3, 4), (2, 3), (0.0, 0.1, 1.5, 4.0)):
        for microbatches in (stages, 3 * stages):
            costs = simulate.Costs(1.0, 2.0, link=simulate.Link(hop, 1e12), message_bytes=0)
            taken = simulate.lockstep(interleaved(stages, microbatches, chunks), costs)
            found = timeline.lockstep("interleaved", stages, microbatches, 1.0, 2.0, hop, num_chunks=chunks)
            assert found.total == pytest.approx(taken.step_time)
    for stages, microbatches in itertools.product((2, 4), (4, 9)):
        taken = simulate.lockstep(zero_bubble(stages, microbatches), simulate.Costs(1.0, 1.1, 0.9))
        found = timeline.lockstep("zero-bubble", stages, microbatches, 1.0, 1.1, 0.0, weight=0.9)
        assert found.total == pytest.approx(taken.step_time)
