"""The search: what it finds fits, is never slower than what is known, and is the optimum where that is known."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from giantjax.errors import InputError
from giantjax.parallel.compact import laid_out
from giantjax.parallel.orders import megatron_orders
from giantjax.parallel.schedule import (
    KINDS,
    Schedule,
    gpipe,
    one_forward_one_backward,
    residual_slots,
    schedule_of_name,
    validate,
    weight_slots,
    zero_bubble,
)
from giantjax.parallel.schedule_beam import Problem, beam_table
from giantjax.parallel.schedule_program import exact_table
from giantjax.parallel.schedule_search import Found, search_schedule
from giantjax.parallel.simulate import Costs, Link, lockstep

UNIT = st.floats(0.5, 2)


def slow(seconds: float) -> Link:
    return Link(seconds, 1e9)


def check(found: Found, costs: Costs, limit: float, activation: float, stash: float) -> None:
    """What is said of a schedule is so, and it fits."""
    validate(found.schedule)
    held = activation * residual_slots(found.schedule).number + stash * weight_slots(found.schedule).number
    assert found.memory == held <= limit
    whole = Costs(costs.forward, np.add(costs.backward, costs.weight), link=costs.link)
    assert found.step_time == lockstep(found.schedule, costs if found.schedule.splits_weight else whole).step_time
    assert found.num_segments == len(found.schedule.segments())


@settings(deadline=None, max_examples=10)
@given(st.integers(1, 4), st.integers(1, 6), UNIT, UNIT, st.floats(0, 1), st.floats(0.01, 0.5), UNIT)
def test_more_memory_is_never_slower_and_nothing_known_is_faster(num_stages, num_microbatches, forward, backward, weight, hop, stash):
    costs = Costs(forward, backward, weight, slow(hop))
    whole = Costs(forward, backward + weight, link=slow(hop))
    known: list[tuple[Schedule, Costs]] = [
        (gpipe(num_stages, num_microbatches), whole),
        (one_forward_one_backward(num_stages, num_microbatches), whole),
        (laid_out("1f1b", num_microbatches, 1, megatron_orders(num_stages, num_microbatches)), whole),
    ]
    if weight:
        known.append((zero_bubble(num_stages, num_microbatches), costs))
    before = np.inf
    for limit in sorted({1.0, 1 + stash, num_stages + stash, 2 * num_stages - 1, num_stages * (2 + stash)}):
        found = search_schedule(num_stages, num_microbatches, costs, limit, stash=stash)
        check(found, costs, limit, 1, stash)
        # Prices are told apart to nine digits.
        assert found.step_time <= before * (1 + 1e-8)
        before = found.step_time
        for schedule, own in known:
            if residual_slots(schedule).number + stash * weight_slots(schedule).number <= limit:
                assert found.step_time <= lockstep(schedule, own).step_time * (1 + 1e-8)


def test_what_may_wait_between_1f1b_and_zero_bubble_saves_weight_gradients():
    """On a link that hides behind lockstep ticks alone: (M + S - 1)(f + b) + (M + S - v) w, v weight gradients waiting."""
    costs, whole = Costs(1, 1, 1, slow(0.5)), Costs(1, 2, link=slow(0.5))
    found = [search_schedule(3, 6, costs, 5 + 0.5 * waiting, stash=0.5, per_segment=0.1).schedule for waiting in range(4)]
    taken = [lockstep(schedule, costs if schedule.splits_weight else whole) for schedule in found]
    work = [timeline.step_time - timeline.exposed_transfer for timeline in taken]
    # One may wait without any gain in that formula, but the search finds some.
    assert np.allclose(work, [24, 23, 23, 22])
    assert found[-1].name == "zero-bubble"


def test_a_tight_limit_on_a_fast_link_lets_stages_run_on_their_own():
    """S microbatches in flight, weight gradients counted in, are what ZB-H1 takes: 3 M + S - 1 ticks of one thing each."""
    found = search_schedule(3, 8, Costs(1, 1, 1, slow(1e-6)), 3 + 3 * 0.25, stash=0.25)
    assert found.step_time == pytest.approx(3 * 8 + 2, rel=1e-4)
    assert any(segment.mode == "switch" for segment in found.schedule.segments())


@pytest.mark.parametrize(("sizes", "limits"), [((2, 3), (3, 2)), ((2, 3), (2, 1)), ((2, 4), (2, 2)), ((3, 3), (5, 3)), ((2, 3), (2, 0))])
def test_the_beam_finds_the_optimum_of_small_pipelines(sizes, limits):
    seconds = (1.0, 1.0, 1.0) if limits[1] else (2.0, 0.0, 1.0)
    costs = Costs(1, 1, 1) if limits[1] else Costs(1, 2)
    (num_stages, num_microbatches), (residuals, weights) = sizes, limits
    problem = Problem(num_stages, num_microbatches, residuals, weights, seconds, hop=0.0, per_segment=0.0)
    # A residual is worth a hundred stashes here, so that the limit holds for each by itself.
    num_ticks = 3 * num_microbatches + 2 * num_stages
    best = exact_table("best", problem, num_ticks, 100 * residuals + weights, 100, 1 if weights else None)
    assert best is not None
    validate(best)
    assert residual_slots(best).number <= limits[0] and weight_slots(best).number <= limits[1]
    found = [beam_table("found", problem, one) for one in (False, True)]
    for table in found:
        validate(table)
        assert residual_slots(table).number <= limits[0] and weight_slots(table).number <= limits[1]
    assert min(lockstep(table, costs).step_time for table in found) == pytest.approx(lockstep(best, costs).step_time)


def test_small_pipelines_with_free_messages_are_solved_exactly():
    """f, b, w = 1, 1.2, 0.9: an optimum of 11.7 that the beam misses by 0.1."""
    costs = Costs(1, 1.2, 0.9)
    found = search_schedule(2, 3, costs, 2 + 0.5, stash=0.5)
    check(found, costs, 2.5, 1, 0.5)
    assert found.step_time == pytest.approx(11.7)


def test_fewer_segments_may_be_worth_a_longer_step():
    costs = Costs(1, 1, 1, slow(0.3))
    fast, plain = (search_schedule(3, 8, costs, 3 + 0.5, stash=0.5, per_segment=worth) for worth in (0.0, 1.0))
    assert plain.num_segments < fast.num_segments
    assert fast.step_time < plain.step_time <= fast.step_time + fast.num_segments - plain.num_segments


def test_what_is_found_is_a_file_that_runs(tmp_path):
    path = tmp_path / "found.csv"
    for limit in (1, 2.5, 6):
        found = search_schedule(3, 6, Costs(1, 1, 1, slow(0.1)), limit, stash=0.5, path=path)
        read = schedule_of_name(str(path), 3, 6)
        assert all(np.array_equal(read.table(kind), found.schedule.table(kind)) for kind in KINDS)


def test_stages_that_differ_are_priced_as_they_are():
    costs = Costs([1, 2], [1, 2], [1, 1], slow(0.1))
    check(search_schedule(2, 4, costs, 10, activation=2.0, stash=1.0), costs, 10, 2.0, 1.0)


@pytest.mark.parametrize(
    ("limit", "sizes", "words"),
    [
        (0.9, {}, "a limit of 0.9 holds no microbatch in flight; the least that works is 1.0, one activation on each stage"),
        (2**30, {"activation": 2.0**31}, "the least that works is 2147483648.0"),
        (float("nan"), {}, "a limit of nan"),
        (2, {"activation": 0.0}, r"an activation of 0.0, a stash of 1.0 and 0.0 s a segment cannot be"),
        (2, {"stash": -1.0}, r"a stash of -1.0"),
    ],
)
def test_impossible_limits_are_refused(limit, sizes, words):
    with pytest.raises(InputError, match=words):
        search_schedule(2, 4, Costs(1, 1, 1), limit, **sizes)


def test_the_least_that_works_works():
    found = search_schedule(3, 4, Costs(1, 1, 1, slow(0.1)), 1)
    assert found.memory == 1
    assert not found.schedule.splits_weight
