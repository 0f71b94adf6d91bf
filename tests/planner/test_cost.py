"""What must hold of any cost model."""

from dataclasses import fields, replace

import pytest

from giantjax.cluster import cluster_of_name
from giantjax.command_line import preset
from giantjax.parallel import collectives
from giantjax.parallel.schedule import residual_slots, schedule_of_name
from giantjax.planner.cost import step_cost
from giantjax.planner.exchange import BYTES_A_VALUE
from giantjax.planner.plan import GIANTJAX, MEGATRON, ZERO3, Plan
from giantjax.planner.stage_memory import SLACK, StageMemory, in_flight, stage_memory

MODEL = preset("gpt13b").model
PLANS = (
    (Plan(pipe=4, data=2, tensor=4, microbatch_size=8, num_microbatches=96, zero_stage=1), GIANTJAX),
    (Plan(pipe=2, replica=2, data=2, tensor=4, microbatch_size=4, num_microbatches=96, recompute="full"), GIANTJAX),
    (Plan(pipe=4, data=2, tensor=4, microbatch_size=8, num_microbatches=96, recompute="full"), MEGATRON),
    (Plan(replica=4, data=8, microbatch_size=8, num_microbatches=6, recompute="full", zero_stage=3), ZERO3),
)


@pytest.mark.parametrize(("plan", "traits"), PLANS)
def test_more_bandwidth_is_never_slower(plan, traits):
    names = ("tcp25", "tcp50", "tcp100", "tcp200", "tcp400", "tcp800")
    seconds = [step_cost(MODEL, plan, cluster_of_name(f"v100x4-{name}"), traits).seconds for name in names]
    assert seconds == sorted(seconds, reverse=True)
    tcp, rdma = (step_cost(MODEL, plan, cluster_of_name(f"a100x4-{name}"), traits).seconds for name in ("tcp800", "rdma800"))
    assert rdma <= tcp


@pytest.mark.parametrize(("plan", "traits"), PLANS)
def test_the_parts_add_up(plan, traits):
    cost = step_cost(MODEL, plan, cluster_of_name("a100x4-rdma800"), traits)
    assert sum(cost.parts.values()) == pytest.approx(cost.seconds)
    assert all(seconds >= 0 for seconds in cost.parts.values())
    assert cost.samples_per_s == pytest.approx(1536 / cost.seconds)
    assert 0 < cost.mfu < 0.8 and 0 <= cost.bubble < 1 and cost.exposed_network_s < cost.seconds
    for memory in stage_memory(MODEL, plan, traits):
        assert memory.program == sum(getattr(memory, part.name) for part in fields(StageMemory))
        assert memory.total - memory.program == pytest.approx(2**30 + SLACK * memory.program, abs=2)


def test_a_lockstep_bubble_is_that_of_the_schedule():
    plan = PLANS[0][0]
    bubble = step_cost(MODEL, plan, cluster_of_name("a100x4-rdma800"), GIANTJAX).bubble
    assert bubble == pytest.approx((plan.pipe - 1) / (plan.num_microbatches + plan.pipe - 1))


def test_what_is_recomputed_takes_time_and_saves_memory():
    cluster = cluster_of_name("a100x4-rdma800")
    plans = [replace(PLANS[0][0], recompute=recompute) for recompute in ("none", "selective", "full")]
    seconds = [step_cost(MODEL, plan, cluster, GIANTJAX).seconds for plan in plans]
    memory = [stage_memory(MODEL, plan, GIANTJAX)[0].total for plan in plans]
    assert seconds == sorted(seconds) and memory == sorted(memory, reverse=True)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_microbatches_in_flight_are_the_slots_of_the_executor(schedule):
    for stages, microbatches in ((2, 1), (2, 8), (4, 3), (4, 32), (8, 8)):
        slots = residual_slots(schedule_of_name(schedule, stages, microbatches)).number
        plan = Plan(pipe=stages, num_microbatches=microbatches, schedule=schedule)
        assert in_flight(plan, GIANTJAX, 0) == slots


def test_a_hop_back_lies_over_forward_and_a_hop_forward_over_backward_with_the_head():
    """Warm-up ticks have no head, so that only the backward action is longer for a large vocabulary."""
    plan, cluster = PLANS[0][0], cluster_of_name("v100x4-tcp25")
    wide = replace(MODEL, vocabulary_size=500_000)
    exposed = [step_cost(model, plan, cluster, GIANTJAX).parts["pipeline messages"] for model in (MODEL, wide)]
    assert exposed[1] <= exposed[0]


@pytest.mark.parametrize("compression", ["bf16", "int8"])
def test_rounding_sends_less_and_costs_memory_and_time(compression):
    exact = PLANS[1][0]
    rounded, cluster = replace(exact, compression=compression), cluster_of_name("v100x4-tcp100")
    before, after = (step_cost(MODEL, plan, cluster, GIANTJAX) for plan in (exact, rounded))
    less = {name: after.network_parts[name] / before.network_parts[name] for name in ("gradients", "pipeline messages")}
    assert less == pytest.approx({"gradients": BYTES_A_VALUE[compression] / 4, "pipeline messages": 1})
    assert after.parts["data-parallel collectives"] < before.parts["data-parallel collectives"]
    assert after.parts["rounding"] > 0 == before.parts["rounding"]
    memory = [stage_memory(MODEL, plan, GIANTJAX)[0] for plan in (exact, rounded)]
    assert memory[1].program - memory[0].program == memory[1].feedback > 0


def test_bytes_of_a_rounded_value_are_those_of_the_collectives():
    assert BYTES_A_VALUE == collectives.BYTES_A_VALUE
