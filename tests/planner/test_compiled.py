"""Memory and traffic by the planner against programs compiled for GPUs: figures on record, and a few compiled anew."""

from dataclasses import replace
from pathlib import Path

import pytest

from giantjax import targets
from giantjax.benchmarks.memory import Compiled, Estimates, compiled_anew, estimates, read_compiled, write_compiled
from giantjax.errors import InputError
from giantjax.planner.plan import GIANTJAX
from giantjax.planner.stage_memory import stage_memory

RECORD = Path(__file__).with_name("compiled.csv")
"""`python scripts/benchmark.py memory --data tests/planner/compiled.csv --compile all` makes it anew."""
PLANS = read_compiled(RECORD)


def words(one: Compiled) -> str:
    """The name of a test."""
    plan = one.plan
    mesh = f"{plan.pipe}x{plan.replica}x{plan.data}x{plan.tensor}"
    return f"{one.config}-{one.cluster}-{mesh}-{plan.microbatch_size}-{plan.recompute}-{plan.zero_stage}-{plan.compression}-{plan.schedule}"


def test_the_record_is_of_many_plans_some_of_which_were_not_fitted_to():
    assert len(PLANS) >= 20 and all(one.memory_bytes for one in PLANS) and len(set(map(words, PLANS))) == len(PLANS)
    held_out = [one for one in PLANS if one.held_out]
    for name in ("gpt3_1b3", "gpt3_6b7", "gpt13b"):
        for gpu in ("v100", "a100"):
            assert any(one.config == name and one.cluster.startswith(gpu) for one in PLANS)
        assert any(one.config == name for one in held_out)


@pytest.mark.parametrize("one", PLANS, ids=words)
def test_estimates_are_near_the_compiled_program(one):
    assert abs(one.memory_error) < 0.05
    assert abs(one.network_error) < 0.02


@pytest.mark.parametrize("one", PLANS, ids=words)
def test_the_state_is_known_exactly(one):
    memory = stage_memory(one.model, one.plan, GIANTJAX)[0]
    assert memory.parameters + memory.optimizer + memory.feedback == pytest.approx(one.argument_bytes, rel=0.005)


@pytest.mark.skipif(not targets.is_installed(), reason=f"compiling for GPUs that are not here needs {targets.INSTALL}")
@pytest.mark.xdist_group("compile check")
@pytest.mark.parametrize("place", [16, 35], ids=lambda place: words(PLANS[place]))
def test_the_record_is_what_compiles_today(place):
    one = PLANS[place]
    found = compiled_anew(one)
    assert found.memory_bytes == pytest.approx(one.memory_bytes, rel=0.03)
    assert found.argument_bytes == one.argument_bytes
    assert found.network_bytes == pytest.approx(one.network_bytes, rel=0.01)


def test_a_record_is_written_as_it_was_read(tmp_path, capsys):
    path = tmp_path / "plans.csv"
    write_compiled(path, PLANS)
    assert path.read_text() == RECORD.read_text() and read_compiled(path) == PLANS
    assert estimates(Estimates(str(path))) == 0
    printed = capsys.readouterr().out.splitlines()[-2:]
    assert printed[0].startswith("fitted: ") and printed[1].startswith("held out: ")


def test_records_that_are_none(tmp_path):
    path = tmp_path / "plans.csv"
    with pytest.raises(InputError, match="cannot be read as a CSV file: No such file"):
        read_compiled(path)
    path.write_text("config,cluster\n")
    with pytest.raises(InputError, match="has no column pipe"):
        read_compiled(path)
    path.write_text(RECORD.read_text().replace(",8,", ",eight,", 1))
    with pytest.raises(InputError, match="cannot be read as a table of compiled plans: invalid literal"):
        read_compiled(path)
    write_compiled(path, [replace(PLANS[0], memory_bytes=0)])
    with pytest.raises(InputError, match="has no plan with figures; --compile missing adds them"):
        estimates(Estimates(str(path)))
    with pytest.raises(InputError, match="--compile is 'some'; it must be none, missing or all"):
        Estimates(str(path), compile="some")
