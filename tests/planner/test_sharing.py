"""Our ZeRO 2 and 3 as the planner has them: bytes inside a node as compiled programs send them, memory against time."""

from dataclasses import replace

import pytest

from giantjax.cluster import Machine, cluster_of_name
from giantjax.command_line import preset
from giantjax.planner.automatic import with_plan
from giantjax.planner.cost import step_cost
from giantjax.planner.explain import why
from giantjax.planner.fit import bytes_needed
from giantjax.planner.plan import GIANTJAX, Plan
from giantjax.planner.search import price, search
from giantjax.planner.stage_memory import stage_memory, usable_bytes

ZERO3 = Plan(pipe=4, data=8, microbatch_size=16, num_microbatches=12, recompute="full", zero_stage=3)
"""Of configs/gpt13b_zero3.py."""


@pytest.mark.parametrize(
    ("config", "cluster", "plan", "compiled"),
    [
        ("gpt13b", "v100x4-rdma100", ZERO3, 11_659_090_330_706),
        ("gpt3_6b7", "a100x1-rdma800", replace(ZERO3, pipe=1, microbatch_size=2, num_microbatches=4), 1_503_240_388_776),
        (
            *("gpt3_1b3", "a100x1-rdma800"),
            *(Plan(pipe=2, data=4, microbatch_size=2, num_microbatches=8, zero_stage=2), 172_830_589_184),
        ),
    ],
    ids=["gpt13b", "gpt3_6b7", "gpt3_1b3"],
)
def test_bytes_inside_nodes_are_those_of_the_compiled_program(config, cluster, plan, compiled):
    """Counted in the programs that `giantjax.compile_check` compiled; without tensor parallelism all is told by the plan."""
    cost = step_cost(preset(config).model, plan, cluster_of_name(cluster), GIANTJAX)
    assert cost.nvlink_bytes == pytest.approx(compiled, rel=1e-3)


def test_each_stage_takes_less_memory_and_more_time_on_the_wires():
    model, cluster = preset("gpt13b").model, cluster_of_name("a100x4-rdma800")
    plans = [replace(ZERO3, zero_stage=stage) for stage in (0, 1, 2, 3)]
    memory = [stage_memory(model, plan, GIANTJAX)[0] for plan in plans]
    costs = [step_cost(model, plan, cluster, GIANTJAX) for plan in plans]
    totals = [one.program for one in memory]
    assert totals == sorted(totals, reverse=True)
    assert memory[3].parameters == pytest.approx(memory[0].parameters / 8, rel=1e-6)
    assert memory[2].gradients == memory[3].gradients == pytest.approx(memory[1].gradients / 8, rel=1e-6)
    exchanged = [one.parts["data-parallel collectives"] for one in costs]
    assert exchanged[1] < exchanged[2] < exchanged[3]
    # Between nodes nothing changes: shares cross as they did.
    assert len({round(one.network_bytes) for one in costs}) == 1


def test_stages_2_and_3_are_searched():
    config, cluster = preset("gpt3_6b7"), cluster_of_name("v100x2-rdma100")
    found = search(config, cluster)
    by_mesh = {(one.plan.pipe, one.plan.data, one.plan.tensor): one.plan.zero_stage for one in reversed(found.fitting)}
    # Where parameters lie whole on each GPU, its memory does not hold them.
    assert by_mesh[1, 8, 1] == 3
    whole = price(
        config.model, replace(ZERO3, pipe=1, replica=2, zero_stage=1, microbatch_size=1), cluster, GIANTJAX, found.fitting[0].usable
    )
    assert not whole.fits
    slow = next(one for one in found.fitting if one.plan.zero_stage == 3 and one.plan.data == 8 and one.plan.pipe == 2)
    assert why(slow, found.fitting[0], cluster).startswith("ZeRO 3 in every microbatch: ")


@pytest.mark.parametrize(("cluster", "seconds"), [("a100x4-rdma800", 10.1), ("v100x4-tcp100", 24.2)])
def test_the_shipped_config_fits_and_takes_what_it_says(cluster, seconds):
    config, where = preset("gpt13b_zero3"), cluster_of_name(cluster)
    priced = price(config.model, ZERO3, where, GIANTJAX, usable_bytes(where.gpu, config.runtime.memory_fraction))
    assert with_plan(config, ZERO3) == config
    assert priced.fits and priced.cost.seconds == pytest.approx(seconds, rel=0.01)


def test_what_is_shared_is_not_asked_for_at_the_start():
    """A run is refused for memory only if it does not fit as it is shared."""
    config, machine = preset("gpt13b_zero3"), Machine("Tesla V100-SXM2-32GB", 8, 32 * 2**30, simulated=False)
    whole = replace(config, training=replace(config.training, zero_stage=0))
    assert bytes_needed(config, machine) < 0.4 * bytes_needed(whole, machine)
