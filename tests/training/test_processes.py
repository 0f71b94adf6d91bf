"""Several processes train what one would: the same losses and checkpoints, one end, and one sentence where they cannot."""

import errno
import os
import re
import signal
from collections.abc import Callable
from functools import partial
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from jax.sharding import NamedSharding

from giantjax.config import MeshConfig, RunConfig
from giantjax.data import corpora
from giantjax.data.corpora import Synthetic, samples_of
from giantjax.data.loader import training_batches, validation_batches
from giantjax.data.order import sample_order
from giantjax.parallel.mesh import build_mesh
from giantjax.training.feed import rows_here, spread
from giantjax.training.metrics import MetricsFile
from giantjax.training.run_directory import directory_of, read_record
from giantjax.training.step import BATCH_SPEC
from tests.helpers import FORWARD, relative_error
from tests.training.runs import (
    changed,
    finish,
    free_port,
    log_of,
    measured,
    of_job,
    read_state,
    records_of,
    saved_steps,
    small_run,
    start,
    train_here,
    wait_until,
    write_corpus,
)

# One worker, for several processes at a time are enough for its cores.
pytestmark = pytest.mark.xdist_group("processes")

SIZES: dict[str, Any] = {"sequence_length": 8, "vocabulary_size": 50}


def run_job(configs: list[RunConfig], meanwhile: Callable[[list[ForkServerProcess]], None] | None = None, **befores) -> list[int]:
    """Start each; the exit codes. `before_1` is called in process 1 before it starts."""
    started: list[ForkServerProcess] = []
    try:
        for config in configs:
            started.append(start(config, befores.get(f"before_{config.runtime.process_id}")))
        if meanwhile:
            meanwhile(started)
        return [finish(process) for process in started]
    finally:
        for process in started:
            process.kill()


def said(config: RunConfig, process: int) -> str:
    """What a process printed, without what gloo says of itself."""
    lines = log_of(config, process).read_text().splitlines()
    return "\n".join(line for line in lines if "peer ranks" not in line)


def trains(config: RunConfig) -> bool:
    """Whether two steps were printed."""
    return log_of(config).exists() and b"step 2/" in log_of(config).read_bytes()


# ---- trained ----


def test_stages_in_four_processes_train_as_in_one(corpus, tmp_path):
    sizes = {"model.num_layers": 4, "mesh.pipe": 4, "pipeline.num_microbatches": 2, "training.num_steps": 4, "training.eval_every": 4}
    config = small_run(tmp_path / "four", corpus, **sizes, **{"mesh.tensor": 2, "checkpoint.every": 0})
    one = changed(config, run_dir=str(tmp_path / "one"))
    jobs = of_job(config, 4, free_port())
    assert run_job(jobs) == [0] * 4, said(config, 0)
    assert train_here(one) == 0
    for record, expected in zip(measured(config), measured(one), strict=True):
        assert record == pytest.approx(expected, rel=FORWARD)
    assert saved_steps(config) == saved_steps(one) == [4]
    state, expected = read_state(config, 4), read_state(one, 4)
    assert state.keys() == expected.keys()
    # The bias of keys has no gradient but rounding, which Adam makes large.
    far = {path for path in state if relative_error(state[path], expected[path]) > FORWARD}
    assert far <= {"['params']['blocks']['attention']['qkv']['bias']"}
    assert "mesh pipe 4 x tensor 2: pipe between nodes, tensor inside a node" in said(config, 0)
    assert said(config, 0).startswith(
        f"4 processes with 4 nodes x 2 devices = 8, which met at {jobs[0].runtime.coordinator} (set explicitly"
    )
    assert [said(config, process) for process in (1, 2, 3)] == [""] * 3
    run = directory_of(config)
    assert {path.name for path in run.path.iterdir()} == {"config.json", "tokenizer.json", "metrics.jsonl", "checkpoints", "tensorboard"}
    assert len(list(run.tensorboard.iterdir())) == 1
    assert read_record(run, run.config, RunConfig).runtime.num_processes == 4


def test_a_signal_to_one_stops_all_and_any_number_of_processes_goes_on(corpus, tmp_path):
    changes = {"mesh.replica": 2, "training.num_steps": 10000, "training.eval_every": 0, "checkpoint.every": 0}
    config = small_run(tmp_path / "two", corpus, **changes)

    def terminate_one(started: list[ForkServerProcess]) -> None:
        wait_until(lambda: trains(config), started[0])
        assert started[1].pid is not None
        os.kill(started[1].pid, signal.SIGTERM)

    assert run_job(of_job(config, 2, free_port()), terminate_one) == [143] * 2, said(config, 0) + said(config, 1)
    (step,) = saved_steps(config)
    assert records_of(config)[-1]["step"] == step < 10000
    assert f"stopped by SIGTERM to process 1 after step {step}, which is saved" in said(config, 0)
    # In one process on one device, and in two again.
    assert train_here(changed(config, **{"mesh.replica": 1, "training.num_steps": step + 2})) == 0
    longer = changed(config, **{"training.num_steps": step + 4, "training.zero_stage": 1})
    assert run_job(of_job(longer, 2, free_port())) == [0] * 2, said(config, 0) + said(config, 1)
    assert f"resuming after step {step + 2}" in said(config, 0)
    whole = changed(longer, run_dir=str(tmp_path / "whole"), **{"mesh.replica": 1})
    assert train_here(whole) == 0
    for record, expected in zip(measured(config), measured(whole), strict=True):
        assert record == pytest.approx(expected, rel=FORWARD)
    assert relative_error(read_state(config, step + 4), read_state(whole, step + 4)) < 1e-3


# ---- at fault ----


def fill_the_disk() -> None:
    """Leave no room for the second line of metrics.jsonl."""
    append = MetricsFile.append

    def append_one(self: MetricsFile, record: dict) -> None:
        if record["step"] == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        append(self, record)

    MetricsFile.append = append_one  # type: ignore[method-assign]


def test_a_fault_of_one_stops_all_with_its_sentence(corpus, tmp_path):
    config = small_run(tmp_path / "run", corpus, **{"mesh.replica": 2, "training.eval_every": 0})
    assert run_job(of_job(config, 2, free_port()), before_0=fill_the_disk) == [3, 3]
    fault = r"\[Errno 28\] No space left on device; .* holds no checkpoint yet"
    assert re.search(rf"^stopped: {fault}$", said(config, 0), re.MULTILINE)
    assert re.search(rf"^stopped with process 0: {fault}$|^stopped: the collectives broke off", said(config, 1), re.MULTILINE)
    assert "Traceback" not in said(config, 0) + said(config, 1)


def test_one_that_is_killed_stops_the_others(corpus, tmp_path):
    config = small_run(tmp_path / "run", corpus, **{"mesh.replica": 2, "training.eval_every": 0, "training.num_steps": 10000})

    def kill_one(started: list[ForkServerProcess]) -> None:
        wait_until(lambda: trains(config), started[0])
        started[1].kill()

    assert run_job(of_job(config, 2, free_port()), kill_one) == [3, -signal.SIGKILL]
    assert re.search(
        r"^stopped: the collectives broke off, as they do when another process is lost \(.*\); ", said(config, 0), re.MULTILINE
    )
    assert "Traceback" not in said(config, 0)


# ---- not started ----


@pytest.mark.parametrize(
    ("field", "other", "words"),
    [
        ("training.num_steps", 40, "training.num_steps is 30 on process 0 (HOST) and 40 on process 1 (HOST); start them all alike"),
        ("seed", 1, "seed is 0 on process 0 (HOST) and 1 on process 1 (HOST); start them all alike"),
        ("run_dir", "OTHER", "run_dir is RUN on process 0 (HOST) and OTHER on process 1 (HOST); start them all alike"),
    ],
)
def test_processes_started_differently_are_refused(corpus, tmp_path, field, other, words):
    first, second = of_job(small_run(tmp_path / "run", corpus, **{"mesh.replica": 2}), 2, free_port())
    second = changed(second, **{field: str(tmp_path / "other") if other == "OTHER" else other})
    assert run_job([first, second]) == [2, 2]
    for replaced, by in (("HOST", os.uname().nodename), ("RUN", first.run_dir), ("OTHER", second.run_dir)):
        words = words.replace(replaced, str(by))
    for config, process in ((first, 0), (second, 1)):
        assert said(config, process) == f"error: the processes of this job differ: {words}"
    assert not Path(str(first.run_dir)).exists()


def set_variables(values: dict[str, str]) -> None:
    os.environ.update(values)


@pytest.mark.parametrize(
    "variables",
    [
        {"RANK": "{}", "WORLD_SIZE": "2", "LOCAL_RANK": "{}"},
        {"SLURM_PROCID": "{}", "SLURM_NTASKS": "2", "SLURM_LOCALID": "{}", "SLURM_STEP_ID": "0"},
        {"OMPI_COMM_WORLD_RANK": "{}", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "{}"},
    ],
)
def test_a_launcher_makes_the_job(corpus, tmp_path, variables):
    """Told by a difference, which is found once both are there."""
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    environments = [{name: value.format(process) for name, value in variables.items()} | address for process in (0, 1)]
    configs = [
        small_run(tmp_path / name, corpus, **{"mesh.replica": 2, "runtime.num_cpu_devices": 1, "seed": seed})
        for name, seed in (("first", 4), ("second", 5))
    ]
    started = [start(config, partial(set_variables, environment)) for config, environment in zip(configs, environments, strict=True)]
    assert [finish(process) for process in started] == [2, 2]
    for config in configs:
        assert re.search("seed is 4 on process 0 .* and 5 on process 1 ", said(config, 0))


def test_another_corpus_under_the_same_name_is_refused(corpus, tmp_path):
    """As on a node with an old copy."""
    configs = of_job(small_run(tmp_path / "run", Path("corpus"), **{"mesh.replica": 2, "training.eval_every": 0}), 2, free_port())
    for process in (0, 1):
        (tmp_path / str(process)).mkdir()
        write_corpus(tmp_path / str(process) / "corpus", seed=process)
    assert run_job(configs, before_0=partial(os.chdir, tmp_path / "0"), before_1=partial(os.chdir, tmp_path / "1")) == [2, 2]
    for process in (0, 1):
        assert re.fullmatch(
            r"error: the processes of this job differ: the content of data.train is [0-9a-f]{16} on process 0 \(\S+\) and [0-9a-f]{16} on "
            r"process 1 \(\S+\), the content of data.validation is .*; start them all alike",
            said(configs[0], process),
        )


def test_a_directory_of_ones_own_is_refused(corpus, tmp_path):
    configs = of_job(small_run(Path("run/new"), corpus, **{"mesh.replica": 2}), 2, free_port())
    configs = [changed(config, **{"runtime.start_timeout": 4.0}) for config in configs]
    for process in (0, 1):
        (tmp_path / str(process)).mkdir()
    (tmp_path / "run").mkdir()  # for what they print
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        codes = run_job(configs, before_0=partial(os.chdir, tmp_path / "0"), before_1=partial(os.chdir, tmp_path / "1"))
        assert codes == [2, 2]
        for process in (0, 1):
            assert re.fullmatch(
                r"error: the run directory run/new of process 1 \(\S+\) is not that of process 0 \(\S+\); with --run-dir name one .*",
                said(configs[0], process),
            )
    assert not list(tmp_path.glob("[01]/*"))


@pytest.mark.parametrize("there", [0, 1])
def test_who_is_missing_is_said_in_time(corpus, tmp_path, there):
    configs = of_job(small_run(tmp_path / "run", corpus, **{"mesh.replica": 2}), 2, free_port())
    alone = changed(configs[there], **{"runtime.start_timeout": 1.0})
    assert run_job([alone]) == [3]
    address, source = alone.runtime.coordinator, f"set explicitly: runtime.process_id is {there}, runtime.num_processes is 2"
    expected = (
        f"stopped: process 1 of 2 did not come to {address} within 1 s ({source}); see why, or raise runtime.start_timeout",
        f"stopped: process 1 did not find process 0 at {address} within 1 s: Connection refused ({source}); "
        "see why it is not there, or raise runtime.start_timeout",
    )
    assert said(alone, there) == expected[there]
    assert not Path(str(alone.run_dir)).exists()


# ---- fed ----


class Counting:
    """Samples, and which of them were read."""

    def __init__(self, samples):
        self.samples, self.num_samples, self.read = samples, samples.num_samples, set()

    def __getitem__(self, index):
        self.read.add(index)
        return self.samples[index]


@pytest.mark.parametrize(
    ("degrees", "processes", "expected"),
    [
        ({"replica": 4, "data": 2}, 4, [[0, 1], [2, 3], [4, 5], [6, 7]]),
        ({"pipe": 4, "tensor": 2}, 4, [list(range(8))] * 4),
        ({"pipe": 2, "replica": 2, "tensor": 2}, 4, [[0, 1, 2, 3], [4, 5, 6, 7]] * 2),
        ({"pipe": 2, "data": 4}, 4, [[0, 1, 2, 3], [4, 5, 6, 7]] * 2),
    ],
)
def test_each_process_reads_the_rows_of_its_devices(monkeypatch, degrees, processes, expected):
    placement = NamedSharding(build_mesh(MeshConfig(**degrees)), BATCH_SPEC)
    whole = next(training_batches(Synthetic(1), global_batch_size=8, prefetch=1, seed=3, start_sample=5, **SIZES))
    for process, rows in enumerate(expected):
        mine = placement.mesh.devices.ravel()[process * 2 : process * 2 + 2]
        held = {device: index for device, index in placement.devices_indices_map((8,)).items() if device in mine}
        assert rows_here(SimpleNamespace(addressable_devices_indices_map=lambda _, held=held: held), 8) == rows  # type: ignore[arg-type]
        counting = Counting(samples_of(Synthetic(1), *SIZES.values()))
        with monkeypatch.context() as patch:
            patch.setattr(corpora, "samples_of", lambda *_, counting=counting: counting)
            batches = training_batches(Synthetic(1), global_batch_size=8, prefetch=1, seed=3, start_sample=5, rows=rows, **SIZES)
            batch = next(batches)
            batches.close()
        assert batch.keys() == whole.keys()
        assert all((batch[name] == whole[name][rows]).all() for name in whole)
        assert counting.read >= {sample_order(3, 5 + row, 1 << 16)[1] for row in rows}
        assert not counting.read & {sample_order(3, 5 + row, 1 << 16)[1] for row in range(8) if row not in rows}
    placed = spread(whole, placement, 8, list(range(8)))
    assert all((np.asarray(placed[name]) == whole[name]).all() and placed[name].sharding == placement for name in whole)


@pytest.mark.parametrize("rows", [[0, 1], [2, 3], [1, 3]])
def test_validation_rows_are_those_of_the_whole_batch(rows):
    whole, part = (list(validation_batches(Synthetic(1), batch_size=4, num_samples=9, rows=wanted, **SIZES)) for wanted in (None, rows))
    assert len(whole) == len(part) == 3
    for batch, all_rows in zip(part, whole, strict=True):
        assert all((batch[name] == all_rows[name][rows]).all() and batch[name].dtype == all_rows[name].dtype for name in batch)
