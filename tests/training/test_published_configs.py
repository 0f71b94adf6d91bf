"""Each shipped gpt13b config, its width cut to 64, trains on 32 simulated devices what one device trains."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from giantjax.command_line import parse_run, preset
from giantjax.config import MeshConfig, PipelineConfig, RunConfig
from giantjax.parallel.schedule import in_flight, schedule_of_name, zero_bubble
from giantjax.parallel.schedule_file import write_schedule
from tests.helpers import FORWARD, GRADIENT, relative_error
from tests.training.runs import PRETRAIN, changed, measured, read_state, train_here

# One worker: 32 devices at a time are enough for its cores.
pytestmark = pytest.mark.xdist_group("processes")

STEPS = 3
CUT = (
    *("--model.hidden-size", "64", "--model.num-heads", "8", "--model.num-layers", "8", "--model.sequence-length", "16"),
    *("--model.vocabulary-size", "512", "--training.global-batch-size", "32", "--training.num-steps", str(STEPS)),
    *("--training.eval-every", "0", "--optimizer.warmup", "0", "--optimizer.learning-rate", "1e-3", "--optimizer.epsilon", "1e-3"),
    *("--data.train", "synthetic", "--checkpoint.every", "0"),
)
"""Eight layers for the stages and the schedule to have something to do; a rate at which three steps move every parameter, and an
epsilon of the size of the gradients, for Adam would make the rounding of the smallest ones as large as the largest."""


def test_the_custom_strategy_is_whole() -> None:
    """Its file is a schedule for its stages and microbatches."""
    config = preset("custom_strategy")
    schedule = schedule_of_name(config.pipeline.schedule, config.mesh.pipe, config.num_microbatches, config.pipeline.num_chunks)
    assert schedule.splits_weight and in_flight(schedule).max() == 7


def run_of(name: str, folder: Path, *more: str) -> tuple[RunConfig, list[str]]:
    """The cut run of a config, and the command line that starts it."""
    words = ["--config", name, *CUT, "--run-dir", str(folder / name), *more]
    return parse_run(words, ""), [sys.executable, str(PRETRAIN), *words]


@pytest.fixture(scope="module")
def one_device(tmp_path_factory) -> RunConfig:
    """The same run on one device, its batch whole."""
    config, _ = run_of("gpt13b", tmp_path_factory.mktemp("one"), "--pipeline.microbatch-size", "32")
    config = dataclasses.replace(config, mesh=MeshConfig(), pipeline=PipelineConfig())
    config = changed(config, **{"optimizer.decay": STEPS * 32})
    assert train_here(config) == 0
    return config


@pytest.mark.parametrize(
    ("name", "more", "mesh"),
    [
        ("gpt13b", ("--runtime.cluster", "v100x4-tcp100"), "automatic mesh for 32 V100-32GB: "),
        pytest.param("gpt13b_v100x4", ("--pipeline.microbatch-size", "4"), "mesh pipe 8 x tensor 4", marks=pytest.mark.slow),
        pytest.param("gpt13b_a100x4", ("--pipeline.microbatch-size", "4"), "mesh pipe 4 x data 2 x tensor 4", marks=pytest.mark.slow),
        pytest.param("gpt13b_megatron", (), "mesh pipe 4 x data 2 x tensor 4", marks=pytest.mark.slow),
        pytest.param("gpt13b_zero3", ("--pipeline.microbatch-size", "1"), "mesh pipe 4 x data 8", marks=pytest.mark.slow),
        pytest.param(
            "custom_strategy",
            ("--pipeline.microbatch-size", "4", "--pipeline.partition", "manual:3,2,2,1"),
            "mesh pipe 4 x data 2 x tensor 4",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_published_config_trains_as_one_device_does(name, more, mesh, one_device, tmp_path):
    cache = jax.config.values["jax_compilation_cache_dir"]
    if name == "custom_strategy":
        # Its own file is for as many microbatches as the whole run has.
        write_schedule(zero_bubble(4, 4), tmp_path / "mine.csv")
        more = (*more, "--pipeline.schedule", str(tmp_path / "mine.csv"))
    decay = ("--optimizer.decay", str(STEPS * 32))
    config, command = run_of(name, tmp_path, *more, *decay, "--runtime.num-cpu-devices", "32", "--runtime.compilation-cache", cache)
    environment = {"NCCL_SOCKET_NTHREADS": "2"} | {key: value for key, value in os.environ.items() if not key.startswith("NCCL")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert mesh in done.stdout and "32 of 32 cpu devices" in done.stdout
    if "--runtime.cluster" in more:
        said = "transport of v100x4-tcp100: NCCL_IB_DISABLE=1 NCCL_NSOCKS_PERTHREAD=4; NCCL_SOCKET_NTHREADS=2 stays as it was set"
        assert said in done.stdout and "NCCL:" not in done.stdout
    for record, expected in zip(measured(config), measured(one_device), strict=True):
        assert record["loss"] == pytest.approx(expected["loss"], rel=FORWARD)
        assert record["grad_norm"] == pytest.approx(expected["grad_norm"], rel=GRADIENT)
    state, expected_state = read_state(config, STEPS), read_state(one_device, STEPS)
    assert state.keys() == expected_state.keys()
    params = [path for path in state if path.startswith("['params']")]
    assert len(params) > 10
    far = {path: error for path in params if (error := relative_error(state[path], expected_state[path])) > GRADIENT}
    assert not far
