"""A corpus on its way: the folder PREFIX.partial, from which the same command goes on after a kill.

It holds the tokens (`bin`), what the index will say of them (`lengths` and `documents`, appended to), the tokenizer, and
`state.json`, which is replaced at each save and says how much of the other files counts. Once all is written the files get
their names, and the folder goes.
"""

import contextlib
import dataclasses
import fcntl
import json
import os
import shutil
from array import array
from concurrent.futures import BrokenExecutor
from dataclasses import dataclass
from typing import Any

from giantjax.data.indexed import TokenizerRecord, token_dtype
from giantjax.data.indexed_writer import IndexedWriter, Written, give_names, record_text, refuse_existing, sync_folder, write_whole
from giantjax.data.inputs import START, Place
from giantjax.data.tokenizer import Tokenizer, ending_of, load_recorded, record_of
from giantjax.errors import InputError


@dataclass(frozen=True)
class Progress:
    """How far a corpus is."""

    place: Place = START
    """In the inputs."""
    num_bytes: int = 0
    """Of text, in UTF-8."""
    num_empty: int = 0
    """Documents left out because they are empty."""
    consumed: int = 0
    """Bytes of the inputs on the disk."""


@dataclass(frozen=True)
class _State:
    """state.json."""

    job: dict[str, Any]
    record: dict[str, Any]
    progress: dict[str, Any]
    num_tokens: int
    num_sequences: int
    num_documents: int
    is_whole: bool
    """Whether all is written, and only the names are to be given."""


class Partial:
    """The folder of one corpus, which no other process writes meanwhile; a context manager.

    Leaving it by an InputError removes it, unless that is an error of the system, such as a full disk, and something was
    saved before. After a kill or a stop what was saved is there to go on from. Entering it raises InputError where another
    process writes there, something else was begun there, or the corpus exists or cannot be written.

    Args:
        prefix: of the corpus, in a folder that exists.
        job: what the corpus is made of, and how, as JSON; it must be the same to go on.
    """

    def __init__(self, prefix: str, job: dict[str, Any]):
        self.prefix, self.folder, self.job = prefix, f"{prefix}.partial", json.loads(json.dumps(job))
        self.progress = Progress()
        self.tokenizer: Tokenizer | None = None
        self._writer: IndexedWriter | None = None
        self._written: Written | None = None
        self._saved_sequences = self._saved_documents = 0
        self._is_saved = self._is_whole = False

    def __enter__(self) -> "Partial":
        if not os.path.exists(self._path("state.json")):
            refuse_existing(self.prefix)
        try:
            os.makedirs(self.folder, exist_ok=True)
            self._lock = os.open(self._path("lock"), os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.rmdir(self.folder)
            raise InputError(f"cannot write {self.prefix}.bin: {error.strerror}") from error
        try:
            with contextlib.suppress(OSError):  # of a file system without locks, where nobody can be kept out
                self._hold_lock()
            self._resume()
        except BaseException:
            os.close(self._lock)
            raise
        return self

    def begin(self, tokenizer: Tokenizer) -> None:
        """Start anew with a tokenizer, which is kept here."""
        self.tokenizer = tokenizer
        if tokenizer.ending:
            write_whole(self._path(f"tokenizer{tokenizer.ending}"), tokenizer.file)

    @property
    def written(self) -> Written:
        """What the index says of the tokens."""
        return self._writer.written if self._writer else self._written or Written()

    @property
    def writer(self) -> IndexedWriter:
        """Of the tokens, from where they end."""
        if self._writer is None:
            assert self.tokenizer is not None
            self._writer = IndexedWriter(self._path("bin"), token_dtype(self.tokenizer.vocabulary_size), self._written)
        return self._writer

    def save(self, progress: Progress) -> None:
        """Make sure that a kill from now on loses nothing of what is written.

        Raises:
            InputError: the disk is full.
        """
        self.writer.sync()
        self._save(progress)

    def finish(self, progress: Progress) -> None:
        """Write the index and the record, and give all files their names.

        Raises:
            InputError: there is no token, the disk is full, or a name is taken meanwhile.
        """
        assert self.tokenizer is not None
        if not self._is_whole:
            self.writer.finish(self._path("idx"))
            write_whole(self._path("json"), record_text(record_of(self.tokenizer)))
            refuse_existing(self.prefix)
            self._is_whole = True
            self._save(progress)
        # In the order in which a pair becomes whole; after a kill some have their names already.
        names = [name for name in ("bin", f"tokenizer{self.tokenizer.ending}", "json", "idx") if os.path.exists(self._path(name))]
        give_names({self._path(name): f"{self.prefix}.{name}" for name in names})
        self._is_saved = False

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if self._writer is not None:
            self._writer.abandon()
        cause = error.__cause__ if isinstance(error, InputError) else None
        # What finds a file damaged is an OSError too, but without a number.
        by_system = isinstance(cause, BrokenExecutor) or (isinstance(cause, OSError) and cause.errno is not None)
        if not self._is_saved or (isinstance(error, InputError) and not by_system):
            shutil.rmtree(self.folder, ignore_errors=True)
            sync_folder(os.path.dirname(self.folder) or ".")
        os.close(self._lock)
        if by_system and self._is_saved:
            raise InputError(f"{error}; {self.folder} keeps what is done, and the same command goes on from there") from error

    def _path(self, name: str) -> str:
        return os.path.join(self.folder, name)

    def _hold_lock(self) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise InputError(f"another process is preparing {self.prefix}; wait for its end") from error

    def _save(self, progress: Progress) -> None:
        assert self.tokenizer is not None
        written = self.written
        self._append("lengths", written.lengths, self._saved_sequences)
        # Its first entry is always 0.
        self._append("documents", written.document_index, self._saved_documents, 1)
        self._saved_sequences, self._saved_documents = len(written.lengths), written.num_documents
        state = _State(
            self.job,
            dataclasses.asdict(record_of(self.tokenizer)),
            dataclasses.asdict(progress),
            written.num_tokens,
            self._saved_sequences,
            self._saved_documents,
            self._is_whole,
        )
        write_whole(self._path("state.json.part"), json.dumps(dataclasses.asdict(state)).encode())
        give_names({self._path("state.json.part"): self._path("state.json")})
        self._is_saved = True

    def _append(self, name: str, values: array, saved: int, skipped: int = 0) -> None:
        """What is new of `values`, to a file of which the `saved` first count; neither counts the `skipped` first."""
        with open(self._path(name), "ab") as file:
            file.truncate(saved * values.itemsize)
            file.write(values[skipped + saved :].tobytes())
            file.flush()
            os.fsync(file.fileno())

    def _resume(self) -> None:
        """Take up what was saved, or remove what is there."""
        state = self._read_state()
        if state is None:
            for name in set(os.listdir(self.folder)) - {"lock"}:
                os.unlink(self._path(name))
            return
        if state.job != self.job:
            changed = ", ".join(name for name in self.job if state.job.get(name) != self.job[name])
            raise InputError(
                f"{self.folder} was left by a preparation that differs in {changed}; repeat that one to go on with it, or remove the folder"
            )
        if not state.is_whole:
            refuse_existing(self.prefix)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path("idx"))
        record, progress = TokenizerRecord(**state.record), state.progress
        here = os.path.exists(self._path(f"tokenizer{ending_of(record)}"))
        self.tokenizer = load_recorded(record, self._path("tokenizer") if here else f"{self.prefix}.tokenizer")
        self.progress = Progress(**progress | {"place": Place(*progress["place"])})
        self._written = Written(num_tokens=state.num_tokens)
        self._saved_sequences, self._saved_documents = state.num_sequences, state.num_documents
        for name, into, number in (
            ("lengths", self._written.lengths, self._saved_sequences),
            ("documents", self._written.document_index, self._saved_documents),
        ):
            with open(self._path(name), "rb") as file:
                into.frombytes(file.read(number * into.itemsize))
        self._is_saved, self._is_whole = True, state.is_whole

    def _read_state(self) -> _State | None:
        try:
            with open(self._path("state.json"), "rb") as file:
                return _State(**json.load(file))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError) as error:
            raise InputError(f"{self.folder} cannot be gone on from ({error}); remove it to begin anew") from error
