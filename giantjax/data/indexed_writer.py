"""Megatron's indexed token files, written: aside at first, and given their names only once they are whole."""

import contextlib
import dataclasses
import json
import os
import uuid
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO

import numpy as np

from giantjax.data.indexed import DTYPES, HEADER, MAGIC, PIECE, TokenizerRecord, token_dtype
from giantjax.errors import InputError

# The index stores lengths as int32. A longer document becomes several sequences, which is what Megatron's
# document index is for.
LONGEST_SEQUENCE = 2**31 - 1
# In this order the files get their names: a pair that has an index is whole.
ENDINGS = (".bin", ".json", ".idx")
# Of the file of the vocabulary, which not every tokenizer has.
TOKENIZER_ENDINGS = (".tokenizer.json", ".tokenizer.model", ".tokenizer.tiktoken")


@dataclass
class Written:
    """What the index will say of the tokens written so far: 12 bytes of memory a document."""

    lengths: array = field(default_factory=lambda: array("i"))
    """Tokens of each sequence that has ended."""
    document_index: array = field(default_factory=lambda: array("q", [0]))
    """First sequence of each document that has ended, and of the one that has not."""
    num_tokens: int = 0

    @property
    def num_documents(self) -> int:
        """Documents ended so far."""
        return len(self.document_index) - 1


class IndexedWriter:
    """Documents on their way into a file of tokens."""

    def __init__(self, path: str, dtype: np.dtype, written: Written | None = None) -> None:
        """Begin a new file, or go on after what was written to it; what the file holds beyond that is cut off.

        Args:
            path: of the tokens, which whoever makes this writer closes with `abandon`.
            dtype: of the ids in the file.
            written: what another writer had written.
        """
        self._path, self._dtype = path, dtype.newbyteorder("<")
        self.written = written or Written()
        with _refusals(path):
            # Buffered, for documents may be a few tokens long.
            self._file: IO[bytes] = open(path, "r+b" if written else "xb", buffering=PIECE)  # noqa: SIM115
            self._file.truncate(self.written.num_tokens * dtype.itemsize)
            self._file.seek(0, os.SEEK_END)
        self._pending = self.written.num_tokens - int(np.sum(self.written.lengths, dtype=np.int64))

    @property
    def num_documents(self) -> int:
        """Documents ended so far."""
        return self.written.num_documents

    @property
    def num_tokens(self) -> int:
        """Tokens written so far."""
        return self.written.num_tokens

    def append(self, ids: np.ndarray) -> None:
        """Add token ids, [any number] of an integer dtype, to the current document.

        Raises:
            InputError: an id does not fit the dtype of the file, or the disk is full.
        """
        self._write(ids)
        self._count(len(ids))

    def append_documents(self, ids: np.ndarray, ends: Sequence[int]) -> None:
        """Add token ids, [any number] of an integer dtype, in which documents end before the places `ends`, in ascending order.

        Raises:
            InputError: as `append` does.
        """
        self._write(ids)
        first = 0
        for end in ends:
            self._count(end - first)
            self.end_document()
            first = end
        self._count(len(ids) - first)

    def end_sequence(self) -> None:
        """End a sequence inside the current document."""
        self.written.lengths.append(self._pending)
        self._pending = 0

    def end_document(self) -> None:
        """End the current document, and with it the tokens appended since its last sequence ended."""
        written = self.written
        if self._pending or len(written.lengths) == written.document_index[-1]:
            self.end_sequence()
        written.document_index.append(len(written.lengths))

    def sync(self) -> None:
        """Put all tokens written so far on the disk.

        Raises:
            InputError: it is full.
        """
        with _refusals(self._path):
            self._file.flush()
            os.fsync(self._file.fileno())

    def finish(self, index_path: str) -> None:
        """Put all tokens on the disk, and their index into `index_path`.

        Raises:
            InputError: the disk is full, or there was no token.
        """
        if self.num_tokens == 0:
            raise InputError(f"there is not a single token to write to {_final_name(self._path)}")
        with _refusals(self._path):
            _sync_and_close(self._file)
        with _refusals(index_path), open(index_path, "xb") as file:
            self._write_index(file)
            _sync_and_close(file)

    def abandon(self) -> None:
        """Close the file, whatever state it is in."""
        # A full disk refuses here once more what was still buffered; it has been reported already.
        with contextlib.suppress(OSError):
            self._file.close()

    def _write(self, ids: np.ndarray) -> None:
        limits = np.iinfo(self._dtype)
        if len(ids) and (ids.min() < limits.min or ids.max() > limits.max):
            wrong = ids.max() if ids.max() > limits.max else ids.min()
            raise InputError(f"the token id {wrong} does not fit {self._dtype.name}, in which this vocabulary is stored")
        with _refusals(self._path):
            self._file.write(np.ascontiguousarray(ids, self._dtype).data)

    def _count(self, number: int) -> None:
        self.written.num_tokens += number
        self._pending += number
        while self._pending > LONGEST_SEQUENCE:
            self.written.lengths.append(LONGEST_SEQUENCE)
            self._pending -= LONGEST_SEQUENCE

    def _write_index(self, file: IO[bytes]) -> None:
        code = next(code for code, name in DTYPES.items() if np.dtype(name) == self._dtype)
        lengths, document_index = np.frombuffer(self.written.lengths, np.int32), np.frombuffer(self.written.document_index, np.int64)
        file.write(HEADER.pack(MAGIC, 1, code, len(lengths), len(document_index)))
        file.write(lengths.astype("<i4", copy=False).data)
        offset = 0
        for first in range(0, len(lengths), PIECE):
            ends = offset + np.cumsum(lengths[first : first + PIECE], dtype=np.int64) * self._dtype.itemsize
            file.write(np.concatenate(([offset], ends[:-1])).astype("<i8", copy=False).data)
            offset = int(ends[-1])
        file.write(document_index.astype("<i8", copy=False).data)


@contextlib.contextmanager
def write_indexed(prefix: str, record: TokenizerRecord | None = None, dtype: np.dtype | None = None) -> Iterator[IndexedWriter]:
    """Write a pair: `with write_indexed(prefix, record) as writer: writer.append(ids); writer.end_document()`.

    Everything goes to files aside, in the folder of `prefix`. When the block ends they are put on the disk and
    renamed, the index last; when it raises they are removed.

    Args:
        prefix: path without .bin or .idx; its folder exists.
        record: goes to PREFIX.json; None writes no such file.
        dtype: of the stored ids; None chooses by the record's vocabulary size.

    Raises:
        InputError: one of the files exists already or cannot be written, the disk is full, or there was no token.
    """
    if dtype is None:
        if record is None:
            raise TypeError("write_indexed needs a record or a dtype")
        dtype = token_dtype(record.vocabulary_size)
    refuse_existing(prefix)
    aside = {ending: f"{prefix}{ending}.{uuid.uuid4().hex[:8]}.partial" for ending in ENDINGS if record or ending != ".json"}
    writer = IndexedWriter(aside[".bin"], np.dtype(dtype))
    try:
        yield writer
        writer.finish(aside[".idx"])
        if record is not None:
            write_whole(aside[".json"], record_text(record))
        refuse_existing(prefix)
        give_names({path: prefix + ending for ending, path in aside.items()})
    finally:
        writer.abandon()
        for path in aside.values():
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)


def refuse_existing(prefix: str) -> None:
    """Raise InputError where a file that would be written is there already."""
    for ending in (*ENDINGS, *TOKENIZER_ENDINGS):
        if os.path.lexists(prefix + ending):
            raise InputError(f"{prefix}{ending} exists already; remove it, or choose another PREFIX")


def record_text(record: TokenizerRecord) -> bytes:
    """The content of PREFIX.json."""
    return json.dumps({name: value for name, value in dataclasses.asdict(record).items() if value is not None}).encode() + b"\n"


def write_whole(path: str, content: bytes) -> None:
    """A new file that is on the disk when this returns.

    Raises:
        InputError: it cannot be written.
    """
    with _refusals(path), open(path, "wb") as file:
        file.write(content)
        _sync_and_close(file)


def sync_folder(path: str) -> None:
    """Put the names of a folder's files on the disk, where its file system can do that."""
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def give_names(names: Mapping[str, str]) -> None:
    """Rename files in order, all of them or, after an error, none.

    Args:
        names: path -> path in the same file system.

    Raises:
        InputError: one cannot be renamed.
    """
    named: dict[str, str] = {}
    try:
        for path, final in names.items():
            with _refusals(path):
                os.rename(path, final)
            named[path] = final
    except BaseException:
        for path, final in reversed(named.items()):
            os.rename(final, path)
        raise
    for folder in {os.path.dirname(final) or "." for final in names.values()}:
        sync_folder(folder)


def _sync_and_close(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())
    file.close()


@contextlib.contextmanager
def _refusals(path: str) -> Iterator[None]:
    """The system's refusal to write a file aside, as an InputError about the file it was to become."""
    try:
        yield
    except OSError as error:
        raise InputError(f"cannot write {_final_name(path)}: {error.strerror or error}") from error


def _final_name(path: str) -> str:
    """PREFIX.bin of PREFIX.bin.1a2b3c4d.partial, and of PREFIX.partial/bin."""
    folder, _, name = path.rpartition("/")
    if folder.endswith(".partial"):
        return f"{folder.removesuffix('.partial')}.{name}"
    return path.removesuffix(".partial").rpartition(".")[0]
