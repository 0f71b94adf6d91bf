"""What a run writes and shows, and when."""

import dataclasses
import itertools
import os
import re
import struct
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tensorboardX.proto.event_pb2 import Event, SessionLog

from giantjax.checkpoint import CheckpointStore
from giantjax.config import RunConfig
from giantjax.data.indexed import TokenizerRecord, open_indexed
from giantjax.errors import InputError
from giantjax.planner.flops import flops_per_sample
from giantjax.training import bookkeeper, loop
from giantjax.training.bookkeeper import Bookkeeper
from giantjax.training.progress import ProgressLine
from giantjax.training.restore import load_trained
from giantjax.training.run_directory import RunDirectory, directory_of, held_alone, read_record
from giantjax.training.step import StepMetrics
from tests.helpers import FORWARD, logits_of
from tests.training.runs import PEAK_FLOPS, CompiledOnce, copy_of, records_of, small_run, train_here

# One worker, for one run serves all.
pytestmark = pytest.mark.xdist_group("loop")

KEYS = {
    *("step", "loss", "grad_norm", "learning_rate", "step_time_s", "tokens_per_s", "samples_per_s", "mfu"),
    *("consumed_samples", "consumed_tokens", "loss_scale", "skipped"),
}


# ---- the run directory ----


def test_the_run_directory_holds_what_is_documented(whole):
    run = directory_of(whole)
    assert {path.name for path in run.path.iterdir()} == {"config.json", "tokenizer.json", "metrics.jsonl", "checkpoints", "tensorboard"}
    resolved = dataclasses.replace(whole, training=dataclasses.replace(whole.training, precision="fp32"))
    assert read_record(run, run.config, RunConfig) == resolved
    assert read_record(run, run.tokenizer, TokenizerRecord) == TokenizerRecord("bytes", 257, 256)


def test_every_record_has_the_documented_numbers(whole):
    records = records_of(whole)
    assert len(records) == 30
    for record in records:
        evaluated = record["step"] in (8, 16, 24, 30)
        assert record.keys() == KEYS | ({"validation_loss"} if evaluated else set())
        assert record["consumed_samples"] == 8 * record["step"]
        assert record["consumed_tokens"] == 16 * 8 * record["step"]
        assert (record["loss_scale"], record["skipped"]) == (1.0, 0)
    assert records[-1]["loss"] < records[0]["loss"]


@pytest.mark.parametrize(("data", "seconds"), [(1, 0.5), (4, 0.25)])
def test_throughput_is_by_its_formulas(corpus, tmp_path, monkeypatch, data, seconds):
    config = small_run(tmp_path, corpus, **{"mesh.data": data, "logging.tensorboard": False})
    clock = itertools.count(100.0, seconds)
    monkeypatch.setattr(bookkeeper, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    with ProgressLine(30, 1) as progress:
        book = Bookkeeper(config, directory_of(config), 0, 0, 0, progress, (PEAK_FLOPS, "known"))
        book.push(1, StepMetrics(jnp.float32(2.5), jnp.float32(1.5), jnp.float32(0), {}))
        book.write(validation_loss=2.0)
        book.close()
    (record,) = records_of(config)
    assert record["step_time_s"] == seconds
    assert record["samples_per_s"] == 8 / seconds
    assert record["tokens_per_s"] == 16 * 8 / seconds
    assert record["mfu"] == pytest.approx(8 / seconds * flops_per_sample(config.model) / (data * PEAK_FLOPS))
    assert (record["loss"], record["grad_norm"], record["validation_loss"]) == (2.5, 1.5, 2.0)


def events_in(path: Path) -> Iterator[Event]:
    """The events of a TensorBoard file: records of length, its checksum, content, its checksum."""
    content, place = path.read_bytes(), 0
    while place < len(content):
        (length,) = struct.unpack_from("<Q", content, place)
        yield Event.FromString(content[place + 12 : place + 12 + length])
        place += 12 + length + 4
    assert place == len(content)


def scalars_in(config: RunConfig) -> dict[tuple[str, int], float]:
    """Every scalar of the run as TensorBoard would show it: a new start takes back what was said of its steps before."""
    found: dict[tuple[str, int], float] = {}
    for path in sorted(directory_of(config).tensorboard.iterdir()):
        for event in events_in(path):
            if event.session_log.status == SessionLog.START:
                found = {(tag, step): value for (tag, step), value in found.items() if step < event.step}
            for value in event.summary.value:
                assert (value.tag, event.step) not in found
                found[value.tag, event.step] = value.simple_value
    return found


def test_tensorboard_shows_the_same_numbers(whole, tmp_path):
    resumed = copy_of(whole, tmp_path / "run", 18)
    assert train_here(resumed) == 0
    assert len(list(directory_of(resumed).tensorboard.iterdir())) == 2
    for config in (whole, resumed):
        expected = {
            (name, record["step"]): np.float32(value) for record in records_of(config) for name, value in record.items() if name != "step"
        }
        shown = {place: value for place, value in scalars_in(config).items() if place[0] != "step"}
        assert shown == expected


def test_tensorboard_may_be_left_out(whole, tmp_path):
    config = copy_of(whole, tmp_path / "run", 24, **{"logging.tensorboard": False})
    files = sorted(directory_of(config).tensorboard.iterdir())
    assert train_here(config) == 0
    assert sorted(directory_of(config).tensorboard.iterdir()) == files


# ---- what a person sees ----


def test_plain_lines_where_there_is_no_terminal(whole, tmp_path, capsys):
    config = copy_of(whole, tmp_path / "run", 18, **{"logging.every": 5})
    assert train_here(config) == 0
    out = capsys.readouterr().out
    assert "\r" not in out
    assert "\x1b" not in out
    lines = out.splitlines()
    assert lines[2:4] == ["resuming after step 18", "compiling"]
    steps = [line for line in lines if line.startswith("step ")]
    # Every fifth, each evaluation, the last.
    assert [line.split()[1] for line in steps] == ["20/30", "24/30", "25/30", "30/30"]
    records = records_of(config)
    for line in steps:
        record = records[int(line.split()[1].partition("/")[0]) - 1]
        loss = f"loss {record['loss']:.4f}"
        if "validation_loss" in record:
            loss += f"  validation loss {record['validation_loss']:.4f}"
        pattern = rf"step \d+/30  {loss}  [\d,]+ tokens/s  [\d.]+ samples/s  MFU [\d.]+ %  \d:\d\d:\d\d left"
        assert re.fullmatch(pattern, line), line


def screen_of(output: str) -> list[str]:
    """The lines a terminal shows after `output`, which moves up, erases lines and colours."""
    lines, row = [""], 0
    column = 0
    for token in re.findall(r"\x1b\[[?\d;]*[A-Za-z]|.|\n", output, re.DOTALL):
        if token == "\n":
            row, column = row + 1, 0
            lines += [""] * (row + 1 - len(lines))
        elif token == "\r":
            column = 0
        elif token.endswith("A") and token.startswith("\x1b["):
            row = max(0, row - int(token[2:-1] or 1))
        elif token == "\x1b[2K":
            lines[row] = ""
        elif not token.startswith("\x1b["):
            lines[row] = lines[row][:column].ljust(column) + token + lines[row][column + 1 :]
            column += 1
    return [line.rstrip() for line in lines]


def test_what_nccl_chose_is_said_once_after_the_first_step(whole, tmp_path, capsys):
    log = tmp_path / "nccl.log"
    log.write_text("node1:1:2 [0] NCCL INFO NET/Socket : Using [0]eth0:10.0.0.1<0>\nnode1:1:2 [0] NCCL INFO Using network Socket\n")
    assert train_here(copy_of(whole, tmp_path / "run", 24), nccl_log=log) == 0
    out = capsys.readouterr().out
    assert out.count("NCCL: Socket over eth0\n") == 1 and out.index("compiled in") < out.index("NCCL:") < out.index("step 25/30")


def test_a_live_line_on_a_terminal(whole, tmp_path, monkeypatch):
    config = copy_of(whole, tmp_path / "run", 18)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "160")
    received = bytearray()
    controller, terminal = os.openpty()

    def receive() -> None:
        # At the end of what a closed terminal held, Linux has EIO.
        try:
            while piece := os.read(controller, 4096):
                received.extend(piece)
        except OSError:
            pass

    reader = threading.Thread(target=receive)
    reader.start()
    with open(terminal, "w", encoding="utf-8") as file:
        monkeypatch.setattr(sys, "stdout", file)
        assert train_here(config) == 0
        monkeypatch.undo()
    reader.join()
    os.close(controller)
    output = received.decode()
    # The cursor is hidden while the bar lives, and not afterwards.
    assert output.rfind("\x1b[?25h") > output.rfind("\x1b[?25l") > output.index("compiled in")
    shown = [line for line in screen_of(output) if line]
    assert shown[-1].startswith("━" * 20)
    assert " step 30/30  loss " in shown[-1]
    # Of the other steps, only the evaluations stay on the screen.
    assert [line.split()[1] for line in shown if line.startswith("step ")] == ["24/30", "30/30"]


def test_the_time_left_does_not_jump(capsys):
    with ProgressLine(100, 10) as progress:
        for step in range(1, 51):
            record = {"step": step, "loss": 2.0, "tokens_per_s": 1.0, "samples_per_s": 1.0, "mfu": 0.5, "step_time_s": 10.0 + step % 2}
            progress.show(record)
    last = capsys.readouterr().out.splitlines()[-1]
    minutes, seconds = map(int, last.split()[-2].split(":")[1:])
    assert 50 * 10 < 60 * minutes + seconds < 50 * 11


# ---- order and time ----


@pytest.fixture
def dispatched(monkeypatch) -> list[str]:
    """What the loop does, in order, as `run 3`, `read 3`, `save 6` or `evaluate`."""
    events: list[str] = []
    runs, reads = itertools.count(19), itertools.count(19)
    compiled, get, save, evaluate = CompiledOnce.compile, jax.device_get, CheckpointStore.save, loop.Evaluation.__call__

    def compile_and_note(self):
        program = compiled(self)

        def run(*arguments):
            events.append(f"run {next(runs)}")
            return program(*arguments)

        return run

    def get_and_note(tree):
        if isinstance(tree, StepMetrics):
            events.append(f"read {next(reads)}")
        return get(tree)

    def save_and_note(self, state, position):
        events.append(f"save {position.step}")
        save(self, state, position)

    def evaluate_and_note(self, state):
        events.append("evaluate")
        return evaluate(self, state)

    monkeypatch.setattr(CompiledOnce, "compile", compile_and_note)
    monkeypatch.setattr(jax, "device_get", get_and_note)
    monkeypatch.setattr(CheckpointStore, "save", save_and_note)
    monkeypatch.setattr(loop.Evaluation, "__call__", evaluate_and_note)
    return events


def test_metrics_are_read_one_step_late(whole, tmp_path, dispatched):
    assert train_here(copy_of(whole, tmp_path / "run", 18)) == 0
    assert dispatched == [
        *("run 19", "run 20", "read 19", "run 21", "read 20", "run 22", "read 21", "run 23", "read 22", "run 24", "read 23"),
        # An evaluation and a save wait for the step they come after.
        *("read 24", "evaluate", "save 24"),
        *("run 25", "run 26", "read 25", "run 27", "read 26", "run 28", "read 27", "run 29", "read 28", "run 30", "read 29"),
        *("read 30", "evaluate", "save 30"),
    ]


def test_a_step_is_timed_alone(whole, tmp_path, monkeypatch):
    """By a clock on which the device takes a second for each step, and everything else takes much longer."""
    now, get = 0.0, jax.device_get

    def takes(seconds, does):
        def slow(*arguments):
            nonlocal now
            now += seconds
            return does(*arguments)

        return slow

    def get_after_the_step(tree):
        nonlocal now
        now += isinstance(tree, StepMetrics)
        return get(tree)

    monkeypatch.setattr(bookkeeper, "time", SimpleNamespace(perf_counter=lambda: now))
    monkeypatch.setattr(jax, "device_get", get_after_the_step)
    monkeypatch.setattr(CompiledOnce, "lower", takes(1000, CompiledOnce.lower))
    monkeypatch.setattr(CheckpointStore, "save", takes(100, CheckpointStore.save))
    monkeypatch.setattr(loop.Evaluation, "__call__", takes(10, loop.Evaluation.__call__))
    config = copy_of(whole, tmp_path / "run", 18, **{"training.eval_every": 4})
    assert train_here(config) == 0
    assert now == 1000 + 12 + 2 * 100 + 4 * 10
    assert [record["step_time_s"] for record in records_of(config)[18:]] == [1] * 12


# ---- the validation loss ----


def test_the_validation_loss_is_the_mean_over_held_out_samples(whole, corpus):
    trained = load_trained(directory_of(whole))
    assert trained.step == 30
    tokens = open_indexed(str(corpus)).tokens
    num_samples = (len(tokens) - 1) // 16
    # Twenty samples, evenly spread, each of 16 tokens and the one after; the last of three batches is half padding.
    starts = [number * num_samples // 20 * 16 for number in range(20)]
    rows = jnp.asarray(np.stack([tokens[start : start + 17] for start in starts]).astype(np.int32))
    logits = logits_of(trained.model, trained.params, {"tokens": rows[:, :-1]})[..., :257]
    losses = -jnp.take_along_axis(jax.nn.log_softmax(logits), rows[:, 1:, None], axis=-1)
    assert records_of(whole)[-1]["validation_loss"] == pytest.approx(float(losses.mean()), rel=FORWARD)


def test_two_processes_do_not_train_in_one_directory(tmp_path):
    """The second is refused by the name of the first; what a killed process leaves keeps nobody out."""
    run = RunDirectory(tmp_path)
    run.lock.write_text("process 1 on a machine that is gone")
    with held_alone(run):
        refusal = rf"process {os.getpid()} on .* is training in {tmp_path}; wait for its end, stop it, or name another --run-dir"
        with pytest.raises(InputError, match=refusal), held_alone(run):
            raise AssertionError("held twice")
        assert run.lock.exists()
    assert not list(tmp_path.iterdir())
