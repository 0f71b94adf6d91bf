"""A run that was killed, stopped, moved or damaged goes on as if nothing had happened, or says why it cannot."""

import errno
import json
import math
import os
import random
import re
import resource
import shutil
import signal
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.context import ForkServerProcess

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from giantjax.checkpoint import CheckpointStore, Position
from giantjax.command_line import run_main
from giantjax.config import CheckpointConfig, RunConfig
from giantjax.errors import InputError, TrainingFault
from giantjax.training.bookkeeper import Bookkeeper
from giantjax.training.metrics import MetricsFile, read_metrics
from giantjax.training.run_directory import directory_of
from giantjax.training.stop import SIGNALS, StopRequest
from tests.helpers import FORWARD, relative_error
from tests.training.runs import (
    assert_same_run,
    changed,
    copy_of,
    finish,
    half_saved,
    log_of,
    measured,
    read_state,
    records_of,
    saved_steps,
    small_run,
    start,
    train_here,
    wait_until,
    write_corpus,
)

# One worker, for one uninterrupted run serves all.
pytestmark = pytest.mark.xdist_group("resume")

RATE = 3e-3
"""Of `small_run`."""
TOO_HIGH = {"optimizer.learning_rate": 1e39, "checkpoint.accept_change": ("optimizer.learning_rate",)}
"""Beyond the largest fp32 number: after one step the parameters are infinite."""


# ---- killed ----

Interruption = Callable[[ForkServerProcess, RunConfig], None]
"""Waits for its moment in a started run, and ends it."""


def trains(config: RunConfig, num_steps: int = 1) -> bool:
    """Whether this many steps were printed."""
    return log_of(config).exists() and len(re.findall(rb"^step \d+/", log_of(config).read_bytes(), re.MULTILINE)) >= num_steps


def says(words: str) -> Callable[[RunConfig], bool]:
    return lambda config: log_of(config).exists() and words in log_of(config).read_text(errors="replace")


def kill(when: Callable[[RunConfig], bool], delay: float = 0.0) -> Interruption:
    """SIGKILL, `delay` seconds after `when` holds."""

    def interrupt(process: ForkServerProcess, config: RunConfig) -> None:
        wait_until(lambda: when(config), process)
        process.join(delay)
        process.kill()

    return interrupt


def kill_in_save(process: ForkServerProcess, config: RunConfig) -> None:
    """SIGKILL as soon as a save has begun."""
    wait_until(lambda: trains(config), process)
    # A folder that an earlier kill left is older.
    begin = time.time()
    wait_until(lambda: any(touched > begin for touched in half_saved(config).values()), process)
    process.kill()


def interrupted(config: RunConfig, interruptions: list[Interruption]) -> tuple[list[int], int]:
    """Start `config` again and again, interrupted in these ways: the exit codes, and how many ends fell into a save."""
    codes, in_save = [], 0
    for interrupt in interruptions:
        begin = time.time()
        process = start(config)
        try:
            interrupt(process, config)
            codes.append(finish(process))
        finally:
            process.kill()
        unfinished = [name for name, touched in half_saved(config).items() if touched > begin]
        in_save += bool(unfinished)
        for name in unfinished:
            # The metrics are on disk before the checkpoint that counts on them.
            step = int(name.partition(".")[0])
            assert step not in saved_steps(config)
            assert step in {record["step"] for record in read_metrics(directory_of(config).metrics)}
    return codes, in_save


def test_kills_leave_no_trace(whole, corpus, tmp_path):
    config = small_run(tmp_path / "run", corpus)
    moment = random.Random(1).uniform(0, 0.1)
    kills = [kill(says("run directory")), kill_in_save, kill(trains, moment), kill_in_save]
    codes, in_save = interrupted(config, kills)
    assert codes == [-signal.SIGKILL] * 4
    assert in_save >= 2
    assert finish(start(config)) == 0
    assert_same_run(config, whole)
    assert not half_saved(config)


@pytest.mark.slow
def test_kills_at_any_moment_leave_no_trace(corpus, tmp_path):
    """Ten kills at random moments of training, three that wait for a save, and two before there is a checkpoint, of 3 MB each."""
    larger = {"model.hidden_size": 96, "model.num_layers": 3, "model.sequence_length": 32}
    sizes = larger | {"training.num_steps": 400, "training.eval_every": 25, "checkpoint.every": 10, "optimizer.decay": 400}
    expected, config = (small_run(tmp_path / name, corpus, **sizes) for name in ("expected", "killed"))
    assert finish(start(expected), 600) == 0
    # After up to 30 steps, which are three saves, and up to two steps later: however fast the machine is at the moment.
    two_steps = 2 * float(np.mean([record["step_time_s"] for record in records_of(expected)]))
    moments = random.Random(0)
    kills: list[Interruption] = [kill(says("run directory"), moments.uniform(0, 1)), kill_in_save]
    numbers = [moments.randint(1, 30) for _ in range(10)]
    kills += [kill(partial(trains, num_steps=number), moments.uniform(0, two_steps)) for number in numbers]
    kills[5:5] = kills[8:8] = [kill_in_save]
    kills.append(kill_in_save)
    codes, in_save = interrupted(config, kills)
    assert codes == [-signal.SIGKILL] * len(kills)
    assert in_save >= 4
    left = saved_steps(config)[-1]
    assert 0 < left < 400
    print(f"{len(kills)} kills, {in_save} of them inside a save, in {left} steps; random ones after {sorted(numbers)} steps")
    assert finish(start(config), 600) == 0
    assert_same_run(config, expected)
    assert not half_saved(config)


def send(process: ForkServerProcess, number: signal.Signals) -> None:
    assert process.pid is not None
    os.kill(process.pid, number)


def test_signals_from_outside(corpus, tmp_path):
    config = small_run(tmp_path / "run", corpus)

    def interrupt_compilation(process: ForkServerProcess, config: RunConfig) -> None:
        wait_until(lambda: says("compiling")(config), process)
        send(process, signal.SIGINT)

    def terminate(process: ForkServerProcess, config: RunConfig) -> None:
        wait_until(lambda: trains(config), process)
        send(process, signal.SIGTERM)

    def terminate_twice(process: ForkServerProcess, config: RunConfig) -> None:
        terminate(process, config)
        # It is saving, so it has seen the first.
        wait_until(lambda: bool(half_saved(config)), process)
        send(process, signal.SIGTERM)

    codes, in_save = interrupted(config, [interrupt_compilation, terminate_twice, terminate])
    # Ctrl-C ends a compilation at once: there is nothing to save.
    assert codes == [-signal.SIGINT, -signal.SIGTERM, 143]
    assert in_save == 1
    step = saved_steps(config)[-1]
    assert records_of(config)[-1]["step"] == step
    assert f"stopped by SIGTERM after step {step}, which is saved" in log_of(config).read_text()
    assert "Traceback" not in log_of(config).read_text()


def test_what_a_kill_leaves_behind_is_cleaned(whole, tmp_path):
    config = copy_of(whole, tmp_path / "run", 18)
    run = directory_of(config)
    with run.metrics.open("a") as file:
        file.write('{"step": 31, "lo')
    for path in (run.metrics, run.config):
        path.with_name(path.name + ".part").write_text('{"step": 1')
    (run.checkpoints / "24.orbax-checkpoint-tmp" / "state.orbax-checkpoint-tmp").mkdir(parents=True)
    assert train_here(config) == 0
    assert_same_run(config, whole)
    assert not half_saved(config)
    assert not list(run.path.glob("*.part"))


def test_a_checkpoint_half_deleted_does_no_harm(whole, tmp_path):
    """A kill may fall into the deletion of a checkpoint that is no longer kept."""
    config = copy_of(whole, tmp_path / "run", 24)
    half_deleted = directory_of(config).checkpoints / "18"
    shutil.rmtree(half_deleted / "position")
    (half_deleted / "_CHECKPOINT_METADATA").unlink()
    (half_deleted / "state" / "manifest.ocdbt").unlink()
    assert train_here(changed(config, **{"checkpoint.keep": 2})) == 0
    assert saved_steps(config) == [24, 30]
    assert_same_run(config, whole)


@pytest.mark.parametrize(
    "tail",
    [
        b"",
        b'{"step": 4, "loss": 1.5}\n{"step": 5, "loss": 1.5}\n',
        b'{"step": 4, "lo',
        b'{"step": 4, "loss": 1.5}',
        b"\0" * 4096,
        b'{"step": 4, "loss": "\xc3',
        b"[4]\n",
    ],
)
def test_metrics_beyond_the_checkpoint_are_cut(tmp_path, tail):
    path = tmp_path / "metrics.jsonl"
    kept = b"".join(b'{"step": %d, "loss": 2.5}\n' % step for step in (1, 2, 3))
    path.write_bytes(kept + tail)
    file = MetricsFile(path, 3)
    file.append({"step": 4, "loss": math.nan})
    file.close()
    assert path.read_bytes() == kept + b'{"step": 4, "loss": null}\n'


def test_a_save_holds_one_step(tmp_path):
    """The buffers given to a save are donated to later steps while it writes."""
    step = jax.jit(lambda state: jax.tree.map(lambda leaf: leaf + 1, state), donate_argnums=0)
    state = step({"large": jnp.zeros(2**22), "small": jnp.zeros(3), "step": jnp.int32(0)})
    abstract = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), state)
    with CheckpointStore(tmp_path, CheckpointConfig()) as store:
        store.save(state, Position(1, 8, 0, "", {}))
        for _ in range(20):
            state = step(state)
        assert state["step"] == 21
        store.wait()
        for path, leaf in jax.tree_util.tree_leaves_with_path(store.read_state(1, abstract)):
            assert (np.asarray(leaf) == 1).all(), path


# ---- stopped ----


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_saves_the_step_it_meets(whole, tmp_path, number, monkeypatch, capsys):
    config = copy_of(whole, tmp_path / "run", 18)
    push = Bookkeeper.push

    def push_and_send(self, step, metrics):
        push(self, step, metrics)
        if step == 21:
            os.kill(os.getpid(), number)

    with monkeypatch.context() as patched:
        patched.setattr(Bookkeeper, "push", push_and_send)
        assert train_here(config) == 143
    assert saved_steps(config) == [18, 21]
    assert len(records_of(config)) == 21
    assert f"stopped by {signal.Signals(number).name} after step 21, which is saved" in capsys.readouterr().out
    assert train_here(config) == 0
    assert_same_run(config, whole)


@pytest.mark.parametrize("number", SIGNALS)
def test_the_second_signal_is_not_held_up(number, monkeypatch):
    seen = []
    for each in SIGNALS:
        monkeypatch.setattr(signal, "_before", signal.signal(each, lambda *_: seen.append("before")), raising=False)
    stop = StopRequest()
    os.kill(os.getpid(), number)
    assert (stop.name, seen) == (signal.Signals(number).name, [])
    os.kill(os.getpid(), signal.SIGTERM)
    assert seen == ["before"]


# ---- changed ----


def test_the_layout_may_change(whole, tmp_path):
    first = {"mesh.data": 2, "pipeline.num_microbatches": 2, "training.num_steps": 24, "training.eval_every": 0}
    config = copy_of(whole, tmp_path / "run", 18, **first)
    assert train_here(config) == 0
    config = changed(config, **{"mesh.data": 8, "pipeline.num_microbatches": 1, "training.num_steps": 30})
    assert train_here(config) == 0
    for record, expected in zip(measured(config), measured(whole), strict=True):
        assert record["loss"] == pytest.approx(expected["loss"], rel=FORWARD), record
        assert record["consumed_samples"] == expected["consumed_samples"]
        assert record["consumed_tokens"] == expected["consumed_tokens"]
    assert relative_error(read_state(config, 30), read_state(whole, 30)) < 1e-3


def test_parameters_may_be_shared_and_whole_again(tmp_path):
    """From ZeRO 3 on stages of which one is padded to one device, and back; evaluation reads shares too."""
    corpus = write_corpus(tmp_path / "corpus")
    saving = {"model.num_layers": 3, "training.num_steps": 6, "training.eval_every": 2, "checkpoint.every": 2}
    straight = small_run(tmp_path / "straight", corpus, **saving)
    assert train_here(straight) == 0
    sharing = {"mesh.pipe": 2, "mesh.data": 4, "pipeline.num_microbatches": 2, "training.zero_stage": 3}
    run = str(tmp_path / "run")
    for steps, changes in ((2, sharing), (4, {}), (6, sharing)):
        config = changed(straight, run_dir=run, **{"training.num_steps": steps}, **changes)
        assert train_here(config) == 0
    for record, expected in zip(measured(config), measured(straight), strict=True):
        for name in {"loss", "grad_norm", "validation_loss"} & expected.keys():
            assert record[name] == pytest.approx(expected[name], rel=FORWARD), record
    assert relative_error(read_state(config, 6), read_state(straight, 6)) < 1e-3


def test_what_rounding_took_off_is_resumed(tmp_path):
    """On the same mesh bit for bit; on another it is left out."""
    corpus = write_corpus(tmp_path / "corpus")
    rounding = {"training.eval_every": 0, "training.compression": "int8", "mesh.replica": 2, "training.num_steps": 8, "checkpoint.every": 4}
    straight = small_run(tmp_path / "straight", corpus, **rounding)
    assert train_here(straight) == 0
    config = changed(straight, run_dir=str(tmp_path / "run"), **{"training.num_steps": 4})
    assert train_here(config) == 0
    shutil.copytree(directory_of(config).path, tmp_path / "moved")
    config = changed(config, **{"training.num_steps": 8})
    assert train_here(config) == 0
    assert measured(config) == measured(straight)
    moved = changed(config, run_dir=str(tmp_path / "moved"), **{"mesh.data": 2})
    assert train_here(moved) == 0
    assert [r["loss"] for r in measured(moved)] == pytest.approx([r["loss"] for r in measured(straight)], rel=1e-3)
    assert any("feedback" in path for path in read_state(config, 8))


def test_a_run_may_grow_longer(whole, tmp_path):
    config = copy_of(whole, tmp_path / "run", 18, **{"training.num_steps": 24})
    assert train_here(config) == 0
    assert len(records_of(config)) == 24
    config = changed(config, **{"training.num_steps": 30})
    assert train_here(config) == 0
    assert_same_run(config, whole)


def test_another_learning_rate_is_refused_or_accepted(whole, tmp_path, capsys):
    config = copy_of(whole, tmp_path / "run", 24, **{"optimizer.learning_rate": 1e-3})
    before = directory_of(config).metrics.read_bytes()
    with pytest.raises(SystemExit) as stop:
        run_main(lambda: train_here(config))
    printed = capsys.readouterr()
    assert stop.value.code == 2
    assert "optimizer.learning_rate was 0.003 and is 0.001" in printed.err
    assert printed.err.count("\n") == 1
    assert directory_of(config).metrics.read_bytes() == before

    accepting = changed(config, **{"checkpoint.accept_change": ("optimizer.learning_rate",)})
    assert train_here(accepting) == 0
    assert "accepted change: optimizer.learning_rate was 0.003 and is 0.001" in capsys.readouterr().out
    rates, expected = (np.array([record["learning_rate"] for record in records_of(run)]) for run in (config, whole))
    np.testing.assert_array_equal(rates[:24], expected[:24])
    np.testing.assert_allclose(rates[24:] / expected[24:], 1e-3 / RATE, rtol=1e-6)
    # Once there is a checkpoint of it, the change is the run's own.
    assert train_here(config) == 0


def test_another_corpus_under_the_same_name_is_refused(tmp_path):
    prefix = write_corpus(tmp_path / "corpus")
    config = small_run(tmp_path / "run", prefix, **{"training.num_steps": 2, "training.eval_every": 0})
    assert train_here(config) == 0
    for path in tmp_path.glob("corpus.*"):
        path.unlink()
    write_corpus(prefix, seed=1)
    longer = changed(config, **{"training.num_steps": 4})
    with pytest.raises(InputError, match=rf"data.train was {prefix} \([0-9a-f]{{16}}\) and is {prefix} \([0-9a-f]{{16}}\)"):
        train_here(longer)
    assert train_here(changed(longer, **{"checkpoint.accept_change": ("data.train",)})) == 0


# ---- kept ----


@pytest.mark.parametrize(("keep", "keep_every", "left"), [(1, None, [16]), (2, 6, [6, 12, 15, 16])])
def test_the_checkpoints_asked_for_are_kept(corpus, tmp_path, keep, keep_every, left):
    kept = {"checkpoint.every": 3, "checkpoint.keep": keep, "checkpoint.keep_every": keep_every, "training.eval_every": 0}
    config = small_run(tmp_path / "run", corpus, **kept)
    # A start in between changes nothing.
    for num_steps in (7, 16):
        assert train_here(changed(config, **{"training.num_steps": num_steps})) == 0
    assert saved_steps(config) == left


def test_a_finished_run_is_left_alone(whole, tmp_path, capsys):
    config = copy_of(whole, tmp_path / "run", 30)
    files = {path: path.read_bytes() for path in directory_of(config).path.rglob("*") if path.is_file()}
    assert train_here(config) == 0
    assert capsys.readouterr().out == "nothing to do: step 30 of 30 is done\n"
    assert {path: path.read_bytes() for path in directory_of(config).path.rglob("*") if path.is_file()} == files


# ---- at fault ----


@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
def test_a_loss_that_is_not_a_number_stops_the_run(whole, tmp_path, capsys):
    config = copy_of(whole, tmp_path / "run", 18, **TOO_HIGH)
    with pytest.raises(SystemExit) as stop:
        run_main(lambda: train_here(config))
    assert stop.value.code == 3
    printed = capsys.readouterr().err
    assert printed.count("\n") == 1
    assert re.match(rf"stopped: at step 20 the loss is nan and .*; {config.run_dir} holds checkpoint 18 whole", printed)
    records = records_of(config)
    assert records[-1]["loss"] is None
    assert all(record["loss"] for record in records[:-1])
    assert saved_steps(config) == [18]
    # With the old learning rate it goes on as if that had not been tried.
    config = changed(config, **{"optimizer.learning_rate": RATE})
    assert train_here(config) == 0
    assert_same_run(config, whole)


@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
def test_a_state_that_is_not_finite_is_not_saved(whole, tmp_path):
    """The step that breaks the parameters still has a finite loss."""
    config = copy_of(whole, tmp_path / "run", 18, **TOO_HIGH, **{"checkpoint.every": 1})
    with pytest.raises(TrainingFault, match=r"after step 19 arrays of the state are not finite .* holds checkpoint 18 whole"):
        train_here(config)
    assert saved_steps(config) == [18]
    assert records_of(config)[-1]["loss"] > 0


def test_a_full_disk_stops_the_run(whole, tmp_path, monkeypatch, capsys):
    config = copy_of(whole, tmp_path / "run", 18)
    append = MetricsFile.append

    def append_while_there_is_room(self, record):
        if record["step"] == 21:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        append(self, record)

    with monkeypatch.context() as patched:
        patched.setattr(MetricsFile, "append", append_while_there_is_room)
        with pytest.raises(SystemExit) as stop:
            run_main(lambda: train_here(config))
    assert stop.value.code == 3
    expected = f"stopped: [Errno {errno.ENOSPC}] No space left on device; {config.run_dir} holds checkpoint 18 whole, and "
    assert capsys.readouterr().err.startswith(expected)
    assert train_here(config) == 0
    assert_same_run(config, whole)


def test_a_save_that_fails_stops_the_run(whole, tmp_path, monkeypatch):
    """The older checkpoint is there until the newer one is."""
    config = copy_of(whole, tmp_path / "run", 18, **{"checkpoint.keep": 1})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    save = CheckpointStore.save

    def save_in_small_files(self, state, position):
        # Room for every line of metrics.jsonl, and not for the parameters.
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**15, limits[1]))
        save(self, state, position)

    with monkeypatch.context() as patched:
        patched.setattr(CheckpointStore, "save", save_in_small_files)
        try:
            with pytest.raises(TrainingFault, match=r"File too large.*holds checkpoint 18 whole"):
                train_here(config)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert saved_steps(config) == [18]
    assert train_here(config) == 0
    assert_same_run(config, whole)


@pytest.mark.parametrize("part", ["state", "position", "state/manifest.ocdbt", "."])
def test_a_checkpoint_that_was_cut_short_is_named(whole, tmp_path, part):
    config = copy_of(whole, tmp_path / "run", 24)
    damaged = directory_of(config).checkpoints / "24"
    if part == ".":
        shutil.rmtree(damaged)
        damaged.mkdir()
    elif (damaged / part).is_dir():
        shutil.rmtree(damaged / part)
    else:
        (damaged / part).write_bytes(b"")
    with pytest.raises(InputError, match=rf"checkpoint {damaged} cannot be read \(.*\); move it away to go on from step 18"):
        train_here(config)


def test_after_a_damaged_checkpoint_the_one_before_serves(whole, tmp_path):
    config = copy_of(whole, tmp_path / "run", 24)
    (directory_of(config).checkpoints / "24" / "state" / "manifest.ocdbt").write_bytes(b"")
    with pytest.raises(InputError):
        train_here(config)
    shutil.move(directory_of(config).checkpoints / "24", tmp_path)
    assert train_here(config) == 0
    assert_same_run(config, whole)


def test_counters_are_saved_as_whole_numbers(whole):
    position = json.loads((directory_of(whole).checkpoints / "24" / "position" / "metadata").read_text())
    assert (position["step"], position["consumed_samples"]) == (24, 24 * 8)
    state = read_state(whole, 24)
    assert (state["['step']"].dtype, state["['step']"].item()) == (np.int32, 24)
