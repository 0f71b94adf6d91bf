"""Whole runs for tests: small ones, in this process or in another that may be killed."""

import contextlib
import dataclasses
import json
import multiprocessing
import os
import runpy
import signal
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import numpy as np
import orbax.checkpoint as ocp

from giantjax.command_line import preset
from giantjax.config import RunConfig
from giantjax.data.indexed import TokenizerRecord
from giantjax.data.indexed_writer import write_indexed
from giantjax.data.sources import open_sources
from giantjax.fields import from_dict, leaves
from giantjax.training import loop
from giantjax.training.run_directory import RunDirectory, check_run_directory, directory_of
from giantjax.training.stop import SIGNALS

PRETRAIN = Path(__file__).parents[2] / "scripts" / "pretrain.py"
MEASURED = ("step", "loss", "grad_norm", "learning_rate", "consumed_samples", "consumed_tokens", "validation_loss", "loss_scale", "skipped")
"""What a record holds that does not depend on the machine."""
PEAK_FLOPS = 1e9
"""Of one device, for runs in this process."""
UNOPTIMIZED = "--xla_backend_optimization_level=0"

# A server that has imported everything and started nothing: a process forked from it begins three seconds of work later.
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["giantjax.training.loop", "grain.experimental", "tests.training.runs"])


def write_corpus(prefix: Path, seed: int = 0) -> Path:
    """An indexed pair of bytes that a model can learn something of, in three documents."""
    random = np.random.default_rng(seed)
    ids = np.cumsum(random.choice([1, 1, 1, 2, 7], 3000)) % 50 + 65
    with write_indexed(str(prefix), TokenizerRecord("bytes", 257, 256)) as writer:
        for part in np.array_split(ids, 3):
            writer.append(part)
            writer.append(np.array([256]))
            writer.end_document()
    return prefix


def small_run(run_dir: Path, corpus: Path, changes: dict[str, Any] | None = None) -> RunConfig:
    """gpt_tiny with two narrow layers on `corpus`, and the leaves of `changes`, such as `{"training.num_steps": 5}`."""
    sizes = {"model.num_layers": 2, "model.hidden_size": 32, "model.num_heads": 2, "model.sequence_length": 16}
    training = {"training.num_steps": 12, "training.global_batch_size": 8, "training.eval_every": 5, "training.eval_samples": 20}
    files = {"data.train": (str(corpus),), "data.validation": str(corpus), "run_dir": str(run_dir)}
    other = {"optimizer.warmup": 5, "checkpoint.every": 4, "logging.every": 1}
    return changed(preset("gpt_tiny"), sizes | training | files | other | (changes or {}))


def changed(config: RunConfig, changes: dict[str, Any]) -> RunConfig:
    """`config` with other values of the leaves in `changes`."""
    values = dataclasses.asdict(config)
    for path, value in changes.items():
        *groups, name = path.split(".")
        group = values
        for part in groups:
            group = group[part]
        group[name] = value
    return from_dict(RunConfig, values)


def train_here(config: RunConfig) -> int:
    """Train as pretrain.py does, in this process; the exit code."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        with mock.patch.object(loop, "peak_flops", lambda *_: (PEAK_FLOPS, "set by the test")):
            return loop.train(config, check_run_directory(config), *open_sources(config))
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def arguments_of(config: RunConfig) -> list[str]:
    """The command line of `config`."""
    default, words = leaves(preset("gpt_tiny")), ["--config", "gpt_tiny"]
    for path, value in leaves(config).items():
        if value != default[path]:
            words += ["--" + path.replace("_", "-"), *(value if isinstance(value, tuple) else (str(value),))]
    return words


def log_of(config: RunConfig) -> Path:
    """Where `start` sends what the run prints."""
    return Path(f"{config.run_dir}.log")


def start(config: RunConfig) -> ForkServerProcess:
    """Start pretrain.py in another process, whose output goes to a new `log_of(config)`."""
    cached = changed(config, {"runtime.compilation_cache": jax.config.jax_compilation_cache_dir})
    process = _CONTEXT.Process(target=_pretrain, args=(arguments_of(cached), log_of(config)), daemon=True)
    # The flags of the tests are for programs that run once; the server keeps those that it is first started with.
    with mock.patch.dict(os.environ, {"XLA_FLAGS": os.environ.get("XLA_FLAGS", "").replace(UNOPTIMIZED, "")}):
        process.start()
    return process


def _pretrain(arguments: list[str], log: Path) -> None:
    with log.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.argv = [str(PRETRAIN), *arguments]
    runpy.run_path(str(PRETRAIN), run_name="__main__")


def finish(process: ForkServerProcess, seconds: float = 120) -> int | None:
    """The exit code of a started process, negative for a signal."""
    process.join(seconds)
    assert process.exitcode is not None, f"still running after {seconds} s"
    return process.exitcode


def wait_until(condition: Callable[[], bool], process: ForkServerProcess, seconds: float = 120) -> bool:
    """Wait for `condition`, looking every millisecond; False where the process ended before."""
    end = time.monotonic() + seconds
    while not condition():
        if not process.is_alive():
            return condition()
        assert time.monotonic() < end, f"not so after {seconds} s"
        time.sleep(0.001)
    return True


def saved_steps(config: RunConfig) -> list[int]:
    """Steps of the checkpoints on disk, the newest last."""
    return sorted(int(path.name) for path in directory_of(config).checkpoints.glob("*") if path.name.isdecimal())


def read_state(config: RunConfig, step: int) -> dict[str, np.ndarray]:
    """Every array of the state saved at `step`, by its path."""
    folder = directory_of(config).checkpoints.absolute() / str(step) / "state"
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        tree = checkpointer.metadata(folder).item_metadata.tree
        as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
        state = checkpointer.restore(folder, args=ocp.args.PyTreeRestore(restore_args=as_numpy))
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(state)}


def records_of(run: RunDirectory | RunConfig) -> list[dict[str, Any]]:
    """Every record of metrics.jsonl, none of whose lines may be torn, double or missing."""
    path = (directory_of(run) if isinstance(run, RunConfig) else run).metrics
    text = path.read_text()
    assert text.endswith("\n")
    records = [json.loads(line, parse_constant=_refuse) for line in text.splitlines()]
    assert [record["step"] for record in records] == list(range(1, len(records) + 1))
    return records


def _refuse(word: str) -> None:
    raise AssertionError(f"{word} is not JSON")


def measured(run: RunDirectory | RunConfig) -> list[dict[str, Any]]:
    """`records_of`, without what depends on the machine."""
    return [{name: value for name, value in record.items() if name in MEASURED} for record in records_of(run)]


@contextlib.contextmanager
def nothing_left_running(process: ForkServerProcess) -> Iterator[None]:
    """Kill the process at the end, should a check before it have failed."""
    try:
        yield
    finally:
        process.kill()
        process.join()
