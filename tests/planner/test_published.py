"""Published measurements: how rows are read, and how far off predictions are."""

import csv
import math
import re
from pathlib import Path

import pytest

from giantjax.benchmarks.planner import Planner, kendall, planner, score
from giantjax.benchmarks.published import COLUMNS, read_occupied, read_rows
from giantjax.errors import InputError

GOOD = dict(
    zip(
        COLUMNS,
        (
            *("paper https://example.org", "GPT", "", "24", "2048", "16", "1024", "51200", "A100 40GB", "16", "8", "2x100 Gb/s RoCE"),
            *("2", "2", "4", "1", "4", "64", "1f1b", "full", "fp16", "iteration_time_s", "1.5"),
        ),
        strict=True,
    )
)


def write(path: Path, *changes: dict[str, str]) -> Path:
    with path.open("w", newline="") as file:
        table = csv.DictWriter(file, COLUMNS)
        table.writeheader()
        table.writerows({**GOOD, **change} for change in changes)
    return path


def test_a_row_is_a_plan(tmp_path):
    (row,), unusable = read_rows(write(tmp_path / "a.csv", {}))
    assert not unusable and not row.notes
    plan, cluster = row.plan, row.cluster
    assert (plan.tensor, plan.pipe, plan.ways, plan.data, plan.microbatch_size, plan.num_microbatches) == (2, 2, 4, 4, 4, 4)
    assert (cluster.num_nodes, cluster.gpu.name, cluster.network.fabric, cluster.network.nics_per_node) == (2, "A100-40GB", "roce", 2)
    assert (row.source, row.seconds, row.samples) == ("paper", 1.5, 64)


def test_metrics_are_seconds_of_a_step(tmp_path):
    metrics = {"iteration_time_ms": "1500", "samples_per_s": str(64 / 1.5), "tokens_per_s": str(64 * 1024 / 1.5)}
    changes = [{"metric": name, "value": value} for name, value in metrics.items()]
    rows, _ = read_rows(write(tmp_path / "a.csv", *changes, {"metric": "mfu_pct"}))
    assert [row.seconds for row in rows] == pytest.approx([1.5] * 3)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"layers": ""}, "its layers is not stated"),
        ({"gpu": "MI250"}, "its GPU is not one of V100, A100, H100 and H200"),
        ({"tp": "", "pp": ""}, "its plan is not stated"),
        ({"dp": "3"}, "its degrees do not multiply to its GPUs"),
        ({"micro_batch": ""}, "its microbatch is not stated"),
        ({"value": "n/a"}, "its value is not a number above 0"),
        ({"value": "0"}, "its value is not a number above 0"),
        ({"gpus_per_node": "6"}, "its nodes are not equally large"),
        ({"params_B": "900"}, "its parameters are far from what its layers and width have"),
    ],
)
def test_a_row_that_cannot_be_priced_is_counted_with_its_reason(change, reason, tmp_path):
    rows, unusable = read_rows(write(tmp_path / "a.csv", change, {}))
    assert len(rows) == 1 and unusable == {reason: 1}


@pytest.mark.parametrize(
    ("change", "note"),
    [
        ({"vocab": ""}, "vocabulary"),
        ({"heads": ""}, "heads"),
        ({"recompute": ""}, "recompute"),
        ({"inter_node_link": ""}, "network"),
        ({"pp": "1", "dp": "8", "micro_batch": ""}, "microbatch"),
    ],
)
def test_what_is_taken_at_its_usual_value_is_noted(change, note, tmp_path):
    (row,), _ = read_rows(write(tmp_path / "a.csv", change))
    assert row.notes == (note,)


def test_degrees_follow_from_each_other(tmp_path):
    rows, unusable = read_rows(write(tmp_path / "a.csv", {"dp": ""}, {"tp": "", "pp": "", "dp": "16"}))
    assert not unusable and [row.plan.ways for row in rows] == [4, 16]


def test_plans_that_ran_and_plans_that_did_not(tmp_path, capsys):
    """A time or a memory in use says that a plan ran; OOM in the model, the metric or the value that it did not."""
    changes = [
        {},
        {"metric": "gpu_mem_GB", "value": "30"},
        {"micro_batch": "16", "model": "GPT, OOM", "metric": "note", "value": ""},
        {"micro_batch": "8", "metric": "status", "value": "out of memory"},
        {"micro_batch": "1", "model": "GPT, close to OOM", "metric": "gpu_mem_MiB", "value": "38000"},
        {"layers": "", "metric": "oom", "value": "1"},
    ]
    found = read_occupied(write(tmp_path / "a.csv", *changes))
    assert [(one.ran, one.num_bytes) for one in found] == [(True, 30e9), (False, None), (False, None), (True, 38_000 * 2**20)]
    huge = {"hidden": "16384", "heads": "128", "layers": "96", "model": "huge"}
    found = read_occupied(write(tmp_path / "b.csv", {}, {**huge, "metric": "oom"}))
    assert [(one.ran, one.fits) for one in found] == [(True, True), (False, False)]
    assert planner(Planner(str(tmp_path / "b.csv"))) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "memory: 1 of 1 plans that ran fit by the planner's model, 0 of 1 that ran out of memory do; 100 % classified right" in printed


def test_published_plans_that_ran_are_thought_to_fit(shared):
    """No row of the file failed for want of memory, so only the one side can be tested."""
    found = read_occupied(shared / "published/throughput.csv")
    assert len(found) >= 300 and all(one.ran for one in found)
    assert sum(one.fits for one in found) / len(found) >= 0.95


def test_files_that_are_none(tmp_path):
    with pytest.raises(InputError, match="cannot be read as a CSV file: No such file"):
        read_rows(tmp_path / "none.csv")
    (tmp_path / "a.csv").write_text("source,model\n")
    with pytest.raises(InputError, match="has no column params_B"):
        read_rows(tmp_path / "a.csv")
    with pytest.raises(InputError, match="has no row that can be priced; 1 rows left out: 1 as its layers is not stated"):
        planner(Planner(str(write(tmp_path / "b.csv", {"layers": ""}))))


def test_figures():
    assert kendall([1, 2, 3, 4], [1, 3, 2, 4]) == pytest.approx(4 / 6)
    assert kendall([1, 2, 3], [5, 5, 5]) == 0
    found = score([math.log(1.1), -math.log(1.1), math.log(2)])  # type: ignore[arg-type]
    assert found.median == pytest.approx(0.1) and found.percentile == pytest.approx(1.0)


LINE = re.compile(r"(\w[\w-]*): median ([\d.]+) %, 90th percentile ([\d.]+) %, tau (-?[\d.]+|nan), (\d+) rows")


def figures(capsys: pytest.CaptureFixture[str]) -> dict[str, tuple[float, float, float, int]]:
    """The last two lines of the benchmark."""
    found = [LINE.fullmatch(line) for line in capsys.readouterr().out.splitlines()[-2:]]
    return {line[1]: (float(line[2]), float(line[3]), float(line[4]), int(line[5])) for line in found if line}


def test_a_file_of_unknown_sources(tmp_path, capsys):
    assert planner(Planner(str(write(tmp_path / "a.csv", {}, {"micro_batch": "2"})))) == 0
    assert figures(capsys).keys() == {"zero-shot", "calibrated"}


@pytest.mark.xdist_group("published")
def test_published_step_times_are_predicted(shared, capsys):
    """The bar: 12 % and 35 % from nothing, 8 % and 25 % after one row of a source; a constant-MFU roofline gets 21 % and 62 %."""
    assert planner(Planner(str(shared / "published/throughput.csv"))) == 0
    found = figures(capsys)
    median, percentile, tau, rows = found["zero-shot"]
    assert median <= 12 and percentile <= 35 and rows >= 365
    median, percentile, _, _ = found["calibrated"]
    assert median <= 8 and percentile <= 25
    assert tau >= 0.8
