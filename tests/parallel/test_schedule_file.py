"""Schedules as files: read back as they were, by PyTorch too where it is installed, and refused where they are wrong."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from giantjax.errors import InputError
from giantjax.parallel.schedule import (
    IDLE,
    KINDS,
    Schedule,
    gpipe,
    interleaved,
    one_forward_one_backward,
    schedule_of_name,
    zero_bubble,
)
from giantjax.parallel.schedule_file import read_schedule, write_schedule
from tests.parallel.tables import any_tables

ROUND_TRIPS = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])


def equal(one: Schedule, other: Schedule) -> bool:
    sizes = [(schedule.num_microbatches, schedule.num_chunks) for schedule in (one, other)]
    return sizes[0] == sizes[1] and all(np.array_equal(one.table(kind), other.table(kind)) for kind in KINDS)


def written(folder: Path, *rows: str) -> Path:
    path = folder / "given.csv"
    path.write_text("\n".join(rows))
    return path


@ROUND_TRIPS
@given(schedule=any_tables)
def test_what_is_written_is_read(tmp_path, schedule):
    path = tmp_path / "any.csv"
    write_schedule(schedule, path)
    found = read_schedule(path)
    assert equal(found, schedule) and found.name == "any.csv"


def test_files_are_in_pytorchs_dialect(tmp_path):
    path = tmp_path / "some.csv"
    write_schedule(one_forward_one_backward(2, 2), path)
    assert path.read_text().splitlines() == ["0F0,0F1,,0B0,0B1", ",1F0,(1B0;1F1)OVERLAP_F_B,1B1,"]
    write_schedule(zero_bubble(1, 2), path)
    assert path.read_text().splitlines() == ["0F0,(0I0;0F1)OVERLAP_F_B,(0I1;0W0)OVERLAP_F_B,0W1"]
    write_schedule(interleaved(2, 2, 2), path)
    assert path.read_text().splitlines()[0].startswith("0F0,0F1,2F0,2F1,,2B0")
    # Joined with nothing: a table, where single actions would be orders.
    write_schedule(gpipe(2, 2), path)
    assert path.read_text().splitlines() == ["(0F0)OVERLAP_F_B,0F1,,,0B0,0B1", ",1F0,1F1,1B0,1B1,"]


def test_rows_of_single_actions_are_orders_and_brought_into_step(tmp_path):
    """As PyTorch writes 1F1B: what a stage does next, a sum of gradients last."""
    path = written(tmp_path, "0F0,0F1,0B0,0F2,0B1,0B2,0REDUCE_GRAD", "1F0,1B0,1F1,1B1,1F2,1B2,1REDUCE_GRAD")
    assert equal(read_schedule(path), one_forward_one_backward(2, 3))


def test_messages_and_gathered_parameters_follow_from_the_rest(tmp_path):
    path = written(
        tmp_path,
        "0UNSHARD,0F0,0SEND_F0,0RECV_B0,0B0,0RESHARD,0REDUCE_GRAD",
        "1RECV_F0, 1F0 ,1B0,1SEND_B0,,",
        "",
    )
    assert equal(read_schedule(path), gpipe(2, 1))


def test_pairs_are_read_in_any_order(tmp_path):
    path = tmp_path / "pairs.csv"
    write_schedule(one_forward_one_backward(2, 3), path)
    path.write_text(path.read_text().replace("(1B0;1F1)", "( 1F1 ; 1B0)"))
    assert equal(read_schedule(path), one_forward_one_backward(2, 3))


def test_a_whole_backward_among_split_ones_is_both_parts(tmp_path):
    schedule = read_schedule(written(tmp_path, "0F0,0F1,0B0,0I1,0W1"))
    assert schedule.splits_weight
    assert [action.microbatch for _, action in schedule.actions() if action.kind == "weight"] == [0, 1]


def test_tables_are_run_as_they_are_and_orders_are_not(tmp_path):
    """A table slower than it need be is one that somebody wanted; the same actions one by one are an order."""
    path = written(tmp_path, "0F0,,,,(0B0;0F1)OVERLAP_F_B,,,0B1", ",1F0,,1B0,,1F1,1B1,")
    assert schedule_of_name(str(path), 2, 2).num_ticks == 8
    path = written(tmp_path, "0F0,0F1,0F2,0F3,,,0B0,0B1,0B2,0B3", ",1F0,1F1,1F2,1F3,1B0,1B1,1B2,1B3,")
    assert equal(schedule_of_name(str(path), 2, 4), one_forward_one_backward(2, 4))
    write_schedule(gpipe(2, 4), path)
    assert equal(schedule_of_name(str(path), 2, 4), gpipe(2, 4))


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (["0F0,0X0,0B0"], r"row 1, column 2 holds '0X0', which is no action; actions are like 0F3 \(forward\), 0B3"),
        (["0F0,0B0junk"], "row 1, column 2 holds '0B0junk', which is no action"),
        (["0F0,F0"], "row 1, column 2 holds 'F0'"),
        (["0F0,0F"], "row 1, column 2 holds '0F'"),
        (["(0F0;0B0)OVERLAP"], r"row 1, column 1 holds '\(0F0;0B0\)OVERLAP'"),
        (["(0F0;)OVERLAP_F_B"], r"row 1, column 1 holds '\(0F0;\)OVERLAP_F_B'"),
        (
            ["0F0,,0BW0"],
            "row 1, column 3 holds 0BW0, in PyTorch's former dialect, where BW was all of backward and B the gradient of the input",
        ),
        (["0F0,0B0,0W0"], "0B0 and 0W0 compute one gradient twice; in PyTorch's former dialect B was the gradient of the input alone"),
        (["0F0,0B0,0F0"], "row 1 holds 0F0 in column 1 and again in column 3"),
        (["0F0,0F1,0B0"], "part 0 has F of microbatch 1; it needs F, and B or both I and W"),
        (["0F0,0F2"], "part 0 has nothing of microbatch 1; it needs F"),
        (["0F0,0I0"], "part 0 has F and I of microbatch 0; it needs F, and B or both I and W"),
        (["0F0,0F999999"], "part 0 has nothing of microbatch 1"),
        (
            ["0F0,3F0", "1F0,2F0"],
            "row 1, column 2 holds 3F0, but of 2 rows part 3 belongs to row 2: .* V-shaped .* cannot be run",
        ),
        (["0F0,2F0", "1F0"], "2 rows hold 3 parts of the model; each needs as many"),
        (["0F0", "1F0", ","], "3 rows hold 2 parts"),
        (["", ""], "there is no action in it, such as 0F0"),
    ],
)
def test_files_that_hold_no_schedule_are_refused(tmp_path, rows, words):
    path = written(tmp_path, *rows)
    with pytest.raises(InputError, match=f"{path}.*{words}"):
        read_schedule(path)


def test_rows_that_wait_for_each_other_are_refused(tmp_path):
    path = written(tmp_path, "0F0,0B0,0F1,0B1", "1F1,1B1,1F0,1B0")
    with pytest.raises(InputError, match="wait for each other: the backward of microbatch 0 on stage 0 waits for the backward of"):
        read_schedule(path)


def test_files_that_are_none_are_refused(tmp_path):
    with pytest.raises(InputError, match=r"missing\.csv: no schedule can be read from it: No such file"):
        read_schedule(tmp_path / "missing.csv")
    (tmp_path / "binary.csv").write_bytes(b"\xff\x00\x81")
    with pytest.raises(InputError, match=r"binary\.csv: no schedule can be read from it"):
        read_schedule(tmp_path / "binary.csv")
    with pytest.raises(InputError, match="the schedule cannot be written there: No such file"):
        write_schedule(gpipe(2, 2), tmp_path / "nowhere" / "some.csv")


def test_files_for_another_run_are_refused(tmp_path):
    path = str(tmp_path / "some.csv")
    write_schedule(interleaved(2, 4, 3), path)
    assert equal(schedule_of_name(path, 2, 4, 3), interleaved(2, 4, 3))
    for sizes, words in (
        ((4, 4, 3), "a schedule of 2 stages \\(rows\\), but mesh.pipe is 4"),
        ((2, 8, 3), "a schedule of 4 microbatches, but pipeline.num_microbatches is 8"),
        ((2, 4, 1), "a schedule of 3 chunks on each stage, but pipeline.num_chunks is 1"),
    ):
        with pytest.raises(InputError, match=f"pipeline.schedule is .*some.csv, {words}"):
            schedule_of_name(path, *sizes)
    forward = str(written(tmp_path, "0F0,0F1"))
    with pytest.raises(InputError, match="forward actions alone, which trains nothing"):
        schedule_of_name(forward, 1, 2)


def pytorch_reads(path: Path, schedule: Schedule) -> list[list[Any]]:
    """Rows of the file as PyTorch's reader has them, after its own check."""
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    sizes = schedule.num_stages, schedule.num_stages * schedule.num_chunks, schedule.num_microbatches
    reader = SimpleNamespace(pipeline_order={}, _validate_and_set_stage_mapping=lambda rows: schedules._validate_schedule(rows, *sizes))
    schedules.PipelineScheduleMulti._load_csv(reader, str(path))
    return [reader.pipeline_order[row] for row in range(schedule.num_stages)]


@ROUND_TRIPS
@given(schedule=any_tables)
def test_pytorch_reads_the_same(tmp_path, schedule):
    pytest.importorskip("torch.distributed.pipelining.schedules")
    if not schedule.trains:  # PyTorch's check asks for backward.
        return
    path = tmp_path / "any.csv"
    write_schedule(schedule, path)
    kinds = {"F": "forward", "B": "backward", "I": "backward", "W": "weight"}
    for stage, row in enumerate(pytorch_reads(path, schedule)):
        assert len(row) == schedule.num_ticks
        for tick, cell in enumerate(row):
            parts = () if cell is None else cell.sub_actions or (cell,)
            found = [(kinds[part.computation_type.value], part.stage_index, part.microbatch_index) for part in parts]
            cells = [(kind, int(schedule.table(kind)[tick, stage])) for kind in KINDS]
            places = [(kind, *divmod(cell, schedule.num_microbatches)) for kind, cell in cells if cell != IDLE]
            expected = [(kind, chunk * schedule.num_stages + stage, microbatch) for kind, chunk, microbatch in places]
            assert found == expected


@pytest.mark.parametrize("schedule", [one_forward_one_backward(4, 6), interleaved(4, 8, 2), interleaved(4, 6, 3), zero_bubble(4, 8)])
def test_pytorch_finds_a_place_for_every_message(tmp_path, schedule):
    """As it does before it runs a schedule, where one that waits for itself would come to no end."""
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    path, num_stages = tmp_path / "some.csv", schedule.num_stages
    write_schedule(schedule, path)
    rows = {row: [cell for cell in cells if cell] for row, cells in enumerate(pytorch_reads(path, schedule))}
    lowered = schedules._add_send_recv(rows, lambda part: part % num_stages, num_stages * schedule.num_chunks)
    sent = [action for row in lowered.values() for action in row if "SEND" in action.computation_type.value]
    assert len(sent) == 2 * schedule.num_microbatches * (num_stages * schedule.num_chunks - 1)


def pytorch_writes(path: Path, name: str, num_stages: int, num_microbatches: int, num_chunks: int) -> None:
    """A schedule of PyTorch's own, without the devices that its constructors ask for."""
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    kind = getattr(schedules, name)
    made = kind.__new__(kind)
    made._n_microbatches, made._num_stages, made.pp_group_size, made.n_local_stages = num_microbatches, num_stages, num_stages, num_chunks
    made.num_stages, made._stages = num_stages * num_chunks, [None] * num_chunks
    made.number_of_rounds = max(1, num_microbatches // num_stages)
    made.microbatches_per_round = num_microbatches // made.number_of_rounds
    made.pipeline_order = {rank: made._calculate_single_rank_operations(rank) for rank in range(num_stages)}
    schedules.PipelineScheduleMulti._dump_csv(made, str(path))


@pytest.mark.parametrize(("num_stages", "groups"), [(2, 4), (4, 2), (4, 4), (8, 2)])
def test_pytorchs_own_schedules_become_ours(tmp_path, num_stages, groups):
    path = tmp_path / "theirs.csv"
    sizes = num_stages, groups * num_stages
    for num_chunks in (1, 2, 3):
        pytorch_writes(path, "ScheduleInterleaved1F1B", *sizes, num_chunks)
        assert equal(schedule_of_name(str(path), *sizes, num_chunks), interleaved(*sizes, num_chunks))
        pytorch_writes(path, "ScheduleLoopedBFS", *sizes, num_chunks)
        assert {segment.mode for segment in schedule_of_name(str(path), *sizes, num_chunks).segments()} == {"lockstep"}
    pytorch_writes(path, "ScheduleInterleavedZeroBubble", *sizes, 1)
    assert equal(schedule_of_name(str(path), *sizes), zero_bubble(*sizes))
    pytorch_writes(path, "ScheduleZBVZeroBubble", *sizes, 2)
    with pytest.raises(InputError, match="V-shaped"):
        read_schedule(path)
