"""Megatron's indexed token files, written: aside at first, and given their names only once they are whole."""

import contextlib
import dataclasses
import json
import os
import uuid
from array import array
from collections.abc import Iterator
from typing import IO

import numpy as np

from giantjax.data.indexed import DTYPES, HEADER, MAGIC, PIECE, TokenizerRecord, token_dtype
from giantjax.errors import InputError

# The index stores lengths as int32. A longer document becomes several sequences, which is what Megatron's
# document index is for.
LONGEST_SEQUENCE = 2**31 - 1
# In this order the files get their names: a pair that has an index is whole.
ENDINGS = (".bin", ".json", ".idx")


class IndexedWriter:
    """Documents on their way into PREFIX.bin; made by `write_indexed`."""

    def __init__(self, path: str, dtype: np.dtype) -> None:
        self._path, self._dtype = path, dtype
        with _refusals(path):
            # Buffered, for documents may be a few tokens long; closed by whoever made this writer.
            self._file: IO[bytes] = open(path, "xb", buffering=PIECE)  # noqa: SIM115
        self._lengths = array("i")
        self._document_index = array("q", [0])
        self._pending = 0
        self.num_tokens = 0

    @property
    def num_documents(self) -> int:
        """Documents ended so far."""
        return len(self._document_index) - 1

    def append(self, ids: np.ndarray) -> None:
        """Add token ids, [any number] of an integer dtype, to the current document.

        Raises:
            InputError: an id does not fit the dtype of the file, or the disk is full.
        """
        limits = np.iinfo(self._dtype)
        if len(ids) and (ids.min() < limits.min or ids.max() > limits.max):
            wrong = ids.max() if ids.max() > limits.max else ids.min()
            raise InputError(f"the token id {wrong} does not fit {self._dtype.name}, in which this vocabulary is stored")
        with _refusals(self._path):
            self._file.write(np.ascontiguousarray(ids, self._dtype).data)
        self.num_tokens += len(ids)
        self._pending += len(ids)
        while self._pending > LONGEST_SEQUENCE:
            self._lengths.append(LONGEST_SEQUENCE)
            self._pending -= LONGEST_SEQUENCE

    def end_sequence(self) -> None:
        """End a sequence inside the current document."""
        self._lengths.append(self._pending)
        self._pending = 0

    def end_document(self) -> None:
        """End the current document, and with it the tokens appended since its last sequence ended."""
        if self._pending or len(self._lengths) == self._document_index[-1]:
            self.end_sequence()
        self._document_index.append(len(self._lengths))

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

    def _write_index(self, file: IO[bytes]) -> None:
        code = next(code for code, name in DTYPES.items() if np.dtype(name) == self._dtype)
        lengths = np.frombuffer(self._lengths, np.int32)
        file.write(HEADER.pack(MAGIC, 1, code, len(lengths), len(self._document_index)))
        file.write(lengths.astype("<i4", copy=False).data)
        offset = 0
        for first in range(0, len(lengths), PIECE):
            ends = offset + np.cumsum(lengths[first : first + PIECE], dtype=np.int64) * self._dtype.itemsize
            file.write(np.concatenate(([offset], ends[:-1])).astype("<i8", copy=False).data)
            offset = int(ends[-1])
        file.write(np.frombuffer(self._document_index, np.int64).astype("<i8", copy=False).data)


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
    writer = IndexedWriter(aside[".bin"], np.dtype(dtype).newbyteorder("<"))
    try:
        yield writer
        writer.finish(aside[".idx"])
        if record is not None:
            with _refusals(aside[".json"]), open(aside[".json"], "xb") as file:
                file.write(json.dumps(dataclasses.asdict(record)).encode() + b"\n")
                _sync_and_close(file)
        _give_names(prefix, aside)
    finally:
        writer.abandon()
        for path in aside.values():
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)


def refuse_existing(prefix: str) -> None:
    """Raise InputError where a file that would be written is there already."""
    for ending in ENDINGS:
        if os.path.lexists(prefix + ending):
            raise InputError(f"{prefix}{ending} exists already; remove it, or choose another PREFIX")


def sync_folder(path: str) -> None:
    """Put the names of a folder's files on the disk, where its file system can do that."""
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _give_names(prefix: str, aside: dict[str, str]) -> None:
    """Rename the files aside: all of them or, after an error, none."""
    refuse_existing(prefix)
    named: list[str] = []
    try:
        for ending, path in aside.items():
            with _refusals(path):
                os.rename(path, prefix + ending)
            named.append(prefix + ending)
    except BaseException:
        for path in reversed(named):
            os.unlink(path)
        raise
    sync_folder(os.path.dirname(prefix) or ".")


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
    return path.removesuffix(".partial").rpartition(".")[0]
