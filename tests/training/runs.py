"""Whole runs for tests: small ones, in this process or in another that may be killed."""

import dataclasses
import functools
import json
import multiprocessing
import os
import runpy
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import numpy as np
import orbax.checkpoint as ocp

from giantjax.command_line import preset
from giantjax.config import CheckpointConfig, DataConfig, LoggingConfig, ModelConfig, OptimizerConfig, RunConfig, TrainingConfig
from giantjax.data.indexed import TokenizerRecord
from giantjax.data.indexed_writer import write_indexed
from giantjax.data.sources import open_sources
from giantjax.fields import from_dict, leaves
from giantjax.training import loop, parts
from giantjax.training.run_directory import check_run_directory, directory_of
from giantjax.training.stop import SIGNALS

PRETRAIN = Path(__file__).parents[2] / "scripts" / "pretrain.py"
EXACT = ("step", "loss", "grad_norm", "learning_rate", "consumed_samples", "consumed_tokens", "validation_loss", "loss_scale", "skipped")
"""What a record holds that does not depend on the machine."""
PEAK_FLOPS = 1e9
"""Of one device; to measure it takes longer than these runs."""

# A server that has imported everything and started nothing: what is forked from it begins three seconds of work later.
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["giantjax.training.loop", "grain.experimental", "tests.training.runs"])


def write_corpus(prefix: Path, seed: int = 0) -> Path:
    """An indexed pair of bytes that a model can learn something of, in three documents."""
    random = np.random.default_rng(seed)
    ids = np.cumsum(random.choice([1, 1, 1, 2, 7], 3000)) % 50 + 65
    with write_indexed(str(prefix), TokenizerRecord("bytes", 257, 256)) as writer:
        for part in np.array_split(ids, 3):
            writer.append(np.append(part, 256))
            writer.end_document()
    return prefix


def small_run(run_dir: Path, corpus: Path, **changes: Any) -> RunConfig:
    """Thirty steps of a narrow model, saved after every 6 and evaluated after every 8, but for `changes` as `changed` has them."""
    config = RunConfig(
        name="small",
        model=ModelConfig(num_layers=2, hidden_size=32, num_heads=2, sequence_length=16, vocabulary_size=257, vocabulary_multiple=8),
        training=TrainingConfig(num_steps=30, global_batch_size=8, eval_every=8, eval_samples=20),
        # A decay of its own, so that the learning rate does not depend on the number of steps.
        optimizer=OptimizerConfig(learning_rate=3e-3, warmup=5, decay=40),
        data=DataConfig(train=(str(corpus),), validation=str(corpus)),
        checkpoint=CheckpointConfig(every=6),
        logging=LoggingConfig(every=1),
        run_dir=str(run_dir),
    )
    return changed(config, **changes)


def changed(config: RunConfig, **changes: Any) -> RunConfig:
    """`config` with other values of some leaves: `changed(config, **{"training.num_steps": 5})`."""
    values = dataclasses.asdict(config)
    for path, value in changes.items():
        *groups, name = path.split(".")
        functools.reduce(dict.__getitem__, groups, values)[name] = value
    return from_dict(RunConfig, values)


def train_here(config: RunConfig, nccl_log: Path | None = None) -> int:
    """Train as pretrain.py does, in this process; the exit code. What was compiled before is not compiled again."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        run = check_run_directory(config)
        with (
            mock.patch.object(loop, "peak_flops", _peak_flops),
            mock.patch.object(parts, "build_train_step", lambda *a, **k: _train_step_once(config, *a, **k)),
            mock.patch.object(loop, "build_eval_step", lambda *a, **k: _eval_step_once(config, *a, **k)),
        ):
            return loop.train(config, run, *open_sources(config), nccl_log=nccl_log)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _peak_flops(*_: Any) -> tuple[float, str]:
    return PEAK_FLOPS, "not measured"


class CompiledOnce:
    """A train step that keeps the program it was first compiled to for a batch of such arrays."""

    def __init__(self, step: jax.stages.Wrapped):
        self._step = step
        self._programs: dict[Any, jax.stages.Compiled] = {}
        self._latest: Any = None

    def lower(self, state: Any, batch: dict[str, jax.Array]) -> "CompiledOnce":
        self._latest = tuple((name, array.shape) for name, array in batch.items())
        if self._latest not in self._programs:
            self._programs[self._latest] = self._step.lower(state, batch).compile()
        return self

    def compile(self) -> jax.stages.Compiled:
        return self._programs[self._latest]


_made: dict[tuple[str, RunConfig], Any] = {}


def _once(what: str, config: RunConfig, make: Callable[[], Any]) -> Any:
    """What `make` made for the first configuration that has the same program."""
    assert config.optimizer.decay, "else the learning rate depends on the number of steps"
    same = dataclasses.replace(config, run_dir=None, data=DataConfig(), checkpoint=CheckpointConfig(), logging=LoggingConfig())
    if what == "eval":
        same = dataclasses.replace(same, optimizer=OptimizerConfig())
    key = (what, changed(same, **{"training.num_steps": 1, "training.eval_every": 0, "training.eval_samples": 0}))
    if key not in _made:
        _made[key] = make()
    return _made[key]


# Looked up here, before train_here puts its own in their place.
_build_train_step, _build_eval_step = parts.build_train_step, loop.build_eval_step


def _train_step_once(config: RunConfig, *rest: Any, **choices: Any) -> CompiledOnce:
    return _once("train", config, lambda: CompiledOnce(_build_train_step(*rest, **choices)))


def _eval_step_once(config: RunConfig, *rest: Any, **choices: Any) -> jax.stages.Wrapped:
    return _once("eval", config, lambda: _build_eval_step(*rest, **choices))


def copy_of(whole: RunConfig, run_dir: Path, step: int, **changes: Any) -> RunConfig:
    """The run `whole` in another directory as a kill after `step`, which it saved, would have left it, with `changes` to go on by."""
    shutil.copytree(directory_of(whole).path, run_dir)
    config = changed(whole, run_dir=str(run_dir), **changes)
    for saved in saved_steps(config):
        if saved > step:
            shutil.rmtree(directory_of(config).checkpoints / str(saved))
    return config


def log_of(config: RunConfig, process_id: int = 0) -> Path:
    """Where `start` sends what the run, or one of its processes, prints."""
    return Path(f"{config.run_dir}{f'.{process_id}' if process_id else ''}.log")


def start(config: RunConfig, before: Callable[[], object] | None = None) -> ForkServerProcess:
    """Start pretrain.py in another process, after `before` there; its output goes to a new `log_of(config)`."""
    log = log_of(config, config.runtime.process_id or 0)
    log.unlink(missing_ok=True)
    runtime = {
        "runtime.num_cpu_devices": config.runtime.num_cpu_devices or config.mesh.num_devices,
        "runtime.compilation_cache": jax.config.values["jax_compilation_cache_dir"],
    }
    default, words = leaves(preset("gpt_tiny")), ["--config", "gpt_tiny"]
    for path, value in leaves(changed(config, **runtime)).items():
        if value != default[path]:
            words += ["--" + path.replace("_", "-"), *(value if isinstance(value, tuple) else (str(value),))]
    process = _CONTEXT.Process(target=_pretrain, args=(words, log, before), daemon=True)
    process.start()
    return process


def of_job(config: RunConfig, num_processes: int, port: int) -> list[RunConfig]:
    """`config` as each process of a job on this machine is given it."""
    job = {
        "runtime.coordinator": f"127.0.0.1:{port}",
        "runtime.num_processes": num_processes,
        "runtime.num_cpu_devices": config.runtime.num_cpu_devices or config.mesh.num_devices // num_processes,
        "runtime.start_timeout": 60.0,
    }
    return [changed(config, **job, **{"runtime.process_id": process}) for process in range(num_processes)]


def free_port() -> int:
    """A port at which nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def _pretrain(arguments: list[str], log: Path, before: Callable[[], object] | None) -> None:
    with log.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.argv = [str(PRETRAIN), *arguments]
    if before:
        before()
    with mock.patch.object(loop, "peak_flops", _peak_flops):
        runpy.run_path(str(PRETRAIN), run_name="__main__")


def finish(process: ForkServerProcess, seconds: float = 120) -> int:
    """The exit code of a started process, negative for a signal."""
    process.join(seconds)
    assert process.exitcode is not None, f"still running after {seconds} s"
    return process.exitcode


def wait_until(condition: Callable[[], bool], process: ForkServerProcess, seconds: float = 120) -> None:
    """Wait for `condition` to hold while the process runs, looking every millisecond."""
    end = time.monotonic() + seconds
    while not condition():
        assert process.is_alive(), f"it ended before that, with exit code {process.exitcode}"
        assert time.monotonic() < end, f"not so after {seconds} s"
        time.sleep(0.001)


def saved_steps(config: RunConfig) -> list[int]:
    """Steps of the checkpoints on disk, the newest last."""
    return sorted(int(path.name) for path in directory_of(config).checkpoints.glob("*") if path.name.isdecimal())


def half_saved(config: RunConfig) -> dict[str, float]:
    """Folders of saves that have begun and not ended, and when each was last written to, in seconds of the clock."""
    found = {}
    for path in directory_of(config).checkpoints.glob("*.orbax-checkpoint-tmp*"):
        try:
            found[path.name] = path.stat().st_mtime
        except FileNotFoundError:
            continue  # It ended in this moment.
    return found


def read_state(config: RunConfig, step: int) -> dict[str, np.ndarray]:
    """Every array of the state saved at `step`, by its path."""
    folder = directory_of(config).checkpoints.absolute() / str(step) / "state"
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        tree = checkpointer.metadata(folder).item_metadata.tree
        as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
        state = checkpointer.restore(folder, args=ocp.args.PyTreeRestore(restore_args=as_numpy))
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(state)}


def records_of(config: RunConfig) -> list[dict[str, Any]]:
    """Every record of metrics.jsonl: a line of JSON for each step from 1, none torn, double or missing."""
    text = directory_of(config).metrics.read_text()
    assert text.endswith("\n")
    records = [json.loads(line, parse_constant=_refuse) for line in text.splitlines()]
    assert [record["step"] for record in records] == list(range(1, len(records) + 1))
    return records


def _refuse(word: str) -> None:
    raise AssertionError(f"{word} is not JSON")


def measured(config: RunConfig) -> list[dict[str, Any]]:
    """`records_of`, without what depends on the machine."""
    return [{name: value for name, value in record.items() if name in EXACT} for record in records_of(config)]


def assert_same_run(config: RunConfig, whole: RunConfig) -> None:
    """Every number measured and every bit of the last state is that of the run `whole`."""
    assert measured(config) == measured(whole)
    last = saved_steps(whole)[-1]
    assert saved_steps(config)[-1] == last
    state, expected = read_state(config, last), read_state(whole, last)
    assert state.keys() == expected.keys()
    different = [path for path, leaf in expected.items() if leaf.dtype != state[path].dtype or leaf.tobytes() != state[path].tobytes()]
    assert not different
