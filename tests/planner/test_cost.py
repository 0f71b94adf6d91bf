"""What must hold of any cost model, and the bytes and memory of compiled programs."""

from dataclasses import fields, replace

import pytest

from giantjax.cluster import cluster_of_name
from giantjax.command_line import preset
from giantjax.parallel.schedule import residual_slots, schedule_of_name
from giantjax.planner.cost import step_cost
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


# config, pipe, replica, data, tensor, microbatch, microbatches, recompute, ZeRO: bytes of the program compiled for A100-40GB (jax 0.10.2),
# and GB that it sends between four nodes.
COMPILED = (
    ("gpt13b", (4, 1, 4, 2, 4, 8), "none", 1, 32.11, 9.00),
    ("gpt13b", (4, 1, 2, 4, 8, 8), "none", 1, 22.01, 9.04),
    ("gpt13b", (4, 1, 2, 4, 8, 8), "selective", 0, 24.59, 10.08),
    ("gpt13b", (4, 1, 2, 4, 24, 32), "none", 1, 38.02, 32.7),
    ("gpt13b", (4, 1, 2, 4, 16, 48), "none", 1, 30.17, 31.9),
    ("gpt13b", (8, 1, 2, 2, 4, 16), "none", 1, 25.92, 10.16),
    ("gpt13b", (4, 1, 2, 4, 8, 8), "full", 1, 14.79, 9.04),
    ("gpt13b", (2, 2, 2, 4, 4, 8), "full", 1, 26.70, 107.72),
    ("gpt13b", (4, 1, 1, 8, 8, 8), "none", 0, 13.04, 7.72),
    ("gpt13b", (2, 2, 2, 4, 8, 8), "selective", 1, 32.14, 108.47),
    ("gpt13b", (4, 2, 1, 4, 2, 8), "selective", 0, 19.09, 8.00),
    ("gpt3_6b7", (4, 1, 4, 2, 1, 8), "none", 1, 32.30, 9.62),
    ("gpt3_6b7", (2, 2, 2, 4, 1, 8), "selective", 1, 18.03, 58.00),
    ("gpt3_6b7", (4, 1, 2, 4, 2, 8), "selective", 1, 19.20, 9.66),
    ("gpt3_6b7", (4, 1, 2, 4, 1, 8), "full", 1, 8.55, 7.45),
    ("gpt3_6b7", (2, 4, 1, 4, 2, 8), "none", 0, 34.20, 85.82),
    ("gpt3_6b7", (1, 4, 1, 8, 1, 4), "selective", 0, 17.68, 159.96),
    ("gpt3_1b3", (1, 4, 8, 1, 1, 4), "none", 1, 22.74, 31.58),
    ("gpt3_1b3", (1, 4, 8, 1, 2, 4), "full", 1, 18.93, 31.58),
    ("gpt3_1b3", (1, 4, 4, 2, 2, 4), "none", 0, 19.06, 39.49),
    ("gpt3_1b3", (4, 1, 8, 1, 1, 8), "none", 1, 25.71, 7.00),
)


@pytest.mark.parametrize(("name", "degrees", "recompute", "zero", "gigabytes", "sent"), COMPILED)
def test_memory_and_traffic_are_those_of_the_compiled_program(name, degrees, recompute, zero, gigabytes, sent):
    pipe, replica, data, tensor, size, number = degrees
    plan = Plan(pipe, replica, data, tensor, size, number, recompute=recompute, zero_stage=zero)
    model = preset(name).model
    assert stage_memory(model, plan, GIANTJAX)[0].program / 1e9 == pytest.approx(gigabytes, rel=0.1)
    assert step_cost(model, plan, cluster_of_name("a100x4-rdma800"), GIANTJAX).network_bytes / 1e9 == pytest.approx(sent, rel=0.05)
