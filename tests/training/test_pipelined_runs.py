"""Whole runs under the choices of `pipeline`: the same numbers, and a measured partition that a run keeps."""

import json

import pytest

from giantjax.config import RunConfig
from giantjax.parallel.partition import Weights
from giantjax.training import profile
from giantjax.training.run_directory import directory_of, read_record
from tests.helpers import FORWARD, relative_error
from tests.training.runs import changed, copy_of, records_of, small_run, train_here

# One worker, for all are compared with one run.
pytestmark = pytest.mark.xdist_group("pipelined")

SHORT = {"model.num_layers": 4, "training.num_steps": 4, "training.eval_every": 4, "checkpoint.every": 2, "logging.tensorboard": False}


@pytest.fixture(scope="module")
def plain(tmp_path_factory, corpus) -> RunConfig:
    config = small_run(tmp_path_factory.mktemp("plain") / "run", corpus, **SHORT)
    assert train_here(config) == 0
    return config


def curves(config: RunConfig) -> list[list[float]]:
    records = records_of(config)
    return [[record[name] for record in records] for name in ("loss", "grad_norm")] + [[records[-1]["validation_loss"]]]


def test_chunks_and_a_shared_head_change_no_number(plain, tmp_path, capsys):
    config = changed(
        plain,
        run_dir=str(tmp_path / "run"),
        **{"mesh.pipe": 2, "pipeline.schedule": "interleaved", "pipeline.num_chunks": 2, "pipeline.num_microbatches": 4},
        **{"pipeline.head": "shared", "pipeline.partition": "type:transformer"},
    )
    assert train_here(config) == 0
    assert relative_error(curves(config), curves(plain)) <= 10 * FORWARD
    assert "partition type:transformer: 1, 1, 1, 1 layers" in capsys.readouterr().out


@pytest.fixture
def weights(monkeypatch) -> list[Weights]:
    """What is measured from now on, the last first."""
    told: list[Weights] = []
    monkeypatch.setattr(profile, "measured_weights", lambda *_, **__: told.pop())
    return told


def test_a_measured_partition_is_kept(plain, tmp_path, weights, capsys):
    weights.append(Weights((1_000_000,) * 4, last=1_500_000))
    options = {"mesh.pipe": 2, "pipeline.num_microbatches": 2, "pipeline.partition": "profile", "pipeline.head": "last"}
    config = changed(plain, run_dir=str(tmp_path / "run"), **options)
    assert train_here(config) == 0
    says = "partition manual:3,1: 3, 1 layers; measured: a block takes 1 ms a microbatch, the head 1.5 ms"
    assert says in capsys.readouterr().out
    assert relative_error(curves(config), curves(plain)) <= 10 * FORWARD
    run = directory_of(config)
    assert read_record(run, run.config, RunConfig).pipeline.partition == "manual:3,1"
    assert json.loads(run.partition.read_text())["partition"] == "manual:3,1"
    # Nothing is measured again, and the rest of the run is what it would have been.
    resumed = copy_of(config, tmp_path / "resumed", 2)
    assert train_here(resumed) == 0
    assert says in capsys.readouterr().out
    assert curves(resumed) == curves(config)
    # Other sizes are measured anew.
    weights.append(Weights((1_000_000,) * 4))
    smaller = changed(copy_of(config, tmp_path / "smaller", 2), **{"pipeline.num_microbatches": 4})
    assert train_here(smaller) == 0
    assert "partition manual:2,2: 2, 2 layers; measured: a block takes 1 ms" in capsys.readouterr().out
