"""Megatron's indexed token files, read: PREFIX.bin holds tokens, PREFIX.idx says where each sequence lies.

The layout of PREFIX.idx, little endian and without padding (megatron-core, datasets/indexed_dataset.py):

    9 bytes "MMIDIDX\\0\\0" | u64 version, 1 | u8 dtype code | u64 number of sequences N | u64 number of documents + 1
    i32 length of each sequence, in tokens | i64 offset of each sequence, in bytes | i64 first sequence of each document, then N

Beside a pair that giantjax wrote lies PREFIX.json, which records the tokenizer, and the file of its vocabulary where it has
one. A pair without a record comes from elsewhere, and how large its vocabulary is nobody says. `giantjax.data.indexed_writer`
writes all of them.
"""

import bisect
import json
import os
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from giantjax.errors import InputError
from giantjax.fields import at_least, check_types, from_dict

MAGIC = b"MMIDIDX\0\0"
HEADER = struct.Struct("<9sQBQQ")
DTYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}
# Index entries looked at in one go, so that checking an index of any size takes the same memory.
PIECE = 1 << 20
# A record is three short fields; a larger PREFIX.json is something else, perhaps the text the pair was made of.
RECORD_BYTES = 1 << 16


@dataclass(frozen=True)
class TokenizerRecord:
    """What PREFIX.json says about the ids in PREFIX.bin."""

    tokenizer: str
    """Its kind, for `giantjax.data.tokenizer.load_recorded`."""
    vocabulary_size: int
    """Ids are below this number."""
    end_of_document: int
    """The id that ends each document."""
    digest: str | None = None
    """SHA-256 of the vocabulary's file beside the corpus, PREFIX.tokenizer and an ending; None where the kind needs none."""

    def __post_init__(self) -> None:
        check_types(self, "")
        at_least("vocabulary_size", self.vocabulary_size, 1)
        if not 0 <= self.end_of_document < self.vocabulary_size:
            raise InputError(f"end_of_document is {self.end_of_document}; it must lie below vocabulary_size, {self.vocabulary_size}")


@dataclass(frozen=True, eq=False)
class IndexedDataset:
    """An indexed pair, mapped into memory: opening it reads the index once and the tokens not at all.

    N sequences, D documents.
    """

    prefix: str
    """The path without .bin or .idx."""
    lengths: np.ndarray
    """int32 [N], tokens in each sequence."""
    offsets: np.ndarray
    """int64 [N], byte of PREFIX.bin at which each sequence begins."""
    document_index: np.ndarray
    """int64 [D+1], first sequence of each document, then N."""
    tokens: np.ndarray
    """All of PREFIX.bin as a flat array of token ids, gaps between sequences included."""
    num_tokens: int
    """Tokens in all sequences."""
    starts: np.ndarray | None
    """int64 [N], place of each sequence in their concatenation; None where PREFIX.bin is that concatenation,
    as it is in all files that giantjax and Megatron write. Otherwise 8 bytes of memory a sequence."""
    record: TokenizerRecord | None
    """The tokenizer, where PREFIX.json says it."""

    @property
    def name(self) -> str:
        """What messages call this corpus."""
        return self.prefix

    @property
    def num_sequences(self) -> int:
        """N."""
        return len(self.lengths)

    @property
    def num_documents(self) -> int:
        """D."""
        return len(self.document_index) - 1

    def sequence(self, index: int) -> np.ndarray:
        """The ids of one sequence, in the dtype of the file and without a copy."""
        first = int(self.offsets[index]) // self.tokens.itemsize
        return self.tokens[first : first + int(self.lengths[index])]

    def document_start(self, document: int) -> int:
        """The place in the concatenation of all sequences at which a document begins; D stands for its end."""
        sequence = int(self.document_index[document])
        if sequence == self.num_sequences:
            return self.num_tokens
        return int(self.offsets[sequence]) // self.tokens.itemsize if self.starts is None else int(self.starts[sequence])

    def documents_between(self, start: int, stop: int) -> np.ndarray:
        """Places in [start, stop) of the concatenation of all sequences at which a document begins, int64, in ascending order.

        Found by bisection: some tens of looks at the largest index.
        """
        first = bisect.bisect_left(range(self.num_documents), start, key=self.document_start)
        last = bisect.bisect_left(range(self.num_documents), stop, lo=first, key=self.document_start)
        return np.array([self.document_start(document) for document in range(first, last)], np.int64)

    def read(self, start: int, stop: int) -> np.ndarray:
        """Ids [start, stop) of the concatenation of all sequences, [stop-start] in the dtype of the file."""
        if self.starts is None:
            return self.tokens[start:stop]
        first = int(np.searchsorted(self.starts, start, side="right")) - 1
        last = int(np.searchsorted(self.starts, stop, side="left"))
        # Views, so that a window into long sequences copies no more than itself.
        parts = [
            self.sequence(index)[max(start - place, 0) : stop - place]
            for index, place in enumerate(self.starts[first:last].tolist(), first)
        ]
        return np.concatenate(parts) if parts else self.tokens[:0]


def without_ending(prefix: str) -> str:
    """PREFIX, also where PREFIX.bin or PREFIX.idx was written instead."""
    if prefix.endswith((".bin", ".idx")) and not os.path.exists(f"{prefix}.idx"):
        return prefix[:-4]
    return prefix


def token_dtype(vocabulary_size: int) -> np.dtype:
    """What Megatron stores ids of such a vocabulary in: uint16 up to 65536 ids, else int32."""
    return np.dtype("<u2" if vocabulary_size <= 1 << 16 else "<i4")


def open_indexed(prefix: str) -> IndexedDataset:
    """Map the pair PREFIX.bin and PREFIX.idx, checked against each other.

    Raises:
        InputError: a file is missing, unreadable, empty, cut off, of another format, or does not fit the other one.
    """
    index_path, data_path = f"{prefix}.idx", f"{prefix}.bin"
    index = _map(index_path, np.dtype("u1"))
    dtype, num_sequences, num_starts = _read_header(index_path, index)
    lengths_at = HEADER.size
    offsets_at = lengths_at + 4 * num_sequences
    documents_at = offsets_at + 8 * num_sequences
    lengths: np.ndarray = np.ndarray(num_sequences, "<i4", index, lengths_at)
    offsets: np.ndarray = np.ndarray(num_sequences, "<i8", index, offsets_at)
    document_index: np.ndarray = np.ndarray(num_starts, "<i8", index, documents_at)
    _check_documents(index_path, document_index, num_sequences)
    tokens = _map(data_path, dtype)
    num_tokens, contiguous = _check_sequences(prefix, lengths, offsets, dtype.itemsize)
    starts = None if contiguous else np.concatenate(([0], np.cumsum(lengths[:-1], dtype=np.int64)))
    return IndexedDataset(prefix, lengths, offsets, document_index, tokens, num_tokens, starts, read_record(prefix))


def read_record(prefix: str) -> TokenizerRecord | None:
    """What PREFIX.json records, or None where there is no such file."""
    path = Path(f"{prefix}.json")
    try:
        with open(path, "rb") as file:
            text = file.read(RECORD_BYTES + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from error
    try:
        values = json.loads(text)
        if not isinstance(values, dict):
            raise ValueError("it is not a JSON object")
        return from_dict(TokenizerRecord, values)
    except (ValueError, RecursionError) as error:
        why = "it is too large" if len(text) > RECORD_BYTES else error
        raise InputError(f"{path} is not the tokenizer record of {prefix}.bin ({why}); repair it, or move it away") from error


def _map(path: str, dtype: np.dtype) -> np.ndarray:
    """The whole items of a file, mapped; a plain array, for slices of np.memmap itself are slow to make."""
    try:
        size = os.path.getsize(path)
        if size < dtype.itemsize:
            raise InputError(f"{path} is empty; prepare it again" if size == 0 else f"{path} is cut off: it has {size} bytes")
        return np.memmap(path, dtype, "r", shape=(size // dtype.itemsize,)).view(np.ndarray)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from error


def _read_header(path: str, index: np.ndarray) -> tuple[np.dtype, int, int]:
    """(dtype of the tokens, sequences N, documents + 1), for which the index has exactly the right size."""
    if bytes(index[: len(MAGIC)]) != MAGIC[: len(index)]:
        raise InputError(f"{path} is not a Megatron index: it does not begin with {MAGIC!r}")
    if len(index) < HEADER.size:
        raise InputError(f"{path} is cut off: it has {len(index)} bytes, less than its header of {HEADER.size}")
    _, version, code, num_sequences, num_starts = HEADER.unpack(bytes(index[: HEADER.size]))
    if version != 1:
        raise InputError(f"{path} is of version {version}, but only version 1 is known")
    if code not in DTYPES:
        raise InputError(f"{path} has the dtype code {code}, but the codes are 1 to {max(DTYPES)}")
    dtype = np.dtype(DTYPES[code])
    if dtype.kind == "f":
        raise InputError(f"{path} says that {Path(path).stem}.bin holds {dtype.name}, but token ids are integers")
    size = HEADER.size + 12 * num_sequences + 8 * num_starts
    if len(index) != size:
        what = "is cut off" if len(index) < size else "goes on after its end"
        raise InputError(
            f"{path} {what}: it has {len(index)} bytes, but {num_sequences} sequences and {num_starts - 1} documents take {size}"
        )
    return dtype, num_sequences, num_starts


def _check_documents(path: str, document_index: np.ndarray, num_sequences: int) -> None:
    """Raise InputError unless the document index climbs from 0 to the number of sequences."""
    if len(document_index) == 0 or document_index[0] != 0 or document_index[-1] != num_sequences:
        ends = f"goes from {document_index[0]} to {document_index[-1]}" if len(document_index) else "is missing"
        raise InputError(f"{path} is damaged: its document index {ends}, but it must go from 0 to the {num_sequences} sequences")
    for first in range(0, len(document_index), PIECE):
        piece = document_index[first : first + PIECE + 1]
        wrong = np.flatnonzero(piece[1:] < piece[:-1])
        if len(wrong):
            raise InputError(f"{path} is damaged: document {first + wrong[0]} ends before it begins")


def _check_sequences(prefix: str, lengths: np.ndarray, offsets: np.ndarray, itemsize: int) -> tuple[int, bool]:
    """(tokens in all sequences, whether they fill PREFIX.bin in order from its first byte and without gaps).

    Raises:
        InputError: sequences overlap, lie outside PREFIX.bin or are not whole tokens, or there is no token at all.
    """
    size, end, num_tokens, contiguous = os.path.getsize(f"{prefix}.bin"), 0, 0, True
    for first in range(0, len(lengths), PIECE):
        begins = offsets[first : first + PIECE].astype(np.int64)
        counts = lengths[first : first + PIECE].astype(np.int64)
        # No sum below can overflow once each part of it is known to lie inside the file.
        _refuse(prefix, first, counts < 0, "has a negative length")
        _refuse(prefix, first, begins % itemsize != 0, f"does not begin at a multiple of the {itemsize} bytes of a token")
        _refuse(prefix, first, (begins < 0) | (begins > size), f"begins outside the {size} bytes of {prefix}.bin, which may be cut off")
        ends = begins + counts * itemsize
        _refuse(prefix, first, ends > size, f"ends after the {size} bytes of {prefix}.bin, which may be cut off")
        before = np.concatenate(([end], ends[:-1]))
        _refuse(prefix, first, begins < before, "begins before the one in front of it ends")
        contiguous = contiguous and bool((begins == before).all())
        end, num_tokens = int(ends[-1]), num_tokens + int(counts.sum())
    if num_tokens == 0:
        raise InputError(f"{prefix}.idx lists {len(lengths)} sequences without a single token; prepare it again")
    return num_tokens, contiguous


def _refuse(prefix: str, first: int, wrong: np.ndarray, what: str) -> None:
    where = np.flatnonzero(wrong)
    if len(where):
        raise InputError(f"{prefix}.idx does not fit {prefix}.bin: sequence {first + where[0]} {what}")
