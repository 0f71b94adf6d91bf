"""The directory of a run: checked before any device work, and what is written in it."""

import contextlib
import dataclasses
import fcntl
import json
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from giantjax.config import RunConfig
from giantjax.data.indexed import IndexedDataset, TokenizerRecord
from giantjax.data.tokenizer import Tokenizer, ending_of, load_recorded, recorded_file
from giantjax.errors import InputError
from giantjax.fields import from_dict
from giantjax.peers import Peers, processes
from giantjax.planner.memory import checkpoint_bytes, in_words

T = TypeVar("T")
APPEARS = 30.0
"""Seconds in which a network file system shows a new file on other machines."""


@dataclass(frozen=True)
class RunDirectory:
    """Paths of what a run writes."""

    path: Path

    @property
    def config(self) -> Path:
        """The fully resolved configuration, as JSON."""
        return self.path / "config.json"

    @property
    def tokenizer(self) -> Path:
        """The record of the tokenizer of the training data."""
        return self.path / "tokenizer.json"

    @property
    def tokenizer_file(self) -> Path:
        """The file of that tokenizer's vocabulary, without its ending."""
        return self.path / "tokenizer" / "tokenizer"

    @property
    def partition(self) -> Path:
        """The partition that was measured, and the times."""
        return self.path / "partition.json"

    @property
    def metrics(self) -> Path:
        """One JSON object a step."""
        return self.path / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        """What a run resumes from."""
        return self.path / "checkpoints"

    @property
    def lock(self) -> Path:
        """Locked by the process that trains here, whose name it holds."""
        return self.path / ".lock"

    @property
    def tensorboard(self) -> Path:
        """Event files."""
        return self.path / "tensorboard"


def directory_of(config: RunConfig) -> RunDirectory:
    """Where `config` says the run lives."""
    return RunDirectory(Path(config.run_dir or Path("runs") / config.name))


def check_run_directory(config: RunConfig) -> RunDirectory:
    """Make sure that the run directory can be made and can hold the run; leaves nothing new behind.

    Raises:
        InputError: it cannot be made or written, or its disk has no room for the checkpoints kept.
    """
    run = directory_of(config)
    made: list[Path] = []
    try:
        made += [path for path in (run.path, *run.path.parents) if not path.exists()]
        run.path.mkdir(parents=True, exist_ok=True)
        _check_parts(run)
        with tempfile.TemporaryFile(dir=run.path) as probe:
            probe.write(b"0" * 4096)
        _check_room(config, run)
    except OSError as error:
        raise InputError(f"the run directory {run.path} cannot be written: {error.strerror}; name another with --run-dir") from error
    finally:
        # Deepest first, and only what is empty: another process may have begun a run in one of them.
        for path in made:
            with contextlib.suppress(OSError):
                path.rmdir()
    return run


def check_run_directories(config: RunConfig, peers: Peers) -> RunDirectory:
    """`check_run_directory` on every process of a job, of which each writes its part of a checkpoint into the same directory.

    Raises:
        InputError: one cannot write, or does not see what process 0 writes.
    """
    if peers.job.num_processes == 1:
        return check_run_directory(config)
    run, first = directory_of(config), peers.job.process_id == 0
    with contextlib.ExitStack() as undo:
        name = ""
        if first:
            check_run_directory(config)
            for path in reversed((run.path, *run.path.parents)):
                if not path.exists():
                    undo.callback(_remove_empty, path)  # the deepest first
            run.path.mkdir(parents=True, exist_ok=True)
            name = os.path.basename(undo.enter_context(tempfile.NamedTemporaryFile(dir=run.path, prefix=".shared-")).name)
        probe = run.path / peers.settle(name, lambda names: names[0])
        end = time.monotonic() + min(APPEARS, peers.seconds / 2)
        while not probe.exists() and time.monotonic() < end:
            time.sleep(0.1)
        if probe.exists() and not first:
            check_run_directory(config)
        peers.settle([probe.exists(), peers.host], lambda told: _refuse_blind(run, told))
    return run


def _refuse_blind(run: RunDirectory, told: list[tuple[bool, str]]) -> None:
    blind = [process for process, (sees, _) in enumerate(told) if not sees]
    if blind:
        hosts = ", ".join(dict.fromkeys(told[process][1] for process in blind))
        raise InputError(
            f"the run directory {run.path} of {processes(blind)} ({hosts}) is not that of process 0 ({told[0][1]}); with --run-dir name "
            "one on a file system that all processes share"
        )


def _remove_empty(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.rmdir()


def _check_parts(run: RunDirectory) -> None:
    folders = (run.checkpoints, run.tensorboard, run.tokenizer_file.parent)
    for path in (*folders, run.config, run.tokenizer, run.partition, run.metrics):
        if path.exists() and path.is_dir() != (path in folders):
            what = "no folder" if path in folders else "a folder"
            raise InputError(f"{path} is {what}, so that {run.path} cannot hold a run; remove it, or name another --run-dir")


def _check_room(config: RunConfig, run: RunDirectory) -> None:
    # One more than are kept: the oldest is deleted only after the newest is whole. Zipped zeros make the first
    # checkpoints smaller than this, never larger.
    held = sum(file.stat().st_size for file in run.checkpoints.rglob("*") if file.is_file()) if run.checkpoints.exists() else 0
    each, free = checkpoint_bytes(config), shutil.disk_usage(run.path).free
    needed = each * (config.checkpoint.keep + 1)
    if needed > free + held:
        fitting = (free + held) // each - 1
        advice = f"set checkpoint.keep to {fitting} or " if fitting >= 1 else ""
        raise InputError(
            f"the run directory {run.path} has room for {in_words(free + held)}, but checkpoint.keep {config.checkpoint.keep} + 1 "
            f"checkpoints of {in_words(each)} need {in_words(needed)}; {advice}name a larger disk with --run-dir"
        )


@contextlib.contextmanager
def held_alone(run: RunDirectory) -> Iterator[None]:
    """Keep others from training in this directory meanwhile; the lock goes with the process, however it ends.

    Raises:
        InputError: another process trains there.
    """
    with run.lock.open("a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            who = file.read().strip() or "another process"
            raise InputError(f"{who} is training in {run.path}; wait for its end, stop it, or name another --run-dir") from None
        except OSError:
            pass  # a file system without locks, where nobody can be kept out
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        try:
            yield
        finally:
            run.lock.unlink(missing_ok=True)


def write_record(path: Path, record: Any) -> None:
    """Write a dataclass as JSON aside and rename it, so that a kill leaves the old file or the new one."""
    aside = path.with_name(path.name + ".part")
    aside.write_text(json.dumps(dataclasses.asdict(record), indent=2) + "\n", encoding="utf-8")
    os.replace(aside, path)


def keep_tokenizer(run: RunDirectory, corpus: IndexedDataset) -> None:
    """Record the tokenizer of a corpus, which has a record of it, in the run's directory, with a copy of its file.

    Raises:
        InputError: the file is missing beside the corpus, or another one.
    """
    assert corpus.record is not None
    if ending := ending_of(corpus.record):
        copy = run.tokenizer_file.with_name(run.tokenizer_file.name + ending)
        copy.parent.mkdir(exist_ok=True)
        aside = copy.with_name(copy.name + ".part")
        aside.write_bytes(recorded_file(corpus.record, f"{corpus.prefix}.tokenizer"))
        os.replace(aside, copy)
    write_record(run.tokenizer, corpus.record)


def tokenizer_of(run: RunDirectory) -> Tokenizer:
    """The tokenizer of the training data of a run.

    Raises:
        InputError: the directory holds none, or its file is missing or another one.
    """
    return load_recorded(read_record(run, run.tokenizer, TokenizerRecord), str(run.tokenizer_file))


def read_record(run: RunDirectory, path: Path, kind: type[T]) -> T:
    """The dataclass `kind` that `write_record` wrote to `path`.

    Raises:
        InputError: the directory holds no run, or the file cannot be read.
    """
    if not path.exists():
        raise InputError(f"{run.path} is not the directory of a run that could be used here: it has no {path.name}")
    try:
        values = json.loads(path.read_bytes())
        if not isinstance(values, dict):
            raise ValueError("it is not a JSON object")
        return from_dict(kind, values)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is damaged ({error}); the same command that started the run writes it again") from error
